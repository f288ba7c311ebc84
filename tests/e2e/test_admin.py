"""The adapters' life cycle against a running application with two driver replicas: HTTP, Python handle and command line."""

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
import ray
from ray import serve
from ray.exceptions import RayActorError

from loray.deployments.adapter_registry import News, Poll
from loray.deployments.cli import main
from loray.deployments.errors import AdapterFailed
from loray.deployments.registry_actor import NAMESPACE, registry_name
from tests.e2e.conftest import App
from tests.e2e.patience import PATIENCE_S
from tests.models.tiny_llama import save_adapter

pytestmark = pytest.mark.slow

NAME = "admin"
ADMIN = {"Authorization": "Bearer open"}
PROMPT = "hello world, this is"


@pytest.fixture(scope="module")
def root(tiny_adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root of this module's own: tests change adapters in it."""
    return Path(shutil.copytree(tiny_adapters, tmp_path_factory.mktemp("admin") / "adapters"))


@pytest.fixture(scope="module")
def app(start_app: Callable[..., Any], tiny_model: Path, root: Path) -> Iterator[App]:
    args = {"model": {"id": str(tiny_model)}, "adapters": {"local_roots": [root], "max_waiting": 8}, "api_keys": {"admin": "open"}}
    args["scheduler"] = {"max_running": 2}
    with start_app(NAME, **args, driver={"min_replicas": 2, "max_replicas": 2}) as app:
        wait_until(has_registry)
        yield app
    wait_until(lambda: not has_registry())


def ask(app: App, method: str, path: str = "", **kwargs: Any) -> httpx.Response:
    return httpx.request(method, f"{app.url}/admin/adapters{path}", headers=ADMIN, timeout=PATIENCE_S, **kwargs)


def adapters(app: App) -> dict[str, dict[str, Any]]:
    """By id; while replicas come and go nobody may be there to ask."""
    response = ask(app, "GET")
    return {adapter["adapter_id"]: adapter for adapter in response.json()["adapters"]} if response.status_code == 200 else {}


def wait_until(claim: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.2)


def token_ids(app: App, adapter_id: str) -> list[int]:
    parameters = {"adapter_id": adapter_id, "max_new_tokens": 12, "ignore_eos_token": True, "details": True}
    response = app.post("/generate", {"inputs": PROMPT, "parameters": parameters})
    assert response.status_code == 200, response.text
    return [token["id"] for token in response.json()["details"]["tokens"]]


def replica_pids(deployment: str) -> list[int]:
    """Processes of this application's replicas, which are below this one: the cluster is the test's own."""
    pids = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if f"ServeReplica:{NAME}:{deployment}" in " ".join(process.cmdline()):
                pids.append(process.pid)
    return pids


def has_registry() -> bool:
    return {"name": registry_name(NAME), "namespace": NAMESPACE} in ray.util.list_named_actors(all_namespaces=True)


def epoch_of_registry() -> str:
    """Empty while it is not there."""
    poll = msgspec.msgpack.encode(Poll(replica_id="a test", epoch="another"))
    with contextlib.suppress(RayActorError):
        news = ray.get(ray.get_actor(registry_name(NAME), NAMESPACE).changes.remote(poll))
        return msgspec.msgpack.decode(news, type=News).epoch
    return ""


def kill_registry() -> None:
    before = epoch_of_registry()
    ray.kill(ray.get_actor(registry_name(NAME), NAMESPACE), no_restart=False)
    wait_until(lambda: epoch_of_registry() not in ("", before))


def kill_all(deployment: str) -> None:
    before = set(replica_pids(deployment))
    assert before
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not before & set(replica_pids(deployment)) and len(replica_pids(deployment)) == len(before))


