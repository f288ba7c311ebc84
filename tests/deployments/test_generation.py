import asyncio
from typing import Any

import msgspec
import pytest

from loray.deployments.errors import Incomplete
from loray.deployments.generation import LOWEST_LOGPROB, Generation, Piece, PromptToken, Timing
from loray.deployments.request import GenerationRequest, TokenEvent
from loray.deployments.tokenizer import Tokenizer
from loray.models.step import Sampling
from tests.deployments.scripted_backend import EOS_ID, HF, ScriptedBackend, run, saying, service_of, tokens_of

REQUEST = GenerationRequest(request_id="r", prompt_ids=[5, 6], max_new_tokens=50, sampling=Sampling())


def generate(
    backend: ScriptedBackend, stops: list[str] | None = None, request: GenerationRequest = REQUEST
) -> tuple[Generation, list[Piece]]:
    async def collect() -> tuple[Generation, list[Piece]]:
        generation = Generation(request, backend, Tokenizer(HF), stops or [], Timing())
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


@pytest.mark.parametrize(
    "token_id", [one for one in range(len(HF)) if HF.decode([one]).strip("\ufffd") and HF.decode([one])[-1] == "\ufffd"]
)
def test_what_stands_before_half_a_character_at_the_end_is_the_last_tokens(token_id: int) -> None:
    token_ids = [*HF.encode("hello"), token_id]
    _, pieces = generate(ScriptedBackend([[one] for one in token_ids], finish="length"))
    texts = [token.text for piece in pieces for token in piece.tokens]
    assert "".join(texts) == "".join(piece.text for piece in pieces) == HF.decode(token_ids).rstrip("\ufffd")


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


def test_no_stop_string_ends_it_before_the_least_number_of_tokens() -> None:
    start_id = HF.convert_tokens_to_ids("<|im_start|>")
    script = [*tokens_of("ab ab ab ab"), [start_id]]
    for least, text in {0: "", 2: "", 3: "ab ", 6: "ab ab ", 9: "ab ab ab ab"}.items():
        request = wanting("x", sampling=Sampling(min_new_tokens=least))
        generation, pieces = generate(ScriptedBackend(script, finish="length"), ["ab", "<|im_start|>"], request)
        assert "".join(piece.text for piece in pieces) == text and generation.num_tokens >= least
        assert generation.finish_reason == "stop_sequence"


def test_a_special_stop_before_the_least_number_of_tokens_is_passed_by() -> None:
    start_id = HF.convert_tokens_to_ids("<|im_start|>")
    script = [[start_id], *tokens_of("hello"), [start_id], *tokens_of("never")]
    request = wanting("x", sampling=Sampling(min_new_tokens=2))
    generation, pieces = generate(ScriptedBackend(script, finish="length"), ["<|im_start|>"], request)
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


def wanting(prompt: str, **fields: Any) -> GenerationRequest:
    return msgspec.structs.replace(REQUEST, prompt_ids=HF.encode(prompt), **fields)


def test_a_stop_token_ends_it_as_a_stop_string_does() -> None:
    generation, pieces = generate(ScriptedBackend(tokens_of("hello"), finish="stop_token"))
    assert generation.finish_reason == pieces[-1].finish_reason == "stop_sequence"
    assert ("".join(piece.text for piece in pieces), generation.stop_text) == ("hello", "")


def test_alternatives_have_the_text_that_they_would_have_at_that_place() -> None:
    said = "hello wörld, ok"
    token_ids = HF.encode(said)

    class Sure(ScriptedBackend):
        @staticmethod
        def alternatives_of(token_id: int, num: int) -> list[tuple[int, float]]:
            return [(token_id, -0.5), (EOS_ID, float("-inf")), (HF.encode(" world")[-1], -2.0)]

    request = wanting("hi", sampling=Sampling(num_alternatives=3))
    _, pieces = generate(Sure([*tokens_of(said), [EOS_ID]]), request=request)
    tokens = [token for piece in pieces for token in piece.tokens]
    assert [token.id for token in tokens] == [*token_ids, EOS_ID]
    for token in tokens:
        itself, special, other = token.alternatives
        assert (itself.id, itself.text, itself.logprob, itself.is_special) == (token.id, token.text, -0.5, token.is_special)
        assert (special.text, special.is_special, special.logprob) == ("<|im_end|>", True, LOWEST_LOGPROB)
        assert (other.logprob, other.is_special, other.alternatives) == (-2.0, False, ())
    assert "".join(token.text for token in tokens if not token.is_special) == said
    assert tokens[-1].alternatives[2].text == HF.decode(HF.encode(" world")[-1:])


@pytest.mark.parametrize("prompt", ["hi wörld <|im_start|>日本", "a b " * 300])  # the second is decoded in a thread
def test_prompt_tokens_are_the_prompt_with_the_logprobs_of_all_but_the_first(prompt: str) -> None:
    request = wanting(prompt, wants_prompt_logprobs=True, sampling=Sampling(num_prompt_alternatives=2))

    async def collect() -> list[PromptToken]:
        generation = Generation(request, saying("x"), Tokenizer(HF), [], Timing())
        async for _ in generation:
            pass
        return await generation.prompt_tokens()

    tokens = run(collect())
    assert [token.id for token in tokens] == request.prompt_ids
    assert "".join(token.text for token in tokens) == prompt
    assert [token.logprob for token in tokens] == [None, *(-float(place) for place in range(1, len(tokens)))]
    assert [token.text for token in tokens if token.is_special] == ["<|im_start|>"] * prompt.count("<|im_start|>")
    assert [[other.id for other in token.alternatives] for token in tokens] == [[], *([i, i + 1] for i in request.prompt_ids[1:])]


def test_it_was_admitted_after_the_queue_that_the_engine_told_of() -> None:
    backend = saying("hello", turn_s=0.05)
    backend.queue_s = 0.02
    timing = generate(backend)[0].timing
    assert timing.admitted == timing.accepted + 0.02 < timing.first_token
    backend.queue_s = 1e9  # another machine's clock
    timing = generate(backend)[0].timing
    assert timing.admitted == timing.first_token


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
