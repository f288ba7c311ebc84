"""Chat templates that strangers wrote: none of them holds up or shuts out anybody else."""

import asyncio
import threading
from typing import Any

import msgspec
import pytest

from loray.deployments import template_renderer
from loray.deployments.errors import TemplateError
from loray.deployments.template_renderer import TemplateRenderer
from loray.deployments.template_worker import MAX_TEXT, Rendered, RenderJob
from loray.deployments.worker_process import WorkerLimits, WorkerProcess
from tests.deployments.scripted_backend import HF, run, saying, send, service_of
from tests.deployments.test_chat_template import CHAT, MESSAGES, ROLES

FOREVER = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.slow
def test_a_template_that_did_not_end_is_not_tried_again_and_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_renderer, "LIMITS", WorkerLimits(timeout_s=1.0, max_memory_bytes=512 << 20))
    tried = []
    ask = WorkerProcess.ask

    def ask_and_note(worker: WorkerProcess, job: bytes) -> bytes:
        tried.append(msgspec.msgpack.decode(job, type=RenderJob).template)
        return ask(worker, job)

    monkeypatch.setattr(WorkerProcess, "ask", ask_and_note)

    async def render(*templates: str) -> None:
        renderer = TemplateRenderer({})
        for template in templates:
            with pytest.raises(TemplateError):
                await renderer.render(template, MESSAGES, [])

    run(render(FOREVER, FOREVER, "{% if %}", "{% if %}"))
    assert tried == [FOREVER, "{% if %}", "{% if %}"]


@pytest.mark.slow
def test_a_chat_that_is_too_long_for_a_template_shuts_it_for_no_other_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_renderer, "LIMITS", WorkerLimits(timeout_s=1.0, max_memory_bytes=512 << 20))
    asked: list[int] = []
    ask = WorkerProcess.ask

    def ask_and_note(worker: WorkerProcess, job: bytes) -> bytes:
        asked.append(len(job))
        return ask(worker, job)

    monkeypatch.setattr(WorkerProcess, "ask", ask_and_note)
    cubic = "{% for a in messages %}{% for b in messages %}{% for c in messages %}{% endfor %}{% endfor %}{% endfor %}done"

    async def render() -> None:
        renderer = TemplateRenderer({})
        for _ in range(2):
            with pytest.raises(TemplateError, match="takes more than"):
                await renderer.render(cubic, MESSAGES * 4000, [])
        assert await renderer.render(cubic, MESSAGES, []) == "done"

    run(render())
    assert len(asked) == 2, "the same long chat is not tried again"


def test_a_template_that_is_slow_leaves_a_worker_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    answered: list[str] = []
    is_over = threading.Event()

    def ask(worker: WorkerProcess, job: bytes) -> bytes:
        template = msgspec.msgpack.decode(job, type=RenderJob).template
        if template == "slow":
            is_over.wait()
        answered.append(template)
        return msgspec.msgpack.encode(Rendered(text=template))

    monkeypatch.setattr(WorkerProcess, "ask", ask)

    async def render() -> None:
        renderer = TemplateRenderer({})
        slow = [asyncio.create_task(renderer.render("slow", [{"role": "user", "content": str(i)}], [])) for i in range(3)]
        await asyncio.sleep(0)
        slow[0].cancel()  # whose worker is not free before it is done
        await asyncio.sleep(0)
        async with asyncio.timeout(10):  # else it waits for ever
            assert await renderer.render("quick", MESSAGES, []) == "quick"
        is_over.set()
        await asyncio.gather(*slow, return_exceptions=True)

    try:
        run(render())
    finally:
        is_over.set()
    assert answered == ["quick", "slow", "slow", "slow"]


@pytest.mark.slow
def test_a_template_may_make_a_long_text_but_no_huge_one() -> None:
    async def render(num_characters: int) -> str:
        return await TemplateRenderer({}).render(f"{{{{ 'a' * {num_characters} }}}}", MESSAGES, [])

    assert len(run(render(MAX_TEXT))) == MAX_TEXT
    with pytest.raises(TemplateError, match=f"makes a text of {MAX_TEXT + 1} characters"):
        run(render(MAX_TEXT + 1))


@pytest.mark.slow
def test_a_template_that_never_ends_or_fills_the_memory_fails_its_own_requests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_renderer, "LIMITS", WorkerLimits(timeout_s=1.0, max_memory_bytes=64 << 20))
    backend = saying("x")
    huge = "{% set ns = namespace(t='aaaaaaaa') %}{% for a in range(40) %}{% set ns.t = ns.t + ns.t %}{% endfor %}{{ ns.t }}"
    backend.templates |= {"forever": FOREVER, "huge": huge, "good": f"good {ROLES}"}
    service = service_of(backend)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
    answers = {name: send(service, "POST", CHAT, json={**body, "model": name}) for name in ("forever", "huge", "forever", "good")}
    assert {name: response.status_code for name, response in answers.items()} == {"forever": 400, "huge": 400, "good": 200}
    assert "takes more than 1 s or too much memory" in answers["forever"].text and "chat template" in answers["huge"].text
    assert str(HF.decode(backend.requests[-1].prompt_ids)) == "good [user]hello"