def test_the_key_is_the_admins_own(app: App) -> None:
    assert app.get("/admin/adapters").status_code == 401
    assert app.get("/admin/adapters", headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert app.get("/v1/models").status_code == 200


def test_load_pin_and_unload_reach_every_replica(app: App) -> None:
    response = ask(app, "POST", json={"adapter_id": "a8", "pin": True})
    assert response.status_code == 200, response.text
    (loaded,) = response.json()["adapters"]
    assert loaded["state"] in ("host", "gpu") and loaded["rank"] == 8 and loaded["is_pinned"] and loaded["host_bytes"] > 0
    with ThreadPoolExecutor(8) as clients:
        assert len({tuple(ids) for ids in clients.map(lambda _: token_ids(app, "a8"), range(8))}) == 1
    assert adapters(app)["a8"]["num_served"] == 8, "requests of both replicas count"
    assert not ask(app, "POST", "/a8/unpin").json()["adapters"][0]["is_pinned"]
    assert ask(app, "DELETE", "/a8").status_code == 200
    wait_until(lambda: "a8" not in adapters(app))
    stats = app.wait_until(lambda stats: stats["adapters_resident"] == 0)
    assert stats["adapter_pages_used"] == 0


def test_a_load_that_fails_says_why_and_leaves_nothing(app: App, root: Path) -> None:
    shutil.copytree(root / "a4", root / "torn", dirs_exist_ok=True)
    (root / "torn" / "adapter_model.safetensors").write_bytes(b"torn")
    for adapter_id in ("torn", "nobody", "../a4"):
        response = ask(app, "POST", json={"adapter_id": adapter_id})
        assert 400 <= response.status_code < 500 and adapter_id in response.json()["error"]
    assert token_ids(app, "a4")


def test_reload_gives_new_requests_the_new_version(app: App, tiny_model: Path, root: Path) -> None:
    save_adapter(tiny_model, root / "moving", seed=1, r=8, lora_alpha=8)
    first = ask(app, "POST", json={"adapter_id": "moving"}).json()["adapters"][0]["version"]
    before = token_ids(app, "moving")
    shutil.rmtree(root / "moving")
    shutil.copytree(root / "a20", root / "moving")
    versions = {adapter["version"] for adapter in ask(app, "POST", "/moving/reload").json()["adapters"]}
    assert versions - {first}
    with ThreadPoolExecutor(8) as clients:
        after = {tuple(ids) for ids in clients.map(lambda _: token_ids(app, "moving"), range(8))}
    assert after == {tuple(token_ids(app, "a20"))} != {tuple(before)}


def test_the_python_handle_does_the_same(app: App) -> None:
    handle = serve.get_app_handle(NAME)
    (loaded,) = handle.adapters_load.remote({"adapter_id": "a64"}).result()["adapters"]
    assert loaded["rank"] == 64
    assert handle.adapters_pin.remote("a64").result()["adapters"][0]["is_pinned"]
    assert not handle.adapters_unpin.remote("a64").result()["adapters"][0]["is_pinned"]
    assert handle.adapters_reload.remote("a64").result()["adapters"][0]["version"] == loaded["version"]
    assert "a64" in [adapter["adapter_id"] for adapter in handle.adapters_list.remote().result()["adapters"]]
    handle.adapters_unload.remote("a64").result()
    wait_until(lambda: "a64" not in adapters(app))
    with pytest.raises(AdapterFailed, match="nobody"):
        handle.adapters_load.remote({"adapter_id": "nobody"}).result()


def test_the_command_line_does_the_same(app: App, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--url", app.url, "--key", "open"]
    assert main(["adapters", "load", "a20", "--pin", *options]) == 0
    assert "pinned" in capsys.readouterr().out
    assert main(["adapters", "list", "--json", *options]) == 0
    assert "a20" in [adapter["adapter_id"] for adapter in json.loads(capsys.readouterr().out)["adapters"]]
    for action, is_pinned in (("unpin", False), ("pin", True), ("reload", True)):
        assert main(["adapters", action, "a20", "--json", *options]) == 0
        assert [one["is_pinned"] for one in json.loads(capsys.readouterr().out)["adapters"]] == [is_pinned]
    assert main(["adapters", "unload", "a20", *options]) == 0
    assert main(["adapters", "load", "nobody", *options]) == 1
    assert "nobody" in capsys.readouterr().err


def test_too_many_who_wait_for_one_adapter_are_asked_to_come_again_and_keep_nobody_else_waiting(app: App) -> None:
    def answer(adapter_id: str, max_new_tokens: int) -> httpx.Response:
        parameters = {"adapter_id": adapter_id, "max_new_tokens": max_new_tokens, "ignore_eos_token": True}
        return app.post("/generate", {"inputs": PROMPT, "parameters": parameters})

    with ThreadPoolExecutor(50) as clients:
        flood = [clients.submit(answer, "a8", 300) for _ in range(44)]
        others = [clients.submit(answer, "a4", 8) for _ in range(2)]
        answers = [call.result() for call in flood]
        assert [call.result().status_code for call in others] == [200] * 2
    refused = [answer for answer in answers if answer.status_code != 200]
    assert 0 < len(refused) < len(answers)
    for answer in refused:
        assert answer.status_code == 429 and int(answer.headers["Retry-After"]) > 0 and "a8" in answer.json()["error"]


def test_what_is_unloaded_while_it_is_used_is_gone_with_its_last_request_though_all_drivers_are_lost(app: App) -> None:
    parameters = {"adapter_id": "a8", "max_new_tokens": 900, "ignore_eos_token": True}
    with ThreadPoolExecutor(4) as clients:
        answers = [clients.submit(app.post, "/generate", {"inputs": "hello", "parameters": parameters}) for _ in range(4)]
        wait_until(lambda: adapters(app).get("a8", {}).get("num_running", 0) == 4)
        assert ask(app, "DELETE", "/a8").status_code == 200
        kill_all("Driver")
        assert [answer.result().status_code for answer in answers] == [200] * 4
    wait_until(lambda: "a8" not in adapters(app))


@pytest.mark.parametrize(
    "losses", [["registry", "Driver"], *(pytest.param([name], marks=pytest.mark.soak) for name in ("Driver", "Ingress"))]
)
def test_the_set_survives_the_loss_of_replicas(app: App, losses: list[str]) -> None:
    """After the registry's loss only the drivers have the set, after the drivers' only the registry."""
    assert ask(app, "POST", json={"adapter_id": "a4", "pin": True}).status_code == 200
    for name in losses:
        kill_registry() if name == "registry" else kill_all(name)
        wait_until(lambda: ask(app, "GET").status_code == 200)
    wait_until(lambda: adapters(app).get("a4", {}).get("is_pinned", False))
    unpinned = ask(app, "POST", "/a4/unpin")
    assert unpinned.status_code == 200 and not unpinned.json()["adapters"][0]["is_pinned"]
