"""What OpenAI answers tell of their tokens: places in the text, bytes, and nothing of what a stop string cut."""

import itertools
import json
from typing import Any

import pytest
from tokenizers import pre_tokenizers, processors

from loray.deployments.tokenizer import Tokenizer
from tests.deployments.scripted_backend import BASE, EOS_ID, HF, ScriptedBackend, post, run, saying, tokens_of
from tests.tiny_tokenizer import byte_ids, tiny_tokenizer

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def choices(backend: ScriptedBackend, path: str, stream: bool = False, **fields: Any) -> list[dict[str, Any]]:
    """One, or those of all chunks."""
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]} if path == CHAT else {"prompt": "hello"}
    response = post(backend, path, {"model": BASE, **asked, "stream": stream, **fields})
    assert response.status_code == 200, response.text
    if not stream:
        return response.json()["choices"]
    events = [json.loads(event.removeprefix("data: ")) for event in response.text.split("\n\n")[:-2]]
    return [event["choices"][0] for event in events]


def told(backend: ScriptedBackend, stream: bool = False, **fields: Any) -> tuple[str, dict[str, list[Any]]]:
    """Text and log-probabilities of a completion."""
    parts = choices(backend, COMPLETIONS, stream, **fields)
    text = "".join(part["text"] for part in parts)
    return text, {name: [value for part in parts for value in part["logprobs"][name]] for name in LISTS}


def own_bytes(token: str) -> bytes:
    name, is_bytes, digits = token.partition("bytes:")
    return bytes.fromhex(digits.replace("\\x", "")) if is_bytes and not name else token.encode()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["<|im_start|>user hello<|im_end|>", "grüße <|im_end|> 日本", "日<|im_start|>"])
def test_places_of_an_echoed_texts_tokens_count_the_special_tokens_in_it(prompt: str, stream: bool) -> None:
    text, got = told(saying(" world"), stream, prompt=prompt, echo=True, logprobs=0)
    assert text == prompt + " world"
    *tokens, end = got["tokens"]
    assert (end, got["text_offset"][-1]) == (HF.eos_token, len(text))
    for token, place in zip(tokens, got["text_offset"][:-1], strict=True):
        if not token.startswith("bytes:"):
            assert text[place:].startswith(token)
    assert b"".join(map(own_bytes, tokens)).decode() == text
    assert got["text_offset"][len(HF.encode(prompt))] == len(prompt)


@pytest.mark.parametrize("stream", [False, True])
def test_every_token_that_was_counted_is_told_the_one_that_ends_the_text_too(stream: bool) -> None:
    """As lm-eval asks for scores: it drops the last one, whichever it is."""
    prompt = HF.encode("hello world")
    for script in ([[EOS_ID]], [HF.encode("!")[:1]]):
        backend = ScriptedBackend(script, finish="eos_token" if script == [[EOS_ID]] else "length")
        _, got = told(backend, stream, prompt=prompt, echo=True, logprobs=1, max_tokens=1, temperature=0)
        assert got["token_logprobs"] == [None, *(-float(place) for place in range(1, len(prompt))), -0.5]


def test_a_special_token_within_the_text_is_told_at_its_place() -> None:
    start_id = HF.convert_tokens_to_ids("<|im_start|>")
    backend = ScriptedBackend([*tokens_of("ab"), [start_id], *tokens_of("cd"), [EOS_ID]])
    text, got = told(backend, logprobs=0)
    assert text == "abcd" and dict(zip(got["tokens"], got["text_offset"], strict=True)).items() >= {("<|im_start|>", 2), (HF.eos_token, 4)}


def test_places_of_echoed_token_ids_are_in_the_text_made_of_them() -> None:
    prompt = [EOS_ID, *HF.encode("hello wörld"), EOS_ID]
    text, got = told(saying("!"), prompt=prompt, echo=True, logprobs=0)
    assert text == "hello wörld!"
    assert got["text_offset"][0] == got["text_offset"][1] == 0
    assert got["text_offset"][len(prompt) - 1] == got["text_offset"][len(prompt)] == len("hello wörld")


