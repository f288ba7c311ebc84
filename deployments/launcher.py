"""`loray serve`: a Ray and a Serve of its own on this machine, from first check to last process. Never touches another Ray.

Everything that can be refused is refused before Ray starts. Ray's processes share this one's fate, also when it is killed.
"""

import contextlib
import errno
import logging
import math
import os
import re
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import yaml
from pydantic import ValidationError
from ray import serve
from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

from loray.cluster.placement import total_cpus
from loray.deployments.config import ServerArgs
from loray.models.checkpoint import max_tensor_parallel, read_config, resolve_model

IMPORT_PATH = "loray.deployments.app:build"
OBJECT_STORE_BYTES = 128 << 20  # tokens and tensors never pass through Ray's object store
GRACE_S = 3.0  # for Serve to end its replicas by itself; then Ray ends them
POLL_S = 0.5
WATCH_S = 3.0


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


def launch(config: Path, overrides: Overrides) -> int:
    """Serve until a signal ends it. The exit code; LaunchError or CheckpointError when it can't start."""
    started = time.monotonic()
    signals = _Signals()
    plan = make_plan(config, overrides)
    _check_port(plan.deploy.http_options.host, plan.deploy.http_options.port)
    _check_model(plan.args)
    signals.may_raise = False  # from here on there are processes to end
    try:
        with _ray(plan.args):
            signals.install()  # Ray has put its own in place
            _say(f"starting {plan.args.model.id} with {plan.args.tensor_parallel_size} rank(s); logs are in {_logs()}")
            if _start(plan, signals):
                _announce(plan, time.monotonic() - started)
                _watch(plan, signals)
    finally:
        if signals.stop.is_set():
            _say("stopped")
    return 0


# --- what to start


