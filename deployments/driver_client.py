"""An ingress replica's way to the drivers: one Serve call a request, its tokens over the token channel.

When a driver replica is lost in the middle, the request goes on at another one: prompt and tokens so far are submitted again,
and since sampling is a pure function of (seed, position), the stream continues with the very same tokens.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError, RayTaskError
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from loray.deployments.adapter_records import AdapterChange, AdapterRecord, Changed, now_ms
from loray.deployments.adapter_registry import Registry
from loray.deployments.adapter_status import AdapterStatus
from loray.deployments.deadlines import seconds_left
from loray.deployments.errors import AdapterChanged, AdapterFailed, DeadlineExceeded, Incomplete, LorayError, Unhealthy, from_wire
from loray.deployments.mailbox import Mailbox, ReplicaLost, no_rest
from loray.deployments.request import AdapterRef, AdapterTemplate, GenerationRequest, TokenEvent
from loray.deployments.token_channel import TokenReceiver

logger = logging.getLogger("ray.serve.loray")

ACCEPT_S = 180.0  # a replica that is being built must be there by then
TAIL_S = 10.0  # between the end of the Serve call and the last token on the other channel
ASK_S = 3.0  # for questions about health and numbers
REGISTRY_S = 15.0  # for the adapter registry, which waits for replicas itself
TEMPLATE_S = 600.0  # for an adapter's chat template, which comes with the adapter
LEAVING_S = 1.0  # for Serve to cancel a task whose calls it has cancelled
GRACE_S = 0.5  # beyond a deadline: the driver's own word of it says more
MAX_LOSSES = 2  # replicas lost in a row without a single new token
PAUSE_OF_STREAM_S = 0.001  # between two writes of a stream, for each that flows: Serve's proxy, a process, takes some 8,000 a second
MAX_PAUSE_S = 0.02  # however many do: fifty writes a second still flow
MAX_CHANGES = 10  # of an adapter's files in a row, each while they were read
NO_RECEIVER = "this ingress replica gets no tokens any more"


class DriverClient:
    def __init__(self, driver: DeploymentHandle, registry: Registry) -> None:
        self._driver = driver
        self._registry = registry
        self._events: dict[str, Mailbox] = {}  # None in it: the Serve call has ended
        self._num_flowing = 0  # requests that may rest and have tokens
        self._receiver = TokenReceiver(ray.util.get_node_ip_address(), self._deliver)
        self._receiving = asyncio.create_task(self._receiver.run())
        self._receiving.add_done_callback(self._end_all)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        output_ids = list(request.output_ids)
        started, began_ms = time.monotonic(), now_ms()
        is_accepted = False
        losses = changes = 0
        version = request.adapter_version
        while True:
            request_id = f"{request.request_id}.{losses}.{changes}.{len(output_ids)}"
            so_far = {"output_ids": list(output_ids), "adapter_version": version, "deadline_s": seconds_left(request.deadline_s, started)}
            attempt = msgspec.structs.replace(request, request_id=request_id, began_ms=began_ms, **so_far)
            try:
                async with aclosing(self._attempt(attempt)) as events:
                    async for event in events:
                        version = event.version or version
                        if event.token_ids:
                            output_ids += event.token_ids
                            losses = 0
                        if event.token_ids or event.embedding or not is_accepted:
                            is_accepted = True
                            yield event
                return
            except AdapterChanged:
                changes += 1
                if output_ids or changes > MAX_CHANGES:
                    raise
            except ReplicaLost as loss:
                losses += 1
                logger.warning("request %s lost its replica after %d tokens: %s", request.request_id, len(output_ids), loss)
                if losses >= MAX_LOSSES:
                    raise Incomplete(f"{losses} replicas in a row were lost under this request") from loss

    async def stats(self) -> dict[str, dict[str, float]]:
        answers = await self._driver.broadcast("replica_stats").results_async(timeout_s=ASK_S, return_exceptions=True)
        return dict(answer for answer in answers if not isinstance(answer, BaseException))  # else a replica that is being lost

    async def adapters(self) -> list[str]:
        return await self._ask("adapters")

    def check_receiver(self) -> None:
        """Raises Unhealthy when no tokens arrive here any more: this process can't mend it."""
        if self._receiving.done():
            raise Unhealthy(NO_RECEIVER)

    async def healthy(self) -> bool:
        """Also whether tokens would arrive here."""
        return not self._receiving.done() and await self._ask("healthy")

    async def chat_template(self, adapter: AdapterRef) -> AdapterTemplate:
        """May take as long as a download."""
        try:
            async with asyncio.timeout(TEMPLATE_S):
                answer: AdapterTemplate | LorayError = await self._driver.chat_template.remote(msgspec.msgpack.encode(adapter))
        except RayTaskError as error:
            raise _told(error, "the driver") from error
        except TimeoutError as error:
            raise AdapterFailed(f"adapter {adapter.adapter_id!r}: after {TEMPLATE_S:.0f} s it is still being fetched; try again") from error
        except RayError as error:
            logger.warning("no driver replica answers chat_template: %r", error)
            raise Incomplete(f"adapter {adapter.adapter_id!r}: no replica has found it") from error
        if isinstance(answer, LorayError):
            raise answer
        return answer

    async def adapter_statuses(self) -> dict[str, list[AdapterStatus]]:
        return msgspec.msgpack.decode(await self._ask_registry("statuses"), type=dict[str, list[AdapterStatus]])

    async def change_adapter(self, change: AdapterChange) -> Changed:
        return msgspec.msgpack.decode(await self._ask_registry("change", change), type=Changed)

    async def is_overtaken(self, record: AdapterRecord) -> bool:
        return msgspec.msgpack.decode(await self._ask_registry("is_overtaken", record), type=bool)

    async def undo_adapter_change(self, changed: Changed) -> None:
        await self._ask_registry("undo", changed)

    async def _ask(self, method: str) -> Any:
        try:
            async with asyncio.timeout(ASK_S):
                return await getattr(self._driver, method).remote()
        except RayTaskError as error:
            raise _told(error, "the driver") from error
        except (RayError, TimeoutError) as error:
            logger.warning("no driver replica answers %s: %r", method, error)
            raise Unhealthy("no driver replica answers") from error

    async def _ask_registry(self, method: str, *messages: msgspec.Struct) -> bytes:
        try:
            async with asyncio.timeout(REGISTRY_S):
                return await self._registry.ask(method, *map(msgspec.msgpack.encode, messages))
        except RayTaskError as error:
            raise _told(error, "the adapter registry") from error
        except (RayError, TimeoutError) as error:
            logger.warning("the adapter registry does not answer %s: %r", method, error)
            raise Unhealthy("the adapter registry does not answer") from error

    async def _attempt(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """One request at one replica, to its last event."""
        self.check_receiver()
        address = self._receiver.address
        events = self._events[request.request_id] = Mailbox(len(request.output_ids), self._pause_s if request.may_rest else no_rest)
        response = self._driver.submit.remote(msgspec.msgpack.encode(request), address.endpoint, address.public_key)
        call = asyncio.create_task(_result(response))
        call.add_done_callback(partial(_tell_ended, events))
        late = DeadlineExceeded("no replica said more of it")
        timer = asyncio.get_running_loop().call_later(request.deadline_s + GRACE_S, events.fail, late) if request.deadline_s else None
        wait_s: float | None = ACCEPT_S
        is_done = is_flowing = False
        try:
            while not is_done:
                try:
                    event = await events.get() if wait_s is None else await _within(wait_s, events)
                except TimeoutError as error:
                    if call.done():
                        raise ReplicaLost("its last tokens never came") from error
                    raise Unhealthy(f"no replica took the request within {wait_s:.0f} s") from error
                if event is None:
                    if call.cancelled():  # when a client leaves, Serve cancels its calls, and a moment later this task
                        await asyncio.sleep(LEAVING_S)
                    _raise_if_lost(call)
                    wait_s = TAIL_S
                elif event.error:
                    is_done = True
                    raise from_wire(event.error, event.message)
                else:
                    wait_s = TAIL_S if call.done() else None
                    is_done = event.is_last
                    if event.token_ids and request.may_rest and not is_flowing:
                        is_flowing = True
                        self._num_flowing += 1
                    yield event
        finally:
            if timer:
                timer.cancel()
            del self._events[request.request_id]
            self._num_flowing -= is_flowing
            if not is_done:
                response.cancel()
                call.cancel()

    def _deliver(self, event: TokenEvent) -> None:
        events = self._events.get(event.request_id)
        if events is not None:  # else the request was given up here and its last tokens were on their way
            events.put(event)

    def _pause_s(self) -> float:
        return min(MAX_PAUSE_S, PAUSE_OF_STREAM_S * self._num_flowing)

    def _end_all(self, receiving: asyncio.Task[None]) -> None:
        """Whoever waits for tokens would wait for ever."""
        if not receiving.cancelled():
            logger.error(NO_RECEIVER, exc_info=receiving.exception())
        for events in self._events.values():
            events.fail(Unhealthy(NO_RECEIVER))


async def _result(response: DeploymentResponse) -> Any:
    return await response


def _tell_ended(events: Mailbox, call: asyncio.Task[Any]) -> None:
    if not call.cancelled():
        call.exception()  # of a client that has left, nobody asks for it
    events.put(None)


async def _within(seconds: float, events: Mailbox) -> TokenEvent | None:
    async with asyncio.timeout(seconds):  # not wait_for: in Python 3.11 it may swallow a cancellation
        return await events.get()


def _told(error: RayTaskError, who: str) -> LorayError:
    """What the caller learns of an error in another process; its traceback is for the log."""
    if isinstance(error.cause, LorayError):
        return error.cause
    logger.error("%s failed", who, exc_info=error)
    return Incomplete(f"{who} failed; its log says why")


def _raise_if_lost(call: asyncio.Task[Any]) -> None:
    if call.cancelled():
        raise ReplicaLost("its call was cancelled")
    error = call.exception()
    if isinstance(error, RayError) and not isinstance(error, RayTaskError):
        raise ReplicaLost(str(error).splitlines()[0]) from error
    if error:  # the replica lives, and would fail in the same way again
        logger.error("the driver failed on a request", exc_info=error)
        raise Incomplete("the driver failed on this request; its log says why") from error
