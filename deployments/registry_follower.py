"""A driver replica's ear at the adapter registry: acts on its changes, answers its questions, brings its set back when it is new.

Knows nothing of adapters but how to pass their records on. Never fails: a registry that can't be reached is asked again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from loray.deployments.adapter_records import AdapterRecords
from loray.deployments.adapter_registry import News, Poll, Registry, Report
from loray.deployments.adapter_status import AdapterStatus

logger = logging.getLogger("ray.serve.loray")

ANSWER_S = 30.0  # for the registry, whose polls take a few seconds; longer, and it is lost
RETRY_S = 0.5


class RegistryFollower:
    """`apply` gets an AdapterRecords as msgpack and returns when all of its loads have begun: a status "loading" stands for each.

    `statuses` is asked whenever an admin looks. `replica_id` is another one after every restart."""

    def __init__(
        self,
        registry: Registry,
        replica_id: str,
        apply: Callable[[bytes], Awaitable[None]],
        statuses: Callable[[], Awaitable[list[AdapterStatus]]],
    ) -> None:
        self._registry = registry
        self._replica_id = replica_id
        self._apply = apply
        self._statuses = statuses
        self._epoch = ""
        self._records = AdapterRecords()
        self._applied = 0
        self._error = ""
        self._question = 0
        self._applying: asyncio.Task[None] | None = None
        self._answering: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Until cancelled, or until the application is deleted."""
        is_lost = False
        while True:
            try:
                news = await self._poll()
                if news.is_over:
                    return
                await self._follow(news)
                is_lost = False
            except Exception as error:  # whatever it is, this replica can serve without
                if not is_lost:
                    logger.warning("the adapter registry does not answer, trying on: %r", error)
                is_lost = True
                await asyncio.sleep(RETRY_S)

    async def _poll(self) -> News:
        poll = Poll(
            replica_id=self._replica_id,
            epoch=self._epoch,
            number=self._records.number,
            applied=self._applied,
            error=self._error,
            question=self._question,
        )
        return msgspec.msgpack.decode(await self._call("changes", poll), type=News)

    async def _follow(self, news: News) -> None:
        if news.wants_records:
            await self._call("restore", self._records)
            self._question = 0
        self._epoch = news.epoch
        # Polls go on beside what takes its time, or the registry would take this replica for dead.
        if news.records:
            self._records = news.records
            if self._applying is None or self._applying.done():
                self._applying = asyncio.create_task(self._apply_newest())
        if news.question > self._question:
            self._question = news.question
            if self._answering is None or self._answering.done():
                self._answering = asyncio.create_task(self._answer_newest())

    async def _apply_newest(self) -> None:
        while self._applied < self._records.number:
            records, error = self._records, ""
            try:
                await self._apply(msgspec.msgpack.encode(records))
            except Exception as failure:  # the next change tries again
                logger.error("adapter records can't be applied", exc_info=failure)
                error = str(failure) or repr(failure)
            self._applied, self._error = records.number, error
            try:
                await self._report(self._question)
            except Exception as failure:  # the next poll says it too
                logger.warning("the adapter registry did not take a report: %r", failure)

    async def _answer_newest(self) -> None:
        answered = 0
        while answered < self._question:
            question = self._question
            try:
                await self._report(question)
            except Exception as failure:
                logger.warning("the adapter registry did not take a report: %r", failure)
                await asyncio.sleep(RETRY_S)
                self._question = 0  # it is asked once more
            answered = question

    async def _report(self, question: int) -> None:
        statuses = await self._statuses()
        report = Report(replica_id=self._replica_id, applied=self._applied, error=self._error, question=question, statuses=statuses)
        await self._call("report", report)

    async def _call(self, method: str, message: msgspec.Struct) -> bytes:
        async with asyncio.timeout(ANSWER_S):  # wait_for would lose a cancellation that comes with the answer
            return await self._registry.ask(method, msgspec.msgpack.encode(message))
