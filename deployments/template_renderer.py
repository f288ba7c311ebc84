"""Renders chat templates that strangers wrote, such as those of adapters, in a process that can be killed. Knows no requests."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from loray.deployments.errors import MissingTemplateVariable, Overloaded, TemplateError
from loray.deployments.expiring import Expiring
from loray.deployments.template_worker import Rendered, RenderJob
from loray.deployments.worker_process import WorkerLimits, WorkerLost, WorkerProcess

WORKER = "loray.deployments.template_worker"
LIMITS = WorkerLimits(timeout_s=5.0, max_memory_bytes=512 << 20)
MAX_PENDING = 256
REMEMBER_FAILURE_S = 60.0  # a template that did not end is not tried again for so long
MAX_REMEMBERED = 256


class TemplateRenderer:
    def __init__(self, variables: Mapping[str, Any]) -> None:
        """variables: that every template may use."""
        self._variables = dict(variables)
        self._worker = WorkerProcess(WORKER, LIMITS, b"")
        self._thread = ThreadPoolExecutor(1, "templates")  # the worker's only one
        self._num_pending = 0
        self._failures: Expiring[str, bool] = Expiring(REMEMBER_FAILURE_S, MAX_REMEMBERED)  # by template

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
            rendered = await asyncio.get_running_loop().run_in_executor(self._thread, self._render, template, job)
        finally:
            self._num_pending -= 1
        if rendered.missing:
            raise MissingTemplateVariable(f"messages: the chat template wants what is not there: {rendered.missing}", param="messages")
        if rendered.refusal:
            raise TemplateError(f"messages: the chat template refused them: {rendered.refusal}", param="messages")
        return rendered.text

    def _render(self, template: str, job: bytes) -> Rendered:
        """In the thread."""
        if not self._failures.get(template):
            try:
                return msgspec.msgpack.decode(self._worker.ask(job), type=Rendered)
            except WorkerLost:
                self._failures.put(template, True)
        return Rendered(refusal=f"it takes more than {LIMITS.timeout_s:g} s or too much memory")
