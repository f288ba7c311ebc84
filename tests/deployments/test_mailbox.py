"""What waits for a slow reader is joined, and nothing is lost or moved."""

import asyncio

import pytest

from loray.deployments.errors import DeadlineExceeded
from loray.deployments.mailbox import Mailbox, ReplicaLost
from loray.deployments.request import TokenEvent

ACCEPTED = TokenEvent("r")


def token(token_id: int, **fields: object) -> TokenEvent:
    return TokenEvent("r", [token_id], [-float(token_id)], **fields)  # type: ignore[arg-type]


async def taken(mailbox: Mailbox, num_items: int) -> list[TokenEvent | None]:
    return [await asyncio.wait_for(mailbox.get(), 5) for _ in range(num_items)]


def test_tokens_that_nobody_took_yet_are_one_event() -> None:
    async def run() -> None:
        mailbox = Mailbox()
        first = token(1, alternatives=[[(1, -1.0)]], prompt_logprobs=[-0.5], queue_s=0.25)
        for event in (ACCEPTED, first, token(2, alternatives=[[(7, -2.0)]]), token(3, alternatives=[[]], finish_reason="length")):
            mailbox.put(event)
        joined = TokenEvent(
            "r",
            [1, 2, 3],
            [-1.0, -2.0, -3.0],
            "length",
            alternatives=[[(1, -1.0)], [(7, -2.0)], []],
            prompt_logprobs=[-0.5],
            queue_s=0.25,
        )
        assert await taken(mailbox, 2) == [ACCEPTED, joined]

    asyncio.run(run())


def test_an_error_and_the_end_of_the_call_keep_their_places() -> None:
    async def run() -> None:
        mailbox = Mailbox()
        error = TokenEvent("r", error="Incomplete", message="why", num_before=3)
        for item in (token(1), None, token(2), token(3), error):
            mailbox.put(item)
        two = TokenEvent("r", [2, 3], [-2.0, -3.0])
        assert await taken(mailbox, 4) == [token(1), None, two, error]

    asyncio.run(run())


def test_what_two_replicas_make_of_one_request_counts_once() -> None:
    async def run() -> None:
        mailbox = Mailbox(num_before=4)
        first = [ACCEPTED, *(token(i, num_before=i) for i in (4, 5)), token(6, num_before=6, finish_reason="length")]
        for event in (first[0], first[1], first[1], first[2], first[1], first[2], first[3], first[3], None):
            mailbox.put(event)
        accepted, joined, ended = await taken(mailbox, 3)
        assert (accepted, ended) == (ACCEPTED, None) and joined is not None
        assert (joined.token_ids, joined.finish_reason) == ([4, 5, 6], "length")

    asyncio.run(run())


@pytest.mark.parametrize("num_told", [-1, 0, 4, 5], ids=["before its first token", "of none", "of those before", "of one less"])
def test_an_error_of_the_replica_that_is_behind_is_not_the_requests(num_told: int) -> None:
    async def run() -> None:
        mailbox = Mailbox(num_before=4)
        refusal = TokenEvent("r", error="Overloaded", message="full", num_before=num_told)
        last = token(6, num_before=6, finish_reason="length")
        for item in (token(4, num_before=4), token(5, num_before=5), refusal, last):
            mailbox.put(item)
        (joined,) = await taken(mailbox, 1)
        assert joined is not None and (joined.token_ids, joined.finish_reason) == ([4, 5, 6], "length")

    asyncio.run(run())


@pytest.mark.parametrize("num_told", [-1, 4])
def test_an_error_before_any_token_is_the_requests(num_told: int) -> None:
    async def run() -> None:
        mailbox = Mailbox(num_before=4)
        refusal = TokenEvent("r", error="Overloaded", message="full", num_before=num_told)
        for item in (ACCEPTED, refusal, token(4, num_before=4)):
            mailbox.put(item)
        mailbox.put(None)
        assert await taken(mailbox, 3) == [ACCEPTED, refusal, None]

    asyncio.run(run())


