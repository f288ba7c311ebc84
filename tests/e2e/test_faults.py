"""Processes killed or frozen in the middle of streams: nobody hangs, the streams go on, nothing is left behind."""

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.conftest import App
from tests.e2e.oracle import Oracle
from tests.e2e.patience import PATIENCE_S

pytestmark = pytest.mark.slow

NEW_TOKENS = 600  # long enough that no stream ends before the disaster
SAMPLING = {"temperature": 0.8, "seed": 7}
STREAMS = [  # adapter, prompt, sampling
    (adapter_id, f"stream {i}", SAMPLING if i % 2 else {}) for i, adapter_id in enumerate(["", "a4", "a8", "a20", "a64", "", "a4", "a8"])
]


@pytest.fixture(scope="module")
def app(start_app: Callable[..., Any], tiny_model: Path, tiny_adapters: Path) -> Iterator[App]:
    with start_app("faults", model={"id": str(tiny_model)}, tensor_parallel_size=2, adapters={"local_roots": [tiny_adapters]}) as app:
        yield app


@pytest.fixture(scope="module")
def oracle(tiny_model: Path, tiny_adapters: Path) -> Oracle:
    return Oracle(tiny_model, {name: tiny_adapters / name for name in ("a4", "a8", "a20", "a64")})


class StreamFailed(Exception):
    """An error event came in place of a token."""


async def stream(
    client: httpx.AsyncClient, app: App, adapter_id: str, prompt: str, sampling: dict[str, Any], started: asyncio.Queue[None]
) -> list[int]:
    parameters = {"max_new_tokens": NEW_TOKENS, "ignore_eos_token": True, "adapter_id": adapter_id, **sampling}
    token_ids = []
    async with client.stream("POST", app.url + "/generate_stream", json={"inputs": prompt, "parameters": parameters}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data:"):  # else a comment that keeps it alive
                event = json.loads(line.removeprefix("data:"))
                if "error" in event:
                    raise StreamFailed(event["error"])
                token_ids.append(event["token"]["id"])
                if len(token_ids) == 10:
                    started.put_nowait(None)
    return token_ids


async def streams_through(app: App, disaster: Callable[[], None]) -> list[list[int]]:
    """Eight streams; the disaster strikes when all of them are under way."""
    started: asyncio.Queue[None] = asyncio.Queue()
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        tasks = [asyncio.create_task(stream(client, app, *request, started)) for request in STREAMS]
        for _ in tasks:
            await asyncio.wait_for(started.get(), PATIENCE_S)
        assert not any(task.done() for task in tasks), "the disaster comes in the middle"
        await asyncio.to_thread(disaster)
        return await asyncio.gather(*tasks)


async def streams_beside_a_replaced_adapter(app: App, folder: Path, other: Path, disaster: Callable[[], None]) -> list[list[int]]:
    """The eight; a ninth stream's adapter gets other files before the disaster, and the version that it was begun with is lost."""

    def replace_and_strike() -> None:
        for file in other.iterdir():
            shutil.copy(file, folder.parent / f".{file.name}")
            os.replace(folder.parent / f".{file.name}", folder / file.name)
        disaster()

    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(folder.parent / "a4", folder)
    started: asyncio.Queue[None] = asyncio.Queue()
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        ninth = asyncio.create_task(stream(client, app, folder.name, "stream 9", {}, started))
        await asyncio.wait_for(started.get(), PATIENCE_S)
        outputs = await streams_through(app, replace_and_strike)
        with pytest.raises(StreamFailed, match="was replaced meanwhile"):
            await ninth
    return outputs


def assert_gone(pids: list[int], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"processes left over: {alive}"
        time.sleep(0.1)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


DISASTERS = {
    "a rank is killed": ("ranks", 1, signal.SIGKILL),
    "the rank that answers is killed": ("ranks", 0, signal.SIGKILL),
    "the driver is killed": ("driver", 0, signal.SIGKILL),
    "a rank hangs": ("ranks", 1, signal.SIGSTOP),
}
SOAKED = {"the rank that answers is killed", "a rank hangs"}  # each takes most of a minute


@pytest.mark.parametrize("disaster", [pytest.param(name, marks=[pytest.mark.soak] if name in SOAKED else []) for name in DISASTERS])
def test_streams_go_on_with_the_same_tokens_when(disaster: str, app: App, oracle: Oracle, tiny_adapters: Path) -> None:
    kind, index, number = DISASTERS[disaster]
    before = app.ask_driver("pids")
    strike = partial(os.kill, before[kind][index], number)
    outputs = asyncio.run(streams_beside_a_replaced_adapter(app, tiny_adapters / "moved", tiny_adapters / "a8", strike))
    for (adapter_id, prompt, sampling), output_ids in zip(STREAMS, outputs, strict=True):
        assert len(output_ids) == NEW_TOKENS
        prompt_ids = oracle.tokenizer(prompt)["input_ids"]
        if sampling:
            oracle.assert_sampled(adapter_id, prompt_ids, output_ids, **sampling)
        else:
            oracle.assert_greedy(adapter_id, prompt_ids, output_ids)
    assert_gone(before["ranks"] + before["driver"])
    assert app.post("/generate", {"inputs": "again", "parameters": {"max_new_tokens": 3}}).status_code == 200
    assert app.get("/health").status_code == 200
    app.wait_until_idle()


def test_the_requests_of_a_killed_ingress_are_aborted_and_another_takes_its_place(app: App) -> None:
    def kill_ingress() -> None:
        (pid,) = [process.pid for process in psutil.process_iter(["cmdline"]) if ingress in "".join(process.info["cmdline"] or [])]
        os.kill(pid, signal.SIGKILL)

    ingress = "ray::ServeReplica:faults:Ingress"
    before = app.wait_until_idle()["generated_tokens_total"]
    with pytest.raises((httpx.HTTPError, StreamFailed)):  # cut, or an error event in place of a token
        asyncio.run(streams_through(app, kill_ingress))
    assert app.wait_until_idle()["generated_tokens_total"] - before < len(STREAMS) * NEW_TOKENS
    deadline = time.monotonic() + PATIENCE_S
    while app.post("/generate", {"inputs": "again", "parameters": {"max_new_tokens": 3}}).status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.5)
