"""A request's tokens are its own: alone, in any mix of others, and on two ranks. Its log-probabilities are those of transformers."""

import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import App
from tests.e2e.oracle import Oracle
from tests.e2e.patience import PATIENCE_S

pytestmark = pytest.mark.slow

NEW_TOKENS = 32
FOR_EVER = 1900  # tokens that a neighbour would take
TIMEOUT_S = 8  # far more than a case takes, far less than a neighbour
SETTLED = 1e-4
PROMPTS = ["hello world, this is", "a test", "grüße 日本語 🙂🙂 " * 9, "x", "user assistant system " * 20]
ROWS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 20, "maxItems": 20}
GRAMMAR: dict[str, Any] = {"response_format": {"type": "json_schema", "schema": ROWS}}
ALONE: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 1.7},
    "sampled": {"do_sample": True},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.5},
    "typical_p": {"typical_p": 0.4},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "presence_penalty": {"presence_penalty": -1.5},
    "watermark": {"watermark": True},
    "alternatives": {"return_k_alternatives": 5, "do_sample": True},
    "adapter": {"adapter_id": "a8"},
    "sampled adapter": {"adapter_id": "a64", "temperature": 0.7},
    "grammar": {**GRAMMAR, "do_sample": True},
}
PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.3, "presence_penalty": 0.4}
ALL: dict[str, Any] = {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "typical_p": 0.9, "watermark": True, "return_k_alternatives": 2}
ALL |= {**PENALTIES, "adapter_id": "a20", "stop": ["never comes"]}
CASES: dict[str, dict[str, Any]] = {**ALONE, "all": ALL, "all and a grammar": {**ALL, **GRAMMAR}}
# What only the OpenAI API has.
COMPLETIONS: dict[str, dict[str, Any]] = {
    "logit_bias": {"logit_bias": {"40": 5, "41": -100, "50": 3.5}},
    "min_tokens": {"min_tokens": 30, "logit_bias": {"2": 6}, "ignore_eos": False},
    "stop_token_ids": {"stop_token_ids": list(range(60, 80)), "temperature": 1.5},
    "all of them": {"logit_bias": {"40": 5}, "min_tokens": 10, "stop_token_ids": [60], "top_k": 50, "top_p": 0.9, **PENALTIES},
}

Tokens = list[tuple[Any, float]]  # what a token is called, and its log-probability


def native_body(name: str, max_new_tokens: int) -> dict[str, Any]:
    """Each case has a prompt and a seed of its own."""
    place = list(CASES).index(name)
    fixed = {"max_new_tokens": max_new_tokens, "ignore_eos_token": "response_format" not in CASES[name], "details": True}
    return {"inputs": PROMPTS[place % len(PROMPTS)], "parameters": {**fixed, "seed": place, **CASES[name]}}


def ask_native(app: App, name: str) -> Tokens:
    response = app.post("/generate", native_body(name, NEW_TOKENS))
    assert response.status_code == 200, response.text
    return [(token["id"], token["logprob"]) for token in response.json()["details"]["tokens"]]


def ask_completion(app: App, base: str, name: str) -> Tokens:
    place = list(COMPLETIONS).index(name)
    fixed = {"model": base, "prompt": PROMPTS[place], "max_tokens": NEW_TOKENS, "seed": place, "logprobs": 2, "ignore_eos": True}
    response = app.post("/v1/completions", {**fixed, **COMPLETIONS[name]})
    assert response.status_code == 200, response.text
    logprobs = response.json()["choices"][0]["logprobs"]
    return list(zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True))


def ask(app: App, base: str, name: str) -> Tokens:
    return ask_native(app, name) if name in CASES else ask_completion(app, base, name)


def assert_same(found: Tokens, expected: Tokens, name: str) -> None:
    assert [token for token, _ in found] == [token for token, _ in expected], name
    assert all(math.isfinite(logprob) and logprob <= 0 for _, logprob in found), name
    assert [logprob for _, logprob in found] == pytest.approx([logprob for _, logprob in expected], abs=SETTLED), name


