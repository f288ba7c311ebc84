"""A driver replica's way from a Serve call to the engine, over a real store and engine and a simulated rank. Without Ray, and its start."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from loray.cluster.channel import bind
from loray.deployments.adapter_service import AdapterService
from loray.deployments.driver import Driver
from loray.deployments.engine import Engine
from loray.deployments.request import AdapterRef, GenerationRequest, TokenEvent
from loray.models.step import Sampling
from tests.deployments.peft_folder import save_folder
from tests.deployments.rank_in_process import PAGE_BYTES, RankInProcess, start_engine
from tests.deployments.scripted_backend import run
from tests.deployments.test_adapter_service import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    save_folder(tmp_path / "root" / "small", 4)
    return Store(tmp_path / "root", tmp_path / "cache")


@pytest.fixture
def engine() -> Engine:
    return start_engine(RankInProcess())


def last_event(store: Store, engine: Engine, deadline_s: float) -> TokenEvent:
    """Of a request for the adapter `small`, submitted to a driver over these."""
    socket, address = bind(zmq.PULL, "127.0.0.1")
    request = GenerationRequest(
        request_id="r",
        prompt_ids=[1],
        max_new_tokens=2,
        sampling=Sampling(),
        adapter=AdapterRef(adapter_id="small"),
        deadline_s=deadline_s,
    )

    async def submit() -> None:
        driver = object.__new__(Driver)
        driver._loop = asyncio.get_running_loop()
        driver._engine = engine
        driver._adapters = AdapterService(store, engine, max_waiting=2, page_bytes=PAGE_BYTES)
        try:
            await driver.submit(msgspec.msgpack.encode(request), address.endpoint, address.public_key)
        finally:
            store.door.set()

    run(submit())
    events: list[TokenEvent] = []
    while not (events and events[-1].is_last):
        assert socket.poll(5000), "no last event"
        events += msgspec.msgpack.decode(socket.recv(), type=list[TokenEvent])
    return events[-1]


def test_a_deadline_holds_while_the_adapter_is_fetched(store: Store, engine: Engine) -> None:
    store.held = "small"
    last = last_event(store, engine, deadline_s=0.05)
    assert (last.error, last.message) == ("DeadlineExceeded", "its adapter was still being fetched")


def test_a_request_that_has_time_is_served_with_what_its_adapter_left_of_it(
    store: Store, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = []
    submit = engine.submit

    def submit_and_note(request: GenerationRequest, *others: Any) -> None:
        left.append(request.deadline_s)
        submit(request, *others)

    monkeypatch.setattr(engine, "submit", submit_and_note)
    for deadline_s in (60.0, 0.0):
        assert last_event(store, engine, deadline_s).finish_reason == "length"
    limited, unlimited = left
    assert 0 < limited < 60 and unlimited == 0
