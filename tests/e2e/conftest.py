"""One Ray cluster for all tests here; an application is started for as long as its module needs it."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray import serve

from loray.deployments.app import build
from loray.deployments.config import ServerArgs
from loray.deployments.serve_transport import choose_grpc
from loray.models.converted import cache_folder
from tests.deployments.file_server import HubServer
from tests.e2e.patience import PATIENCE_S
from tests.models.tiny_llama import save_adapter, save_llama
from tests.tiny_tokenizer import save_tiny_tokenizer, tiny_tokenizer

TINY_TOTAL_TOKENS = 2048


@dataclass
class App:
    name: str
    url: str

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=PATIENCE_S)

    def get(self, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
        return httpx.get(self.url + path, headers=headers, timeout=PATIENCE_S)

    def ask_driver(self, method: str) -> Any:
        return getattr(serve.get_deployment_handle("Driver", self.name), method).remote().result(timeout_s=PATIENCE_S)

    def wait_until(self, condition: Callable[[dict[str, float]], bool], seconds: float = PATIENCE_S) -> dict[str, float]:
        """The driver's numbers, once they are as they should be."""
        deadline = time.monotonic() + seconds
        while not condition(stats := self.ask_driver("stats")):
            assert time.monotonic() < deadline, f"still {stats}"
            time.sleep(0.05)
        return stats

    def wait_until_idle(self) -> dict[str, float]:
        """Everything that was taken has been given back."""
        counts = ("running", "waiting", "kv_blocks_used", "adapter_references")
        return self.wait_until(lambda stats: not any(stats[count] for count in counts))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Downloads stay out of the user's cache. Converted models are the user's own: each takes long to make."""
    models, folder = cache_folder() / "models", tmp_path_factory.mktemp("cache")
    models.mkdir(parents=True, exist_ok=True)
    (folder / "loray").mkdir()
    (folder / "loray" / "models").symlink_to(models.resolve(), target_is_directory=True)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    """What the cluster takes for the Hugging Face hub."""
    server = HubServer(tmp_path_factory.mktemp("hub"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def serve_url(own_cache: Path, hub: HubServer) -> Iterator[str]:
    os.environ["RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S"] = "1"
    choose_grpc()
    with pytest.MonkeyPatch.context() as environment:  # the cluster's alone
        hub.stand_in(environment, own_cache / "hub")
        ray.init(address="local", include_dashboard=False, num_cpus=8, log_to_driver=False)
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="session")
def start_app(serve_url: str) -> Callable[..., Any]:
    @contextmanager
    def start(name: str, **args: Any) -> Iterator[App]:
        serve.run(build(ServerArgs.model_validate({"device": "cpu", **args})), name=name, route_prefix=f"/{name}")
        try:
            yield App(name, f"{serve_url}/{name}")
        finally:
            serve.delete(name)

    return start


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("e2e") / "tiny"
    save_tiny_tokenizer(folder)
    eos_id = tiny_tokenizer().eos_token_id
    return save_llama(folder, vocab_size=len(tiny_tokenizer()), max_position_embeddings=TINY_TOTAL_TOKENS, eos_token_id=eos_id)


@pytest.fixture(scope="session")
def tiny_adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with a4, a8, … by rank."""
    root = tmp_path_factory.mktemp("adapters")
    for rank in (4, 8, 20, 64):
        save_adapter(tiny_model, root / f"a{rank}", seed=rank, r=rank, lora_alpha=rank)
    return root