@contextmanager
def neighbours(app: App, names: list[str]) -> Iterator[list[Iterator[dict[str, Any]]]]:
    """Streams that run until they are left, of which each has its first token."""

    def begin(name: str) -> Iterator[dict[str, Any]]:
        request = httpx.stream("POST", app.url + "/generate_stream", json=native_body(name, FOR_EVER), timeout=PATIENCE_S)
        lines = stack.enter_context(request).iter_lines()
        return (json.loads(line.removeprefix("data:")) for line in lines if line.startswith("data:"))

    with ExitStack() as stack:
        streams = [begin(name) for name in names]
        yield streams


@pytest.fixture(scope="module")
def base(tiny_model: Path) -> str:
    return str(tiny_model)


@pytest.fixture(scope="module")
def alone(app: App, base: str) -> dict[str, Tokens]:
    """What each case gives with nobody beside it."""
    app.wait_until_idle()
    return {name: ask(app, base, name) for name in (*CASES, *COMPLETIONS)}


def check_mix(app: App, base: str, alone: dict[str, Tokens], lasting: list[str], joining: list[str]) -> None:
    """Those that join are right beside those that last, and these stay right while others come and go."""
    with neighbours(app, lasting) as streams:
        first = [next(stream) for stream in streams]
        with ThreadPoolExecutor(len(joining)) as others:
            joined = list(others.map(lambda name: ask(app, base, name), joining))
        assert app.ask_driver("stats")["running"] >= len(lasting), "they were all there all the time"
        events = [[event, *(next(stream) for _ in range(NEW_TOKENS - 1))] for event, stream in zip(first, streams, strict=True)]
    for name, tokens in zip(joining, joined, strict=True):
        assert_same(tokens, alone[name], name)
    for name, found in zip(lasting, events, strict=True):
        assert_same([(event["token"]["id"], event["token"]["logprob"]) for event in found], alone[name], name)
    app.wait_until_idle()


def test_every_request_has_the_same_tokens_alone_and_among_sixteen_others(app: App, base: str, alone: dict[str, Tokens]) -> None:
    lasting = [name for name in CASES if "response_format" not in CASES[name]]
    check_mix(app, base, alone, [*lasting, *lasting[:2]], [*CASES, *COMPLETIONS])


def test_the_cases_differ_and_a_grammar_is_kept(alone: dict[str, Tokens], oracle: Oracle) -> None:
    """Else a parameter that is ignored would pass."""
    assert len({tuple(tokens) for tokens in alone.values()}) == len(alone)
    text = oracle.tokenizer.decode([token for token, _ in alone["grammar"]], skip_special_tokens=True)
    assert text.startswith("[") and set(text) <= set("[]0123456789, ")


@pytest.mark.soak
def test_two_ranks_give_the_tokens_of_one_and_end_what_takes_too_long(
    start_app: Callable[..., Any], tiny_adapters: Path, base: str, alone: dict[str, Tokens]
) -> None:
    settings = {"model": {"id": base}, "adapters": {"local_roots": [tiny_adapters]}, "tensor_parallel_size": 2}
    with start_app("pair", **settings, limits={"request_timeout_s": TIMEOUT_S}) as pair, ThreadPoolExecutor(len(alone)) as others:
        pair.post("/generate", native_body("grammar", 1))  # in time or not: the first starts the compiler, which may take as long
        assert_same(ask(pair, base, "grammar"), alone["grammar"], "the first grammar")  # for which the ranks read their vocabulary
        found = others.map(lambda name: ask(pair, base, name), alone)
        for name, tokens in zip(alone, found, strict=True):
            assert_same(tokens, alone[name], name)
        check_deadline(pair)


