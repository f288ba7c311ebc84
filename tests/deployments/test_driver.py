"""A driver replica's way from a Serve call to the engine, over a real store and engine and a simulated rank. Without Ray, and its start."""

import asyncio
import logging
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from loray.cluster.channel import bind
from loray.deployments.adapter_service import AdapterService
from loray.deployments.adapters import Adapter
from loray.deployments.config import TracingArgs
from loray.deployments.driver import Driver
from loray.deployments.driver_log import DriverLog
from loray.deployments.engine import ABORTED, Engine
from loray.deployments.request import AdapterRef, AdapterTemplate, GenerationRequest, TokenEvent
from loray.deployments.sequence import Ending
from loray.deployments.trace_context import TraceContext
from loray.deployments.tracing import Tracing
from loray.models.step import Sampling
from tests.deployments.local_driver import driver_over
from tests.deployments.peft_folder import save_folder
from tests.deployments.rank_in_process import PAGE_BYTES, RankInProcess, start_engine
from tests.deployments.scripted_backend import run
from tests.deployments.test_adapter_service import Store

TRACE = "1" * 32


@pytest.fixture
def store(tmp_path: Path) -> "AskedStore":
    save_folder(tmp_path / "root" / "small", 4)
    return AskedStore(tmp_path / "root", tmp_path / "cache")


class AskedStore(Store):
    def __init__(self, root: Path, cache: Path) -> None:
        super().__init__(root, cache)
        self.is_asked = threading.Event()

    def find(self, ref: AdapterRef, asked: float | None = None) -> Adapter:
        self.is_asked.set()
        return super().find(ref, asked)


@pytest.fixture
def rank() -> RankInProcess:
    return RankInProcess()


@pytest.fixture
def engine(rank: RankInProcess) -> Engine:
    return start_engine(rank)


def request_for(adapter_id: str, **fields: Any) -> GenerationRequest:
    """Traced; "" is the base model."""
    settings = {
        "prompt_ids": [1],
        "max_new_tokens": 2,
        "sampling": Sampling(),
        "trace": TraceContext(f"00-{TRACE}-{'2' * 16}-01"),
        **fields,
    }
    return GenerationRequest(request_id="r", adapter=AdapterRef(adapter_id=adapter_id) if adapter_id else None, **settings)


def local_driver(store: Store, engine: Engine) -> Driver:
    return driver_over(engine, AdapterService(store, engine, max_waiting=2, page_bytes=PAGE_BYTES))


def last_event(store: Store, engine: Engine, request: GenerationRequest) -> TokenEvent:
    """Of a request that is submitted to a driver over these."""
    socket, address = bind(zmq.PULL, "127.0.0.1")

    async def submit() -> None:
        driver = local_driver(store, engine)
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


def test_the_files_of_an_adapter_are_let_go_while_its_request_runs(
    store: "AskedStore", engine: Engine, rank: RankInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once they are in memory, and in the loop's thread, to which the bookkeeping of folders belongs."""
    threads: list[int] = []
    monkeypatch.setattr(store, "let_go", lambda path: bool(threads.append(threading.get_ident())))
    rank.slow_paths.add(str(store.find(AdapterRef(adapter_id="small")).path))
    rank.pause_after(3)
    socket, address = bind(zmq.PULL, "127.0.0.1")
    request = request_for("small", max_new_tokens=50)

    async def submit() -> None:
        driver = local_driver(store, engine)
        call = asyncio.create_task(driver.submit(msgspec.msgpack.encode(request), address.endpoint, address.public_key))
        while not (copies := await asyncio.wrap_future(engine.call(lambda tiers: list(tiers.host._entries)))):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert not threads
        rank.prepare(copies[0])
        while not threads:
            await asyncio.sleep(0.01)
        assert threads == [threading.get_ident()] and not call.done()
        rank.gate.set()
        await call

    with closing(socket):
        run(submit())


def test_a_deadline_holds_while_the_adapter_is_fetched(store: Store, engine: Engine) -> None:
    store.held = "small"
    last = last_event(store, engine, request_for("small", deadline_s=0.05))
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
        assert last_event(store, engine, request_for("small", deadline_s=deadline_s)).finish_reason == "length"
    limited, unlimited = left
    assert 0 < limited < 60 and unlimited == 0


def test_what_another_replica_has_begun_goes_on_with_the_same_version_or_not_at_all(store: Store, engine: Engine) -> None:
    begun = {"output_ids": [7], "max_new_tokens": 3}
    last = last_event(store, engine, request_for("small", **begun, adapter_version="of files that are gone"))
    assert last.error == "Incomplete" and "'small' was replaced meanwhile" in last.message
    service = AdapterService(store, engine, max_waiting=2, page_bytes=PAGE_BYTES)
    version = run(service.find(AdapterRef(adapter_id="small"))).version
    assert last_event(store, engine, request_for("small", **begun, adapter_version=version)).finish_reason == "length"


@pytest.mark.parametrize(("text", "error"), [("the old one", "TemplateOutdated"), ("the new one", "")])
def test_a_prompt_that_another_versions_template_wrote_is_computed_only_if_it_is_the_same_text(
    tmp_path: Path, store: Store, engine: Engine, text: str, error: str
) -> None:
    (tmp_path / "root" / "small" / "chat_template.jinja").write_text("the new one")
    template = AdapterTemplate(text, "of files that are gone").mark
    assert last_event(store, engine, request_for("small", template=template)).error == error


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_template_that_has_changed_without_the_adapter_is_noticed(tmp_path: Path, store: Store, engine: Engine, name: str) -> None:
    file = tmp_path / "root" / "small" / name
    marks = []

    async def mark() -> None:
        marks.append((await local_driver(store, engine)._adapters.chat_template(AdapterRef(adapter_id="small"))).mark)

    def write(text: str) -> None:
        file.write_text(text if name.endswith("jinja") else f'{{"chat_template": "{text}"}}')

    run(mark())
    for text in ("one", "two"):
        write(text)
        assert last_event(store, engine, request_for("small", template=marks[-1])).error == "TemplateOutdated"
        run(mark())
        assert last_event(store, engine, request_for("small", template=marks[-1])).finish_reason == "length"
    file.unlink()
    assert last_event(store, engine, request_for("small", template=marks[-1])).error == "TemplateOutdated"
    assert last_event(store, engine, request_for("small", template=marks[0])).finish_reason == "length", "there is none again"


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "ray.serve.loray"]


