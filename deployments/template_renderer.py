"""Renders chat templates that strangers wrote, such as those of adapters, in a process that can be killed. Knows no requests."""

import asyncio
import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from loray.deployments.errors import MissingTemplateVariable, Overloaded, TemplateError
from loray.deployments.expiring import Expiring
from loray.deployments.template_worker import Rendered, RenderJob
from loray.deployments.worker_process import WorkerLimits, WorkerLost, WorkerProcess

WORKER = "loray.deployments.template_worker"
LIMITS = WorkerLimits(timeout_s=5.0, max_memory_bytes=512 << 20)
NUM_WORKERS = 2  # one template has one at a time: the other is left to the others
MAX_PENDING = 256
REMEMBER_FAILURE_S = 60.0  # what did not end is not tried again for so long
MAX_REMEMBERED = 256
SMALL_BYTES = 8 << 10  # of messages and tools: a template that does not end with so few is not tried with any others either


class TemplateRenderer:
    def __init__(self, variables: Mapping[str, Any]) -> None:
        """variables: that every template may use."""
        self._variables = dict(variables)
        self._idle = [WorkerProcess(WORKER, LIMITS, b"") for _ in range(NUM_WORKERS)]  # the last used one comes first
        self._threads = ThreadPoolExecutor(NUM_WORKERS, "templates")  # as many as workers, so that each finds one
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by template
        self._num_pending = 0
        self._failures: Expiring[str | bytes, bool] = Expiring(REMEMBER_FAILURE_S, MAX_REMEMBERED)  # templates, digests of jobs

    async def render(self, template: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        """The prompt. Raises TemplateError and Overloaded."""
        if self._num_pending >= MAX_PENDING:
            raise Overloaded(f"{MAX_PENDING} chat templates are being rendered already; try again")
        try:
            job = msgspec.msgpack.encode(RenderJob(template, messages, tools, self._variables))
        except (OverflowError, RecursionError) as error:  # of JSON that msgpack can't write
            raise TemplateError(f"messages: arguments and tools are too deep or have too large a number: {error}", "messages") from None
        self._num_pending += 1
        try:
            rendered = await self._in_turn(template, job)
        finally:
            self._num_pending -= 1
        if rendered.missing:
            raise MissingTemplateVariable(f"messages: the chat template wants what is not there: {rendered.missing}", param="messages")
        if rendered.refusal:
            raise TemplateError(f"messages: the chat template refused them: {rendered.refusal}", param="messages")
        return rendered.text

    async def _in_turn(self, template: str, job: bytes) -> Rendered:
        turn = self._turns.setdefault(template, asyncio.Lock())
        await turn.acquire()
        rendering = asyncio.get_running_loop().run_in_executor(self._threads, self._render, template, job)
        rendering.add_done_callback(lambda _: turn.release())  # and no sooner, also when the caller leaves
        return await asyncio.shield(rendering)

    def _render(self, template: str, job: bytes) -> Rendered:
        """In a thread."""
        digest = hashlib.sha256(job).digest()
        if not self._failures.get(template) and not self._failures.get(digest):
            worker = self._idle.pop()
            try:
                return msgspec.msgpack.decode(worker.ask(job), type=Rendered)
            except WorkerLost:
                is_small = len(job) < len(template.encode()) + SMALL_BYTES
                self._failures.put(template if is_small else digest, True)
            finally:
                self._idle.append(worker)
        return Rendered(refusal=f"it takes more than {LIMITS.timeout_s:g} s or too much memory")
