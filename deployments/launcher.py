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
from pathlib import Path

import ray
from ray import serve
from ray.exceptions import RayError

from loray.cluster.placement import total_cpus
from loray.deployments.config import ServerArgs
from loray.deployments.launch_plan import LaunchError, Overrides, Plan, make_plan
from loray.deployments.model_check import check_model
from loray.deployments.serve_transport import choose_grpc
from loray.models.checkpoint import CheckpointError

OBJECT_STORE_BYTES = 128 << 20  # tokens and tensors never pass through Ray's object store
POLL_S = 0.25
STATUS_S = 2.0  # asking Serve costs CPU that the replicas need to start
WATCH_S = 5.0
SILENT_S = 60.0  # without an answer, though all replicas run: somebody should look
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is on this machine, whatever http_proxy says


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
            address = ray.get_runtime_context().gcs_address
            _say(f"starting {plan.args.model.id} with {plan.args.tensor_parallel_size} rank(s) on Ray at {address}; logs are in {_logs()}")
            if _start(plan, signals):
                _announce(plan, time.monotonic() - started)
                _watch(plan, signals)
    finally:
        if signals.stop.is_set():
            _say("stopped")
    return 0


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
                other = 9000 if port != 9000 else 9001
                raise LaunchError(f"port {port} is in use on {host}: choose another with PORT={other} (make) or --port {other}") from error
            raise LaunchError(f"can't listen on {host} port {port}: {error.strerror}") from error


def _check_model(args: ServerArgs) -> None:
    try:
        check_model(args, verify=True)
    except ValueError as error:
        raise LaunchError(str(error)) from error


# --- running it


@contextlib.contextmanager
def _ray(args: ServerArgs) -> Iterator[None]:
    """A new Ray on this machine, with CPUs enough for the application however few the machine has."""
    device = "cpu" if args.device == "cpu" else "cuda"
    needed = args.driver.max_replicas * total_cpus(args.tensor_parallel_size, device, args.ingress.max_replicas)
    _quiet()
    choose_grpc()
    try:
        _init_ray(max(os.cpu_count() or 1, math.ceil(needed)))
        yield
    finally:
        ray.shutdown()  # and not serve.shutdown: that one waits for every open request


def _init_ray(num_cpus: int) -> None:
    try:
        ray.init(
            address="local",
            namespace="loray",
            num_cpus=num_cpus,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except OSError as error:
        raise LaunchError(f"Ray can't start: {error}; it needs a HOME and a RAY_TMPDIR where files can be written") from error
    except Exception as error:  # Ray's own have no other class, such as one for a node that did not start in time
        raise LaunchError(f"Ray can't start: {' '.join(str(error).split())}") from error


def _start(plan: Plan, signals: "_Signals") -> bool:
    """Deploy and wait for the first token. False when a signal came first."""
    from loray.deployments.app import build

    try:
        target = serve.RunTarget(build(plan.args), name=plan.name, route_prefix=plan.route_prefix)
    except (ValueError, CheckpointError) as error:
        raise LaunchError(str(error)) from error
    deploy = plan.deploy
    try:
        serve.start(
            proxy_location=deploy.proxy_location,
            http_options=deploy.http_options.model_dump(),
            grpc_options=deploy.grpc_options.model_dump(),
            logging_config=deploy.logging_config,
        )
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
    except RayError as error:
        raise LaunchError(f"Ray Serve can't start: {_reason(str(error))}; logs are in {_logs()}") from error
    checked = running_since = time.monotonic()
    while not signals.stop.wait(POLL_S):
        if _answers(f"{plan.url}/startup"):  # 404 from the proxy, and cheap, until there is an ingress
            return True
        if time.monotonic() - checked > STATUS_S:
            checked = time.monotonic()
            if not _are_running(plan.name):
                running_since = checked
            elif checked - running_since > SILENT_S:
                _say(f"all replicas run, but {plan.url} does not answer yet; logs are in {_logs()}")
                running_since = checked
    return False


def _are_running(name: str) -> bool:
    """All replicas. Fails as soon as one does: Serve itself would try again for minutes."""
    application = serve.status().applications.get(name)
    if application is None:
        return False
    for deployment_name, deployment in application.deployments.items():
        if deployment.status_trigger == "REPLICA_STARTUP_FAILED":
            raise LaunchError(f"{deployment_name} can't start: {_reason(deployment.message)}; logs are in {_logs()}")
    if application.status == "DEPLOY_FAILED":
        raise LaunchError(f"{_reason(application.message)}; logs are in {_logs()}")
    return application.status == "RUNNING"


def _reason(message: str) -> str:
    """What a traceback ends with, in one line and without the exception's module."""
    lines = message.strip().splitlines()
    ends = [index for index, line in enumerate(lines) if re.match(r"[\w.]+(Error|Exception)\b", line)]
    text = " ".join(" ".join(lines[ends[-1] if ends else 0 :]).split())
    return re.sub(r"^(\w+\.)+(?=\w+: )", "", text)


def _answers(url: str) -> bool:
    try:
        with DIRECT.open(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _announce(plan: Plan, seconds: float) -> None:
    key = " -H 'Authorization: Bearer <api_keys.inference>'" if plan.args.api_keys.inference else ""
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
        state = application.status.value if application else "deleted"
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