def check_deadline(app: App) -> None:
    """Sixteen that can't be through in time end with an error, and leave nothing behind."""
    with neighbours(app, ["greedy", "all", "adapter", "sampled"] * 4) as streams:
        ends = [list(stream)[-1] for stream in streams]
    assert {end.get("error_type") for end in ends} == {"incomplete_generation"}
    assert not [end["error"] for end in ends if f"within {TIMEOUT_S} s" not in end["error"]]
    app.wait_until_idle()


PROMPT = "hello world, this is a test of the tiny tokenizer"  # longer than a block, so that a cached prefix would be found


@pytest.mark.parametrize("adapter_id", ["", "a8"])
def test_native_log_probabilities_are_those_of_transformers(app: App, oracle: Oracle, adapter_id: str) -> None:
    parameters = {"adapter_id": adapter_id, "max_new_tokens": 12, "ignore_eos_token": True, "decoder_input_details": True}
    parameters |= {"return_k_alternatives": 4, "temperature": 1.4, "seed": 3, "repetition_penalty": 1.2}
    for _ in range(2):
        details = app.post("/generate", {"inputs": PROMPT, "parameters": parameters}).json()["details"]
    prompt_ids = [token["id"] for token in details["prefill"]]
    output_ids = [token["id"] for token in details["tokens"]]
    assert prompt_ids == oracle.tokenizer(PROMPT)["input_ids"] and details["prefill"][0]["logprob"] is None
    scores = oracle.logits(adapter_id, prompt_ids + output_ids).log_softmax(-1)
    told = [token["logprob"] for token in [*details["prefill"][1:], *details["tokens"]]]
    expected = [float(scores[i, token_id]) for i, token_id in enumerate((prompt_ids + output_ids)[1:])]
    assert told == pytest.approx(expected, abs=SETTLED)
    for place, token in enumerate(details["tokens"]):
        best = scores[len(prompt_ids) - 1 + place].topk(4)
        assert [other["logprob"] for other in token["alternative_tokens"]] == pytest.approx(best.values.tolist(), abs=SETTLED)
        assert [other["id"] for other in token["alternative_tokens"]] == best.indices.tolist()


@pytest.mark.parametrize("adapter_id", ["", "a8"])
def test_openai_log_probabilities_are_those_of_transformers(app: App, oracle: Oracle, base: str, adapter_id: str) -> None:
    prompt_ids = oracle.tokenizer(PROMPT)["input_ids"]
    output_ids = oracle.greedy(adapter_id, prompt_ids, 8)
    scores = oracle.logits(adapter_id, prompt_ids + output_ids).log_softmax(-1)
    expected = [float(scores[i, token_id]) for i, token_id in enumerate((prompt_ids + output_ids)[1:])]
    body = {"model": adapter_id or base, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 3}
    whole = app.post("/v1/completions", {**body, "echo": True}).json()["choices"][0]["logprobs"]
    assert whole["token_logprobs"][0] is None and whole["token_logprobs"][1:] == pytest.approx(expected, abs=SETTLED)
    for place, others in enumerate(whole["top_logprobs"][1:]):
        assert max(others.values()) == pytest.approx(float(scores[place].max()), abs=SETTLED)
    only_echo = app.post("/v1/completions", {**body, "echo": True, "max_tokens": 0}).json()["choices"][0]
    assert only_echo["text"] == PROMPT and only_echo["logprobs"]["token_logprobs"] == whole["token_logprobs"][: len(prompt_ids)]
    messages = [{"role": "user", "content": "hello"}]
    chat = {"model": adapter_id or base, "messages": messages, "max_tokens": 8, "ignore_eos": True, "seed": 1}
    content = app.post("/v1/chat/completions", {**chat, "logprobs": True, "top_logprobs": 20}).json()["choices"][0]["logprobs"]["content"]
    chat_ids = oracle.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    best = oracle.logits(adapter_id, chat_ids)[-1].log_softmax(-1).topk(20).values.tolist()
    assert [other["logprob"] for other in content[0]["top_logprobs"]] == pytest.approx(best, abs=SETTLED)