def test_tokens_that_are_missing_are_a_lost_replica_after_those_that_came() -> None:
    async def run() -> None:
        mailbox = Mailbox(num_before=4)
        for item in (token(4, num_before=4), token(6, num_before=6, finish_reason="length"), token(5, num_before=5)):
            mailbox.put(item)
        assert await taken(mailbox, 1) == [token(4, num_before=4)]
        with pytest.raises(ReplicaLost, match="from 5 to 5 never came"):
            await taken(mailbox, 1)
        mailbox.put(None)
        assert await taken(mailbox, 1) == [None]

    asyncio.run(run())


def test_a_failure_of_this_side_ends_what_has_not_ended_and_nothing_else() -> None:
    async def run() -> None:
        ended, under_way = Mailbox(), Mailbox()
        last = token(1, num_before=0, finish_reason="length")
        ended.put(last)
        under_way.put(token(1, num_before=0))
        for mailbox in (ended, under_way):
            mailbox.fail(DeadlineExceeded("late"))
            mailbox.put(token(2, num_before=1))
            mailbox.put(None)
        assert await taken(ended, 2) == [last, None]
        assert await taken(under_way, 1) == [token(1, num_before=0)]
        with pytest.raises(DeadlineExceeded):
            await taken(under_way, 1)
        assert await taken(under_way, 1) == [None]

    asyncio.run(run())


def test_nothing_follows_the_last_event_also_when_it_was_taken() -> None:
    async def run() -> None:
        mailbox = Mailbox()
        error = TokenEvent("r", error="Incomplete", message="why")
        mailbox.put(error)
        assert await taken(mailbox, 1) == [error]
        for item in (token(1), error, None):
            mailbox.put(item)
        assert await taken(mailbox, 1) == [None]

    asyncio.run(run())


def test_a_reader_that_keeps_up_gets_every_event_at_once() -> None:
    async def run() -> None:
        mailbox = Mailbox()
        for event in (token(1), token(2)):
            waiting = asyncio.create_task(mailbox.get())
            await asyncio.sleep(0)
            assert not waiting.done()
            mailbox.put(event)
            assert await asyncio.wait_for(waiting, 5) == event

    asyncio.run(run())


def test_between_the_first_and_the_last_a_reader_is_woken_once_for_what_comes_within_the_rest() -> None:
    async def run() -> None:
        mailbox = Mailbox(rest_s=lambda: 0.2)
        mailbox.put(ACCEPTED)
        assert await taken(mailbox, 1) == [ACCEPTED]
        mailbox.put(token(1))
        assert await taken(mailbox, 1) == [token(1)], "the first token waits for nothing"
        started = asyncio.get_running_loop().time()
        waiting = asyncio.create_task(mailbox.get())
        for event in (token(2), token(3)):
            mailbox.put(event)
            await asyncio.sleep(0.01)
            assert not waiting.done()
        assert await asyncio.wait_for(waiting, 5) == token(2).joined(token(3))
        assert asyncio.get_running_loop().time() >= started + 0.19

    asyncio.run(run())


@pytest.mark.parametrize("end", [token(3, finish_reason="length"), TokenEvent("r", error="Incomplete", message="why", num_before=2), None])
def test_an_end_wakes_the_reader_at_once(end: TokenEvent | None) -> None:
    async def run() -> None:
        mailbox = Mailbox(rest_s=lambda: 3600.0)
        mailbox.put(token(1))
        await taken(mailbox, 1)
        mailbox.put(token(2))
        mailbox.put(end)
        told = [token(2).joined(end)] if end and end.token_ids else [token(2), end]
        assert await taken(mailbox, len(told)) == told

    asyncio.run(run())


def test_a_failure_wakes_the_reader_at_once_and_a_rest_that_is_over_holds_nothing_up() -> None:
    async def run() -> None:
        mailbox = Mailbox(rest_s=lambda: 0.02)
        mailbox.put(token(1))
        await taken(mailbox, 1)
        await asyncio.sleep(0.03)
        waiting = asyncio.create_task(mailbox.get())
        await asyncio.sleep(0)
        mailbox.put(token(2))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert waiting.done() and waiting.result() == token(2)
        mailbox.put(token(3))
        mailbox.fail(DeadlineExceeded("late"))
        assert await taken(mailbox, 1) == [token(3)]
        with pytest.raises(DeadlineExceeded):
            await taken(mailbox, 1)

    asyncio.run(run())