def test_a_request_that_is_over_is_a_line_with_its_id_and_trace(store: Store, engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ray.serve.loray"):
        last_event(store, engine, request_for("small", prompt_ids=[1, 2]))
        last_event(store, engine, request_for("", output_ids=[7], max_new_tokens=4, trace=TraceContext()))
        last_event(store, engine, request_for("gone"))
    served, continued, refused = lines(caplog)
    assert served.startswith(f"sequence id=r trace={TRACE} adapter=small prompt_tokens=2 tokens=2 outcome=length ms=")
    assert " queue_ms=" in served and " first_token_ms=" in served
    assert continued.startswith("sequence id=r adapter=- prompt_tokens=1 tokens=3 outcome=length ms=")
    assert refused.startswith(f"sequence id=r trace={TRACE} adapter=gone prompt_tokens=1 tokens=0 outcome=AdapterNotFound ms=")
    assert "first_token_ms" not in refused


def test_a_request_that_is_given_up_is_a_line_with_the_tokens_it_had(
    store: AskedStore, engine: Engine, rank: RankInProcess, caplog: pytest.LogCaptureFixture
) -> None:
    socket, address = bind(zmq.PULL, "127.0.0.1")

    async def give_up(request: GenerationRequest, is_under_way: threading.Event) -> None:
        call = asyncio.create_task(
            local_driver(store, engine).submit(msgspec.msgpack.encode(request), address.endpoint, address.public_key)
        )
        await asyncio.to_thread(is_under_way.wait, 10)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        rank.gate.set()
        store.door.set()
        while not lines(caplog):
            await asyncio.sleep(0)

    with caplog.at_level(logging.INFO, "ray.serve.loray"), closing(socket):
        rank.pause_after(3)
        run(give_up(request_for("", max_new_tokens=50), rank.is_paused))
        (given_up,) = lines(caplog)
        caplog.clear()
        store.door.clear()
        store.held = "small"
        run(give_up(request_for("small"), store.is_asked))
        (still_fetched,) = lines(caplog)
    num_tokens = int(given_up.split(" tokens=")[1].split()[0])
    assert " outcome=aborted " in given_up and 3 <= num_tokens < 50
    assert " tokens=0 outcome=aborted " in still_fetched


@pytest.mark.parametrize(
    ("ending", "error_type"), [(Ending("AdapterFailed"), "AdapterFailed"), (Ending(ABORTED), None), (Ending(finish_reason="length"), None)]
)
def test_only_a_failure_is_an_error_in_its_span(ending: Ending, error_type: str | None) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter, TracingArgs())
    DriverLog(tracing).tell(request_for(""), time.monotonic(), ending)
    tracing.close()
    (span,) = exporter.get_finished_spans()
    assert (span.attributes.get("error.type"), span.attributes["loray.outcome"]) == (error_type, ending.outcome)
    assert "loray.time_to_first_token" not in span.attributes