def make_plan(config: Path, overrides: Overrides) -> Plan:
    """Read the file that `serve deploy` reads, by the same schema, and apply the command line."""
    try:
        tree = yaml.safe_load(config.read_text(encoding="utf-8"))
    except OSError as error:
        raise LaunchError(f"{config} can't be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise LaunchError(f"{config} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise LaunchError(f"{config} holds no Serve config: it needs `applications`")
    tree["http_options"] = {**(tree.get("http_options") or {}), **_given(host=overrides.host, port=overrides.port)}
    try:
        deploy = ServeDeploySchema.model_validate(tree)
    except ValidationError as error:
        raise LaunchError(*_readable(config, error)) from error
    application = _only_application(config, deploy)
    folder = config.resolve().parent
    try:
        args = ServerArgs.model_validate(_override(application.args, overrides, folder))
    except ValidationError as error:
        raise LaunchError(*_readable(config, error)) from error
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
    if isinstance(model, dict) and isinstance(model.get("id"), str) and (folder / model["id"]).is_dir():
        model = {**model, "id": str((folder / model["id"]).resolve())}  # replicas run in other folders
    return args if model is None else {**args, "model": model}


def _given(**values: object) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _readable(config: Path, error: ValidationError) -> list[str]:
    """One line a mistake, with the field's dotted name."""
    prefix = "args." if error.title == ServerArgs.__name__ else ""
    return [f"{config}: {prefix}{'.'.join(str(part) for part in one['loc'])}: {one['msg']}" for one in error.errors()]


# --- refusals before anything runs


def _check_port(host: str, port: int) -> None:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise LaunchError(f"http_options.host: {host} is no address of this machine: {error}") from error
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise LaunchError(f"port {port} is in use on {host}: choose another with PORT=9000 (make) or --port 9000") from error
            raise LaunchError(f"can't listen on {host} port {port}: {error.strerror}") from error


def _check_model(args: ServerArgs) -> None:
    config = read_config(resolve_model(args.model.id, args.model.revision, verify=True))
    limit = max_tensor_parallel(config)
    if args.tensor_parallel_size > limit:
        raise LaunchError(
            f"tensor_parallel_size: {args.tensor_parallel_size} is more than this model allows: it has {limit} attention heads"
        )


# --- running it


@contextlib.contextmanager
def _ray(args: ServerArgs) -> Iterator[None]:
    """A new Ray on this machine, with CPUs enough for the application however few the machine has."""
    device = "cpu" if args.device == "cpu" else "cuda"
    needed = args.driver.max_replicas * total_cpus(args.tensor_parallel_size, device, args.ingress.max_replicas)
    _quiet()
    try:
        ray.init(
            address="local",
            namespace="loray",
            num_cpus=max(os.cpu_count() or 1, math.ceil(needed)),
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        if args.device == "cuda" and ray.cluster_resources().get("GPU", 0) < args.tensor_parallel_size:
            gpus = ray.cluster_resources().get("GPU", 0)
            raise LaunchError(
                f"tensor_parallel_size: {args.tensor_parallel_size} rank(s) need as many GPUs, and this machine has {gpus:.0f}"
            )
        yield
    finally:
        ending = threading.Thread(target=_end_serve, daemon=True)  # Serve would wait for every open request
        ending.start()
        ending.join(GRACE_S)
        ray.shutdown()


def _end_serve() -> None:
    with contextlib.suppress(Exception):  # whatever it can't end, ray.shutdown ends
        serve.shutdown()


def _start(plan: Plan, signals: "_Signals") -> bool:
    """Deploy and wait for the first token. False when a signal came first."""
    deploy = plan.deploy
    serve.start(
        proxy_location=deploy.proxy_location,
        http_options=deploy.http_options.model_dump(),
        grpc_options=deploy.grpc_options.model_dump(),
        logging_config=deploy.logging_config,
    )
    deployed: Future[None] = Future()
    threading.Thread(target=_deploy, args=(plan, deployed), daemon=True).start()
    while not signals.stop.is_set():
        wait([deployed], timeout=POLL_S)
        if deployed.done():
            _raise_failure(deployed)
            if _answers(f"{plan.url}/startup"):
                return True
            time.sleep(0.1)
        elif reason := _startup_failure(plan.name):
            raise LaunchError(f"{reason}; logs are in {_logs()}")
    return False


def _deploy(plan: Plan, deployed: "Future[None]") -> None:
    from loray.deployments.app import build

    try:
        serve.run(build(plan.args), name=plan.name, route_prefix=plan.route_prefix)
        deployed.set_result(None)
    except Exception as error:
        deployed.set_exception(error)


def _raise_failure(deployed: "Future[None]") -> None:
    error = deployed.exception()
    if error is not None:
        raise LaunchError(f"{_reason(str(error)) or type(error).__name__}; logs are in {_logs()}") from error


def _startup_failure(name: str) -> str:
    """Why a replica failed to start, after its first try: Serve itself would try for minutes."""
    application = serve.status().applications.get(name)
    for deployment_name, deployment in (application.deployments if application else {}).items():
        if deployment.status_trigger == "REPLICA_STARTUP_FAILED":
            return f"{deployment_name} can't start: {_reason(deployment.message)}"
    return ""


def _reason(message: str) -> str:
    """The line of a traceback that says what happened, without the exception's module."""
    lines = [line for line in message.splitlines() if line.strip() and not line.startswith(" ")]
    return re.sub(r"^(?:\w+\.)+(?=\w+: )", "", lines[-1]) if lines else ""


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _announce(plan: Plan, seconds: float) -> None:
    key = f" -H 'Authorization: Bearer {plan.args.api_keys.inference}'" if plan.args.api_keys.inference else ""
    body = '{"inputs": "The capital of France is", "parameters": {"max_new_tokens": 16}}'
    print(f"loray: ready at {plan.url} after {seconds:.1f} s; Ctrl-C ends it. Try:")
    print(f"curl {plan.url}/generate{key} -H 'Content-Type: application/json' -d '{body}'", flush=True)


def _watch(plan: Plan, signals: "_Signals") -> None:
    """Wait for a signal and report every change of the application's state meanwhile."""
    last = "RUNNING"
    while not signals.stop.wait(WATCH_S):
        try:
            application = serve.status().applications.get(plan.name)
        except Exception as error:
            raise LaunchError(f"Ray is gone: {_reason(str(error))}") from error
        state = application.status if application else "deleted"
        if state != last:
            _say(f"the application is {state}{': ' + _reason(application.message) if application and application.message else ''}")
            last = state


class _Signals:
    """SIGINT, SIGTERM and SIGHUP ask to stop; a second one ends this process at once, and Ray's with it."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.may_raise = True
        self.install()

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        if self.stop.is_set():
            os._exit(130)
        self.stop.set()
        if self.may_raise:
            raise KeyboardInterrupt
        _say("stopping")


def _quiet() -> None:
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _logs() -> Path:
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir()) / context.get_session_name() / "logs"


def _say(line: str) -> None:
    print(f"loray: {line}", file=sys.stderr, flush=True)
