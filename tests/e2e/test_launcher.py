"""`loray serve` as its user sees it: what it prints, what it refuses, and that nothing of it is left when it ends."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import yaml
from safetensors.numpy import save_file

from loray.deployments.serve_transport import ENVIRONMENT
from tests.e2e.patience import PATIENCE_S

pytestmark = pytest.mark.slow

STOP_S = 60
RAY_AGENTS = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}  # after a SIGKILL these two try for a minute to report it to the dead


class Launcher:
    """One `loray serve` in a process group of its own, as a shell gives it."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "loray.deployments.cli", "serve", *arguments]
        env = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT} | {"RAY_AUTH_MODE": "disabled"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True)
        self.stdout: list[str] = []
        self.stderr: list[str] = []
        self.ready = threading.Event()
        self.names: dict[psutil.Process, str] = {}
        assert self.process.stdout is not None and self.process.stderr is not None
        self._threads = [
            threading.Thread(target=self._read, args=(self.process.stdout, self.stdout), daemon=True),
            threading.Thread(target=self._read, args=(self.process.stderr, self.stderr), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, stream: "Iterator[str]", lines: list[str]) -> None:
        for line in stream:
            lines.append(line.rstrip("\n"))
            if line.startswith("curl "):
                self.ready.set()

    def wait_ready(self) -> str:
        deadline = time.monotonic() + PATIENCE_S
        while not self.ready.wait(0.2):
            assert self.process.poll() is None, self.stderr
            assert time.monotonic() < deadline, self.stderr
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                self.names[child] = child.name()
        self.children = list(self.names)
        return self.stdout[0].split()[3]

    def environment(self, title: str) -> dict[str, str]:
        """Of a process that it started."""
        return next(child.environ() for child in self.children if child.cmdline() and child.cmdline()[0].startswith(title))

    def wait_ended(self, seconds: float = STOP_S) -> int:
        code = self.process.wait(seconds)
        for thread in self._threads:
            thread.join(5)
        return code

    def survivors(self, except_for: Container[str] = ()) -> list[str]:
        awaited = [child for child in self.children if self.names[child] not in except_for]
        _, alive = psutil.wait_procs(awaited, timeout=STOP_S)
        return [self.names[process] for process in alive if process.is_running()]


@contextmanager
def launched(*arguments: str) -> Iterator[Launcher]:
    launcher = Launcher(*arguments)
    try:
        yield launcher
    finally:
        if launcher.process.poll() is None:
            launcher.process.kill()
            launcher.process.wait()


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path) -> Path:
    args = {
        "model": {"id": str(tiny_model)},
        "device": "cpu",
        "kv_cache": {"cpu_bytes": "16MiB"},
        "adapters": {"gpu_bytes": "4MiB"},
        "ingress": {"max_replicas": 1},
    }
    application = {"name": "loray", "route_prefix": "/", "import_path": "loray.deployments.app:build", "args": args}
    path = tmp_path / "serve_config.yaml"
    path.write_text(yaml.safe_dump({"http_options": {"host": "127.0.0.1", "port": free_port()}, "applications": [application]}))
    return path


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_it_says_once_that_it_is_ready_and_ctrl_c_ends_everything_it_started(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy for the world outside, which has no way back here, changes nothing."""
    path = os.environ["PATH"]
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    with launched("--config", str(config)) as launcher:
        launcher.wait_ready()
        answer = subprocess.run(launcher.stdout[1], shell=True, capture_output=True, text=True, check=True, env={"PATH": path})
        assert json.loads(answer.stdout)["generated_text"]
        for title in ("ray::Proxy", "ray::ServeReplica:loray:Ingress"):  # both ends have to agree on how they talk
            assert launcher.environment(title).items() >= ENVIRONMENT.items()
        os.killpg(launcher.process.pid, signal.SIGINT)  # as a terminal does: to the whole group
        assert launcher.wait_ended() == 0
        assert launcher.survivors() == []
        assert len(launcher.stdout) == 2
        assert launcher.stderr[-2:] == ["loray: stopping", "loray: stopped"]
        assert all(line.startswith("loray: ") for line in launcher.stderr)


@pytest.mark.soak
def test_sigterm_ends_three_ranks_at_once_although_a_stream_is_open(config: Path) -> None:
    with launched("--config", str(config), "--tensor-parallel-size", "3", "--port", str(free_port())) as launcher:
        url = launcher.wait_ready()
        assert httpx.get(f"{url}/info", timeout=PATIENCE_S).json()["tensor_parallel_size"] == 3
        body = {"inputs": "a", "parameters": {"max_new_tokens": 2000, "ignore_eos_token": True}}
        with httpx.stream("POST", f"{url}/generate_stream", json=body, timeout=PATIENCE_S) as stream:
            next(stream.iter_lines())
            launcher.process.terminate()
            assert launcher.wait_ended() == 0
        assert launcher.survivors() == []


def test_killing_it_leaves_no_rank_replica_or_ray_behind(config: Path) -> None:
    with launched("--config", str(config)) as launcher:
        url = launcher.wait_ready()
        launcher.process.kill()
        launcher.process.wait()
        assert not launcher.survivors(except_for=RAY_AGENTS)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
        for process in launcher.children:
            if process.is_running():
                process.kill()


@pytest.mark.soak
def test_weights_that_can_not_be_loaded_end_it_with_one_line(config: Path, tiny_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    save_file({"other.weight": np.zeros(1)}, broken / "model.safetensors")
    with launched("--config", str(config), "--model", str(broken)) as launcher:
        assert launcher.wait_ended(PATIENCE_S) == 1
        assert launcher.stdout == []
        assert "can't start" in launcher.stderr[-1]
        assert "unexpected other.weight" in launcher.stderr[-1]
        assert not psutil.pid_exists(launcher.process.pid)


def refusal(*arguments: str) -> str:
    """The one line it prints when it does not even start Ray."""
    with launched(*arguments) as launcher:
        assert launcher.wait_ended(60) == 1
        assert launcher.stdout == []
        assert len(launcher.stderr) == 1, launcher.stderr
        return launcher.stderr[0]


def test_a_port_in_use_is_refused(config: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        line = refusal("--config", str(config), "--port", str(port))
    assert line.startswith(f"loray: port {port} is in use")
    assert "PORT=9000" in line


def test_more_ranks_than_attention_heads_are_refused(config: Path) -> None:
    assert "7 is more than this model allows: it has 6 attention heads" in refusal("--config", str(config), "--tensor-parallel-size", "7")


def test_a_folder_that_is_no_model_is_refused(config: Path, tmp_path: Path) -> None:
    assert "lacks config.json" in refusal("--config", str(config), "--model", str(tmp_path))


def test_a_file_that_is_no_model_is_refused(config: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"not a model")
    assert "model.gguf: not a GGUF file" in refusal("--config", str(config), "--model", str(tmp_path / "model.gguf"))


def test_weights_that_hold_nothing_are_refused(config: Path, tiny_model: Path, tmp_path: Path) -> None:
    empty = shutil.copytree(tiny_model, tmp_path / "empty")
    (empty / "model.safetensors").write_bytes(b"")
    assert "model.safetensors is empty" in refusal("--config", str(config), "--model", str(empty))


def test_a_mistake_in_the_file_is_refused_by_the_name_of_its_field(config: Path) -> None:
    config.write_text(config.read_text().replace("cpu_bytes", "cpu_byte"))
    assert "args.kv_cache.cpu_byte: Extra inputs are not permitted" in refusal("--config", str(config))


def test_where_ray_can_write_nothing_one_line_says_so(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/proc/nowhere")
    assert "Ray can't start: " in refusal("--config", str(config))


def test_a_port_out_of_range_is_refused_by_the_command_line() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "loray.deployments.cli", "serve", "--port", "99999"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "99999 is not a port" in result.stderr


def test_fetch_prints_the_models_folder(tiny_model: Path) -> None:
    command = [sys.executable, "-m", "loray.deployments.cli", "fetch", str(tiny_model)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"{tiny_model}\n"
