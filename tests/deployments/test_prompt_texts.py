"""Texts on their way to token ids: which are encoded, how much of them, and in which thread."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from loray.deployments.prompt_texts import CUT_TOKENS, MAX_CHARS_A_TOKEN
from loray.deployments.service import Service
from loray.deployments.tokenizer import OFF_LOOP_CHARS, OFF_LOOP_MESSAGES, Tokenizer
from tests.deployments.scripted_backend import BASE, HF, MAX_TOTAL_TOKENS, run, saying, send, service_of
from tests.tiny_tokenizer import tiny_tokenizer

pytestmark = pytest.mark.slow  # long texts

MOST = MAX_CHARS_A_TOKEN * MAX_TOTAL_TOKENS
TOO_LONG = "hello " * MOST
TEXTS = ["hello world", "", "grüße 日本語 🙂", "<|im_start|>user\nhello<|im_end|>", "  spaces \n\n", "a" * 300]


class Noting(Tokenizer):
    """Which texts it encoded, and in which threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast = HF) -> None:
        super().__init__(tokenizer)
        self.texts: list[str] = []
        self.threads: list[threading.Thread] = []

    def _encodings(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[Any]:
        self.texts += texts
        self.threads.append(threading.current_thread())
        return super()._encodings(texts, add_special_tokens)


def noting_service() -> tuple[Service, Noting]:
    service, tokenizer = service_of(saying("x")), Noting()
    service.tokenizer = tokenizer
    return service, tokenizer


def with_first_token() -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.bos_token_id)]
    )
    return tokenizer


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/generate", {"inputs": TOO_LONG}, "inputs"),
        ("/generate_stream", {"inputs": TOO_LONG}, "inputs"),
        ("/embed", {"inputs": TOO_LONG}, "inputs"),
        ("/tokenize", {"inputs": TOO_LONG}, "inputs"),
        ("/v1/completions", {"model": BASE, "prompt": TOO_LONG}, "prompt"),
        ("/v1/completions", {"model": BASE, "prompt": ["hello", TOO_LONG]}, "prompt"),
        ("/v1/embeddings", {"model": BASE, "input": ["hello", TOO_LONG]}, "input.1"),
        ("/v1/chat/completions", {"model": BASE, "messages": [{"role": "user", "content": TOO_LONG}]}, "messages"),
    ],
)
def test_a_text_that_could_be_no_prompt_is_refused_and_not_encoded(path: str, body: dict[str, Any], field: str) -> None:
    service, tokenizer = noting_service()
    response = send(service, "POST", path, json=body)
    error = response.json()["error"]
    assert f"{field}: has " in str(error) and f"characters, more than the {MOST}" in str(error)
    assert (response.status_code, tokenizer.texts) == (400 if path.startswith("/v1") else 422, [])
    if path.startswith("/v1"):
        assert error["param"] == field


@pytest.mark.parametrize("num_words", [20, 5000])
@pytest.mark.parametrize("truncate", [1, 7, 40])
def test_the_last_tokens_of_any_text_are_those_of_the_whole(num_words: int, truncate: int) -> None:
    text = " ".join(f"hello{place}, wörld!" for place in range(num_words))
    service, tokenizer = noting_service()
    response = send(service, "POST", "/generate", json={"inputs": text, "parameters": {"truncate": truncate}})
    assert response.status_code == 200, response.text
    assert service.backend.requests[0].prompt_ids == HF.encode(text)[-truncate:]  # type: ignore[attr-defined]
    (encoded,) = tokenizer.texts
    assert text.endswith(encoded) and len(encoded) <= MOST
    assert encoded == text or not encoded[0].isalnum(), "no word is cut"


@pytest.mark.parametrize("text", ["a" * 2 * MOST, "a" * MOST + " hello" + " " * (MOST - 6)])  # no word ends; too few tokens
def test_a_text_whose_last_tokens_are_not_certain_without_its_beginning_is_refused(text: str) -> None:
    service, tokenizer = noting_service()
    response = send(service, "POST", "/generate", json={"inputs": text, "parameters": {"truncate": MOST - CUT_TOKENS}})
    assert response.status_code == 422 and f"inputs: has {len(text)} characters" in response.json()["error"]
    assert all(len(encoded) <= MOST for encoded in tokenizer.texts)


@pytest.mark.parametrize("hf", [HF, with_first_token()])
def test_long_and_short_texts_are_encoded_alike(hf: PreTrainedTokenizerFast) -> None:
    tokenizer = Tokenizer(hf)
    one_by_one = [run(tokenizer.encode(text)) for text in TEXTS]
    assert run(tokenizer.encode_all(TEXTS * OFF_LOOP_MESSAGES)) == one_by_one * OFF_LOOP_MESSAGES
    assert one_by_one == [hf.encode(text) for text in TEXTS]
    long = "hello wörld, <|im_end|> " * OFF_LOOP_CHARS
    assert run(tokenizer.encode(long)) == hf.backend_tokenizer.encode(long).ids == hf.encode(long)
    assert run(tokenizer.encode_rendered(long)) == hf.backend_tokenizer.encode(long, add_special_tokens=False).ids


def test_a_long_text_is_encoded_by_what_lets_go_of_the_gil() -> None:
    tokenizer = Tokenizer(HF)
    backend = HF.backend_tokenizer

    class OnlyBatches:
        def encode_batch(self, texts: list[str], **options: bool) -> Any:
            return backend.encode_batch(texts, **options)

    tokenizer._backend = OnlyBatches()
    text = "hello " * OFF_LOOP_CHARS
    assert run(tokenizer.encode(text)) == run(tokenizer.encode_rendered(text)) == HF.encode(text)
    assert [span.id for span in run(tokenizer.spans([text]))[0]] == HF.encode(text)


@pytest.mark.parametrize(
    ("texts", "is_off_loop"),
    [(["hello"], False), (["hello " * 20] * 40, True), (["hello"] * (OFF_LOOP_MESSAGES + 1), True)],
)
@pytest.mark.parametrize(("path", "field"), [("/v1/completions", "prompt"), ("/v1/embeddings", "input")])
def test_many_short_texts_are_encoded_at_once_off_the_loop(path: str, field: str, texts: list[str], is_off_loop: bool) -> None:
    service, tokenizer = noting_service()
    assert send(service, "POST", path, json={"model": BASE, field: texts}).status_code == 200
    assert tokenizer.texts == texts
    assert [thread is not threading.main_thread() for thread in tokenizer.threads] == [is_off_loop]
