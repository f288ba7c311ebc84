"""`serve deploy` to a Ray cluster that runs already: the same application, and a mistake leaves the old version serving."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from tests.e2e.conftest import free_port
from tests.e2e.patience import PATIENCE_S

pytestmark = pytest.mark.slow

BIN = Path(sys.executable).parent


class Cluster:
    """A head node with its dashboard, on ports of its own, in the foreground of a process of ours."""

    def __init__(self, folder: Path) -> None:
        self.dashboard, self.http = free_port(), free_port()
        ports = [f"--port={free_port()}", f"--dashboard-port={self.dashboard}", f"--dashboard-agent-listen-port={free_port()}"]
        command = [BIN / "ray", "start", "--head", "--block", "--num-cpus=4", "--include-dashboard=true", "--disable-usage-stats", *ports]
        environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
        environment.pop("RAY_ADDRESS", None)
        with open(folder / "ray.log", "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=folder)
        self.environment = environment | {"RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{self.dashboard}"}

    def serve(self, *arguments: str) -> str:
        finished = subprocess.run([BIN / "serve", *arguments], capture_output=True, text=True, env=self.environment)
        return finished.stdout + finished.stderr

    def printed_status(self) -> dict[str, Any]:
        """Of the application, as `serve status` tells it."""
        text = self.serve("status")
        return dict(yaml.safe_load(text[text.index("proxies:") :])["applications"]["loray"])

    def status(self) -> dict[str, Any]:
        """The same from the dashboard, which takes no two seconds."""
        answer = httpx.get(f"http://127.0.0.1:{self.dashboard}/api/serve/applications/", timeout=PATIENCE_S)
        return dict(answer.json()["applications"].get("loray", {})) if answer.status_code == 200 else {}


def wait_for(condition: Callable[[], bool], what: str, seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"never {what}"
        time.sleep(0.5)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    wait_for(lambda: _answers(f"http://127.0.0.1:{cluster.dashboard}/api/version"), "a dashboard")
    yield cluster
    for process in [*psutil.Process(cluster.process.pid).children(recursive=True), cluster.process]:
        process.kill()
    cluster.process.wait(30)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def test_a_good_config_is_served_with_what_admins_want_and_a_bad_one_is_refused_by_field_while_the_old_goes_on(
    cluster: Cluster, tiny_model: Path, tiny_adapters: Path, tmp_path: Path
) -> None:
    config = yaml.safe_load((Path(__file__).parents[2] / "serve_config.yaml").read_text())
    config["http_options"]["port"] = cluster.http
    application = config["applications"][0]
    application["args"] |= {"model": {"id": str(tiny_model)}, "device": "cpu", "api_keys": {"admin": "open"}}
    application["args"]["adapters"] = {"local_roots": [str(tiny_adapters)]}
    file = tmp_path / "serve_config.yaml"

    def deploy(**args: Any) -> None:
        file.write_text(yaml.safe_dump(config | {"applications": [application | {"args": application["args"] | args}]}))
        cluster.serve("deploy", str(file))

    def generates() -> bool:
        body = {"inputs": "hello", "parameters": {"max_new_tokens": 2}}
        return httpx.post(f"http://127.0.0.1:{cluster.http}/generate", json=body, timeout=PATIENCE_S).status_code == 200

    def pinned(method: str, **body: Any) -> list[str]:
        url, headers = f"http://127.0.0.1:{cluster.http}/admin/adapters", {"Authorization": "Bearer open"}
        answer = httpx.request(method, url, headers=headers, timeout=PATIENCE_S, **body)
        return [adapter["adapter_id"] for adapter in answer.json().get("adapters", []) if adapter["is_pinned"]]

    deploy()
    wait_for(lambda: cluster.status().get("status") == "RUNNING", "running")
    assert all(deployment["status"] == "HEALTHY" for deployment in cluster.printed_status()["deployments"].values())
    assert generates()
    assert pinned("POST", json={"adapter_id": "a4", "pin": True}) == ["a4"]
    mistakes: dict[str, Any] = {  # one for each who looks: the tree itself, the cluster, the model
        "tensor_parallel_sise": 2,
        "device": "cuda",
        "model.chat_template": {"id": str(tiny_model), "chat_template": "{% if"},
    }
    for field, value in mistakes.items():
        mistake = {field.partition(".")[0]: value}
        deploy(**mistake)
        wait_for(lambda: cluster.status().get("status") == "DEPLOY_FAILED", "refused")
        assert ("need 1 GPUs" if field == "device" else field) in cluster.status()["message"]
        assert generates(), "the old version goes on serving"
    deploy(scheduler={"max_running": 7}, limits={"max_concurrent_requests": 7})
    wait_for(lambda: cluster.status().get("status") == "RUNNING", "running again")
    info = f"http://127.0.0.1:{cluster.http}/info"
    wait_for(lambda: httpx.get(info, timeout=PATIENCE_S).json()["max_concurrent_requests"] == 7, "updated")
    wait_for(lambda: pinned("GET") == ["a4"], "what admins want brought to the new driver")
