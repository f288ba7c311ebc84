import asyncio

import pytest

from loray.deployments.errors import Incomplete
from loray.deployments.generation import LOWEST_LOGPROB, Generation, Piece, Timing
from loray.deployments.request import GenerationRequest, TokenEvent
from loray.deployments.tokenizer import Tokenizer
from loray.models.step import Sampling
from tests.deployments.scripted_backend import EOS_ID, HF, ScriptedBackend, run, saying, service_of, tokens_of

REQUEST = GenerationRequest(request_id="r", prompt_ids=[5, 6], max_new_tokens=50, sampling=Sampling())


def generate(backend: ScriptedBackend, stops: list[str] | None = None) -> tuple[Generation, list[Piece]]:
    async def collect() -> tuple[Generation, list[Piece]]:
        generation = Generation(REQUEST, backend, Tokenizer(HF), stops or [], Timing())
        pieces = [piece async for piece in generation]
        await generation.aclose()
        return generation, pieces

    return run(collect())


def test_the_pieces_are_the_text_and_the_last_says_why_it_ended() -> None:
    generation, pieces = generate(saying("hello world"))
    assert "".join(piece.text for piece in pieces) == "hello world"
    assert [piece.finish_reason for piece in pieces[:-1]] == [""] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == generation.finish_reason == "eos_token"
    assert (generation.num_prompt_tokens, generation.num_tokens) == (2, len(pieces))


def test_the_end_token_is_a_token_but_no_text() -> None:
    _, pieces = generate(saying("hello"))
    (token,) = pieces[-1].tokens
    assert (token.id, token.text, token.is_special, pieces[-1].text) == (EOS_ID, "<|im_end|>", True, "")


def test_tokens_that_come_together_stay_together() -> None:
    token_ids = HF.encode("hello world")
    _, pieces = generate(ScriptedBackend([token_ids], finish="length"))
    assert [([token.id for token in piece.tokens], piece.text) for piece in pieces] == [(token_ids, "hello world")]


def test_a_stop_string_across_tokens_ends_it_and_aborts_the_request() -> None:
    backend = ScriptedBackend(tokens_of("hello world, this is a test"), finish="length")
    generation, pieces = generate(backend, stops=["o w"])
    assert "".join(piece.text for piece in pieces) == "hell"
    assert (generation.finish_reason, generation.stop_text) == ("stop_sequence", "o w")
    assert backend.endings == ["GeneratorExit"]
    assert generation.num_tokens < len(tokens_of("hello world, this is a test"))


def test_tokens_after_the_stop_string_in_the_same_event_are_dropped() -> None:
    generation, pieces = generate(ScriptedBackend([HF.encode("hello world, this")], finish="length"), stops=["wor"])
    assert [token.text for token in pieces[0].tokens][-1] == " world"
    assert generation.num_tokens == len(pieces[0].tokens) < len(HF.encode("hello world, this"))


def test_a_special_token_can_be_a_stop_string() -> None:
    start_id = HF.convert_tokens_to_ids("<|im_start|>")
    generation, pieces = generate(ScriptedBackend([*tokens_of("hello"), [start_id], *tokens_of("world")]), stops=["<|im_start|>"])
    assert ("".join(piece.text for piece in pieces), generation.finish_reason) == ("hello", "stop_sequence")


def test_text_that_only_began_a_stop_string_is_given_out_at_the_end() -> None:
    generation, pieces = generate(ScriptedBackend(tokens_of("hello"), finish="length"), stops=["lo there"])
    assert ("".join(piece.text for piece in pieces), generation.finish_reason) == ("hello", "length")


def test_a_logprob_that_json_cannot_write_is_replaced() -> None:
    class Odd(ScriptedBackend):
        async def generate(self, request):  # type: ignore[no-untyped-def]
            yield TokenEvent(request.request_id, [EOS_ID, EOS_ID], [float("nan"), float("-inf")], "length")

    _, pieces = generate(Odd([]))
    assert [token.logprob for token in pieces[0].tokens] == [LOWEST_LOGPROB] * 2


def test_a_backend_that_falls_silent_is_an_error() -> None:
    with pytest.raises(Incomplete, match="broke off"):
        generate(ScriptedBackend(tokens_of("hello"), finish=""))


def test_cancelling_the_reader_cancels_the_backend() -> None:
    backend = saying("hello world", turn_s=0.05)

    async def give_up() -> None:
        service = service_of(backend)
        async with service.generation(REQUEST, [], Timing()) as generation:
            async for _ in generation:
                asyncio.current_task().cancel()  # type: ignore[union-attr]

    with pytest.raises(asyncio.CancelledError):
        run(give_up())
    assert backend.endings == ["CancelledError"]


def test_leaving_early_closes_the_backend() -> None:
    backend = saying("hello world")

    async def leave() -> None:
        service = service_of(backend)
        async with service.generation(REQUEST, [], Timing()) as generation:
            async for _ in generation:
                break

    run(leave())
    assert backend.endings == ["GeneratorExit"]
