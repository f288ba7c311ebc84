"""What `loray serve` is to start: the config file that `serve deploy` reads, and the command line over it. Starts nothing."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

from loray.deployments.config import ServerArgs

IMPORT_PATH = "loray.deployments.app:build"


class LaunchError(Exception):
    """Serving can't start; each line says one reason."""

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the command line says instead of the config file; None says nothing."""

    model: str | None = None
    tensor_parallel_size: int | None = None
    host: str | None = None
    port: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What to start: checked, and with every path absolute."""

    args: ServerArgs
    name: str
    route_prefix: str
    deploy: ServeDeploySchema

    @property
    def url(self) -> str:
        http = self.deploy.http_options
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(http.host, http.host)
        return f"http://{host}:{http.port}{http.root_path}{self.route_prefix.rstrip('/')}"


def make_plan(config: Path, overrides: Overrides) -> Plan:
    """Read the file that `serve deploy` reads, by the same schema, and apply the command line."""
    try:
        tree = yaml.safe_load(config.read_text(encoding="utf-8"))
    except OSError as error:
        raise LaunchError(f"{config} can't be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise LaunchError(f"{config} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise LaunchError(f"{config} holds no Serve config: it needs `applications`")
    tree["http_options"] = {**(tree.get("http_options") or {}), **_given(host=overrides.host, port=overrides.port)}
    try:
        deploy = ServeDeploySchema.model_validate(tree)
    except ValidationError as error:
        raise LaunchError(*_readable(config, overrides, error)) from error
    application = _only_application(config, deploy)
    folder = config.resolve().parent
    try:
        args = ServerArgs.model_validate(_override(application.args, overrides, folder))
    except ValidationError as error:
        raise LaunchError(*_readable(config, overrides, error)) from error
    roots = [folder / root for root in args.adapters.local_roots]  # an absolute one stays as it is
    args = args.model_copy(update={"adapters": args.adapters.model_copy(update={"local_roots": roots})})
    return Plan(args, application.name, application.route_prefix or "/", deploy)


def _only_application(config: Path, deploy: ServeDeploySchema) -> ServeApplicationSchema:
    if len(deploy.applications) != 1 or deploy.applications[0].import_path != IMPORT_PATH:
        raise LaunchError(f"{config}: applications: must be one application, with import_path {IMPORT_PATH}")
    application = deploy.applications[0]
    if application.deployments or application.runtime_env:
        raise LaunchError(f"{config}: applications[0]: deployments and runtime_env are for `serve deploy`; `loray serve` reads args alone")
    return application


def _override(args: dict[str, Any], overrides: Overrides, folder: Path) -> dict[str, Any]:
    args = {**args, **_given(tensor_parallel_size=overrides.tensor_parallel_size)}
    model = args.get("model")
    if overrides.model is not None:  # the file's revision belongs to the file's model
        model = {**(model if isinstance(model, dict) else {}), "id": overrides.model, "revision": None}
        folder = Path.cwd()
    if isinstance(model, dict) and isinstance(model.get("id"), str) and (folder / model["id"]).exists():
        model = {**model, "id": str((folder / model["id"]).resolve())}  # replicas run in other folders
    return args if model is None else {**args, "model": model}


def _given(**values: object) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _readable(config: Path, overrides: Overrides, error: ValidationError) -> list[str]:
    """One line a mistake, with where it stands and the field's dotted name."""
    prefix = "args." if error.title == ServerArgs.__name__ else ""
    lines = []
    for mistake in error.errors():
        *_, field = mistake["loc"] or ("",)
        where = config if getattr(overrides, str(field), None) is None else "on the command line"
        lines.append(f"{where}: {prefix}{'.'.join(str(part) for part in mistake['loc'])}: {mistake['msg']}")
    return lines
