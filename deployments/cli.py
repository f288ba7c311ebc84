"""The `loray` command. Reads the command line; the work is in launcher.py, models/checkpoint.py and adapters_cli.py."""

import argparse
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from loray.deployments import adapters_cli
from loray.models.checkpoint import BUNDLED, CheckpointError, resolve_model

DEFAULT_CONFIG = Path("serve_config.yaml")


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        return COMMANDS[options.command](options)
    except (CheckpointError, adapters_cli.AdminError) as error:
        print(f"loray: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("loray: stopped", file=sys.stderr)
        return 130


def _serve(options: argparse.Namespace) -> int:
    # Ray 2.60 would turn token authentication on by itself, and say so at length; it must be chosen before Ray is imported.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    from loray.deployments.launch_plan import LaunchError, Overrides
    from loray.deployments.launcher import launch

    overrides = Overrides(options.model, options.tensor_parallel_size, options.host, options.port)
    try:
        return launch(options.config, overrides)
    except LaunchError as error:
        for line in error.lines:
            print(f"loray: {line}", file=sys.stderr)
        return 1


def _fetch(options: argparse.Namespace) -> int:
    print(resolve_model(options.model, options.revision, verify=True))
    return 0


COMMANDS = {"serve": _serve, "fetch": _fetch, "adapters": adapters_cli.run}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """In one line, as every other error."""
        self.exit(2, f"loray: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="loray", description="LoRA on Ray: one base model and thousands of LoRA adapters.")
    parser.add_argument("--version", action="version", version=f"loray {version('loray')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    model_help = f"a bundled name ({', '.join(BUNDLED)}), a folder in Hugging Face format, a GGUF file, or a Hugging Face id"

    serve = commands.add_parser(
        "serve",
        help="serve on this machine until Ctrl-C",
        description="Starts a Ray of its own on this machine, serves the application of the config file in it, and ends both on Ctrl-C. "
        "To serve from a running cluster, use `serve deploy CONFIG` instead: it takes the same file.",
    )
    serve.add_argument("--config", type=Path, default=DEFAULT_CONFIG, metavar="FILE", help="default: %(default)s")
    serve.add_argument("--model", help=f"instead of args.model.id: {model_help}")
    serve.add_argument(
        "--tensor-parallel-size", type=int, metavar="N", help="instead of args.tensor_parallel_size: ranks that share one model"
    )
    serve.add_argument("--host", help="instead of http_options.host; 0.0.0.0 for every network interface")
    serve.add_argument("--port", type=_port, help="instead of http_options.port")

    fetch = commands.add_parser(
        "fetch", help="get a model and print its folder", description="Fetches and checks a model; prints its folder."
    )
    fetch.add_argument("model", nargs="?", default=next(iter(BUNDLED)), metavar="MODEL", help=f"{model_help}; default: %(default)s")
    fetch.add_argument("--revision", help="branch, tag or commit of a Hugging Face id")
    adapters_cli.add_parser(commands)
    return parser


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text} is not a port: 1 to 65535")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