def test_tokens_that_the_tokenizer_adds_take_no_place_and_spaces_belong_to_the_next() -> None:
    hf = tiny_tokenizer()
    backend = hf.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True)
    around = processors.TemplateProcessing(
        single="<|endoftext|> $A <|im_end|>", special_tokens=[("<|endoftext|>", hf.bos_token_id), ("<|im_end|>", hf.eos_token_id)]
    )
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), around])
    (places,) = run(Tokenizer(hf).places(["hello world"]))
    lengths = [0, *(len(hf.decode([token_id])) for token_id in hf.encode("hello world", add_special_tokens=False)), 0]
    assert places == list(itertools.accumulate(lengths, initial=0))[:-1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_chats_tokens_have_their_own_bytes(stream: bool) -> None:
    ids = byte_ids()
    script: list[list[int]] = [[ids[byte]] for byte in "é🦜x".encode()]
    got = choices(ScriptedBackend([*script, [EOS_ID]]), CHAT, stream, logprobs=True, top_logprobs=2)
    entries = [entry for choice in got if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert [entry["bytes"] for entry in entries] == [[byte] for byte in "é🦜x".encode()]
    assert all(entry["top_logprobs"][0]["bytes"] == entry["bytes"] for entry in entries)


@pytest.mark.parametrize("stream", [False, True])
def test_alternatives_within_a_character_are_told_apart(stream: bool) -> None:
    ids = byte_ids()

    class Continuing(ScriptedBackend):
        @staticmethod
        def alternatives_of(token_id: int, num: int) -> list[tuple[int, float]]:
            return [(ids[byte], -float(byte)) for byte in (0x9F, 0xA6, 0x9C)]

    text, got = told(Continuing([[ids[byte]] for byte in "🦜".encode()], finish="length"), stream, logprobs=3)
    assert (text, got["tokens"], got["text_offset"]) == ("🦜", [r"bytes:\xf0", r"bytes:\x9f", r"bytes:\xa6", r"bytes:\x9c"], [0] * 4)
    assert [len(top) for top in got["top_logprobs"]] == [4, 3, 3, 3]
    assert got["top_logprobs"][0] == {r"bytes:\x9f": -159.0, r"bytes:\xa6": -166.0, r"bytes:\x9c": -156.0, r"bytes:\xf0": -0.5}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "text"), [("o w", "hell"), ("hello", ""), (" world", "hello"), ("s is", "hello world, thi"), ("zz", None)]
)
def test_tokens_of_a_stop_string_are_not_told(stop: str, text: str | None, stream: bool) -> None:
    said = "hello world, this is a test"
    answer = said if text is None else text
    got_text, got = told(ScriptedBackend(tokens_of(said), finish="length"), stream, stop=[stop], logprobs=0, max_tokens=40)
    assert got_text == answer
    tokens = [HF.decode(ids) for ids in tokens_of(said)]
    places = list(itertools.accumulate(map(len, tokens), initial=0))[:-1]
    expected = [(place, token) for place, token in zip(places, tokens, strict=True) if place < len(answer)]
    assert list(zip(got["text_offset"], got["tokens"], strict=True)) == expected
    entries = [
        entry
        for choice in choices(ScriptedBackend(tokens_of(said), finish="length"), CHAT, stream, stop=[stop], logprobs=True)
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert [entry["token"] for entry in entries] == [token for _, token in expected]


def test_a_streamed_token_comes_when_its_text_is_certain() -> None:
    parts = choices(ScriptedBackend(tokens_of("hello world"), finish="length"), COMPLETIONS, True, stop=[" worldly"], logprobs=0)
    assert "".join(part["text"] for part in parts) == "hello world"
    for part in parts:
        assert part["text"] == "".join(part["logprobs"]["tokens"]), "no token is told before its text"


def test_a_cut_character_at_the_end_is_told_as_tokens() -> None:
    ids = byte_ids()
    text, got = told(ScriptedBackend([[ids[byte]] for byte in "ok日".encode()[:-1]], finish="length"), logprobs=0)
    assert (text, got["tokens"]) == ("ok", ["o", "k", r"bytes:\xe6", r"bytes:\x97"])
    assert got["text_offset"] == [0, 1, 2, 2]


class Offering(ScriptedBackend):
    """Has "&" and " world" as alternatives at every place."""

    @staticmethod
    def alternatives_of(token_id: int, num: int) -> list[tuple[int, float]]:
        return [(HF.encode("&")[0], -1.0), (HF.encode(" world")[-1], -2.0)][:num]


@pytest.mark.parametrize("said", ["🙂 grüße", "日本語", "a\ufffd🦜"])
def test_alternatives_within_a_character_have_their_own_names_and_bytes(said: str) -> None:
    other = HF.decode(HF.encode(" world")[-1:])
    script = tokens_of(said)
    _, got = told(Offering([*script, [EOS_ID]]), prompt=said, echo=True, logprobs=2)
    assert all(top.items() >= {("&", -1.0), (other, -2.0)} for top in got["top_logprobs"][1:])
    (choice,) = choices(Offering([*script, [EOS_ID]]), CHAT, logprobs=True, top_logprobs=2)
    entries = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == said.encode()
    assert "".join(entry["token"] for entry in entries) == said
    for entry in entries:
        assert [(top["token"], bytes(top["bytes"])) for top in entry["top_logprobs"]] == [("&", b"&"), (other, other.encode())]


def test_native_alternatives_within_a_character_have_their_own_text() -> None:
    parameters = {"details": True, "return_k_alternatives": 2}
    response = post(Offering([*tokens_of("🙂 grüße"), [EOS_ID]]), "/generate", {"inputs": "hello", "parameters": parameters}).json()
    assert response["generated_text"] == "🙂 grüße"
    *tokens, _ = response["details"]["tokens"]
    assert "".join(token["text"] for token in tokens) == "🙂 grüße"
    assert {other["text"] for token in tokens for other in token["alternative_tokens"]} == {"&", HF.decode(HF.encode(" world")[-1:])}


@pytest.mark.parametrize("stream", [False, True])
def test_a_token_after_bytes_that_became_no_character_is_told_as_itself_at_its_place(stream: bool) -> None:
    ids = byte_ids()
    script = [[ids[byte]] for byte in b"o\xf0,k"]
    text, got = told(ScriptedBackend(script, finish="length"), stream, logprobs=0)
    assert (text, got["tokens"], got["text_offset"]) == ("o\ufffd,k", ["o", r"bytes:\xf0", ",", "k"], [0, 1, 2, 3])
    entries = [
        entry
        for choice in choices(ScriptedBackend(script, finish="length"), CHAT, stream, logprobs=True)
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert [(entry["token"], bytes(entry["bytes"])) for entry in entries] == [("o", b"o"), ("", b"\xf0"), (",", b","), ("k", b"k")]
    echoed, got = told(saying("!"), stream, prompt=[ids[byte] for byte in b"o\xf0,k"], echo=True, logprobs=0)
    assert (echoed, got["tokens"][:4], got["text_offset"][:5]) == ("o\ufffd,k!", ["o", r"bytes:\xf0", ",", "k"], [0, 1, 2, 3, 4])


def test_a_stop_string_cuts_no_broken_bytes_before_it() -> None:
    ids = byte_ids()
    text, got = told(ScriptedBackend([[ids[byte]] for byte in b"o\xf0,k"], finish="length"), logprobs=0, stop=[","])
    assert (text, got["tokens"]) == ("o\ufffd", ["o", r"bytes:\xf0"])
