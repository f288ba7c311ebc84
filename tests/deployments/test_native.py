import json
from typing import Any

import pytest

from loray.deployments.errors import AdapterFailed, AdapterNotFound, Incomplete, InvalidRequest, LorayError, Overloaded, Unhealthy
from loray.deployments.native import NativeApi
from loray.deployments.native_request import Parameters
from loray.models.step import Sampling
from tests.deployments.scripted_backend import EOS_ID, HF, MAX_TOTAL_TOKENS, ScriptedBackend, post, run, saying, service_of, tokens_of

TOKEN_FIELDS = {"id", "text", "logprob", "special", "skipped"}
TIMES = ["compute", "total", "validation", "queue", "inference"]


def generate(backend: ScriptedBackend, **parameters: Any) -> dict[str, Any]:
    response = post(backend, "/generate", {"inputs": "hello", "parameters": parameters})
    assert response.status_code == 200, response.text
    return response.json()


def refusal(**parameters: Any) -> str:
    backend = saying("x")
    response = post(backend, "/generate", {"inputs": "hello", "parameters": parameters})
    assert (response.status_code, response.json()["error_type"], backend.requests) == (422, "validation", [])
    return response.json()["error"]


def events(text: str) -> list[dict[str, Any]]:
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_without_details_the_answer_is_the_text_alone() -> None:
    assert generate(saying(" world")) == {"generated_text": " world"}


def test_details_tell_every_token() -> None:
    details = generate(saying(" world"), details=True)["details"]
    tokens = details.pop("tokens")
    assert details == {
        "finish_reason": "eos_token",
        "prompt_tokens": len(HF.encode("hello")),
        "generated_tokens": len(tokens),
        "skipped_tokens": 0,
        "seed": None,
        "prefill": [],
    }
    assert all(token.keys() == TOKEN_FIELDS for token in tokens)
    assert tokens[-1] == {"id": EOS_ID, "text": "<|im_end|>", "logprob": -0.5, "special": True, "skipped": False}
    assert "".join(token["text"] for token in tokens if not token["special"]) == " world"


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, Sampling()),
        ({"temperature": 0}, Sampling()),
        ({"temperature": 1.0}, Sampling()),
        ({"temperature": 0, "do_sample": True, "top_k": 3, "seed": 5}, Sampling()),
        ({"do_sample": True, "seed": 5}, Sampling(temperature=1.0, seed=5)),
        ({"temperature": 0.5, "seed": 5}, Sampling(temperature=0.5, seed=5)),
        ({"top_k": 3, "seed": 5}, Sampling(temperature=1.0, top_k=3, seed=5)),
        ({"top_p": 0.9, "seed": 0}, Sampling(temperature=1.0, top_p=0.9, seed=0)),
        ({"typical_p": 0.4, "seed": 5}, Sampling(temperature=1.0, typical_p=0.4, seed=5)),
        ({"temperature": 0, "typical_p": 0.4}, Sampling()),
        ({"repetition_penalty": 1.2, "watermark": True}, Sampling(repetition_penalty=1.2, watermark=True)),
        ({"frequency_penalty": -2, "presence_penalty": 2}, Sampling(frequency_penalty=-2.0, presence_penalty=2.0)),
        ({"return_k_alternatives": 3}, Sampling(num_alternatives=3)),
        ({"temperature": None, "top_k": None, "top_p": None, "do_sample": False, "seed": None}, Sampling()),
    ],
)
def test_sampling_is_on_only_when_asked_for(parameters: dict[str, Any], expected: Sampling) -> None:
    backend = saying("x")
    generate(backend, **parameters)
    assert backend.requests[0].sampling == expected


def test_a_seed_is_drawn_and_reported_when_none_is_given() -> None:
    backend = saying("x")
    seeds = [generate(backend, do_sample=True, details=True)["details"]["seed"] for _ in range(2)]
    assert seeds == [request.sampling.seed for request in backend.requests]
    assert seeds[0] != seeds[1]


def test_the_new_tokens_default_to_what_fits() -> None:
    backend = saying("x")
    generate(backend)
    assert backend.requests[0].max_new_tokens == MAX_TOTAL_TOKENS - len(backend.requests[0].prompt_ids)


def test_all_of_the_limit_can_be_used_and_not_one_token_more() -> None:
    num_prompt = len(HF.encode("hello"))
    fits = MAX_TOTAL_TOKENS - num_prompt
    backend = saying("x")
    generate(backend, max_new_tokens=fits)
    assert backend.requests[0].max_new_tokens == fits
    message = refusal(max_new_tokens=fits + 1)
    assert f"{num_prompt} input tokens" in message and f"{fits + 1} new tokens" in message and str(MAX_TOTAL_TOKENS) in message


def test_a_prompt_that_fills_the_limit_is_refused_unless_truncated() -> None:
    long = {"inputs": "a b " * MAX_TOTAL_TOKENS}
    response = post(saying("x"), "/generate", long)
    assert response.status_code == 422 and "inputs" in response.json()["error"] and str(MAX_TOTAL_TOKENS) in response.json()["error"]
    backend = saying("x")
    assert post(backend, "/generate", {**long, "parameters": {"truncate": 3}}).status_code == 200
    assert backend.requests[0].prompt_ids == HF.encode(long["inputs"])[-3:]


def test_an_empty_prompt_is_refused() -> None:
    response = post(saying("x"), "/generate", {"inputs": ""})
    assert (response.status_code, "inputs" in response.json()["error"]) == (422, True)


def test_the_stop_string_stays_in_the_text() -> None:
    backend = ScriptedBackend(tokens_of(" world, this is a test"), finish="length")
    response = generate(backend, stop=["this", "zzz"], details=True)
    assert response["generated_text"] == " world, this"
    assert response["details"]["finish_reason"] == "stop_sequence"
    assert backend.endings == ["GeneratorExit"]


def test_only_a_stream_without_stop_strings_may_rest_between_tokens() -> None:
    backend = saying("x")
    for path, parameters in (("/generate_stream", {}), ("/generate_stream", {"stop": ["y"]}), ("/generate", {})):
        assert post(backend, path, {"inputs": "hello", "parameters": parameters}).status_code == 200
    assert [request.may_rest for request in backend.requests] == [True, False, False]


def test_the_full_text_begins_with_the_prompt() -> None:
    assert generate(saying(" world"), return_full_text=True)["generated_text"] == "hello world"


def test_the_adapter_and_the_end_token_rule_reach_the_backend() -> None:
    backend = saying("x")
    generate(backend, adapter_id="pirate", adapter_source="local", ignore_eos_token=True, api_token="t")
    assert (backend.requests[0].adapter_id, backend.requests[0].ignore_eos) == ("pirate", True)
    generate(backend, adapter_id=None)
    generate(backend, adapter_id="")
    assert [request.adapter_id for request in backend.requests[1:]] == ["", ""]


def test_an_unknown_source_is_refused_by_name() -> None:
    message = refusal(adapter_source="ftp")
    assert "adapter_source" in message and "not supported" in message


def test_values_that_ask_for_nothing_are_accepted() -> None:
    nothing = {"best_of": 1, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0, "watermark": False}
    nothing |= {"decoder_input_details": False, "return_k_alternatives": 0, "response_format": {"type": "text"}, "stop": []}
    assert generate(saying("x"), **nothing) == {"generated_text": "x"}


def test_the_nulls_of_lorax_clients_are_defaults() -> None:
    names = "adapter_id adapter_source merged_adapters api_token max_new_tokens repetition_penalty seed temperature top_k top_p truncate"
    names += " typical_p best_of return_k_alternatives response_format"
    assert generate(saying("x"), **dict.fromkeys(names.split())) == {"generated_text": "x"}
    assert post(saying("x"), "/generate", {"inputs": "hello", "parameters": None, "stream": False}).status_code == 200


@pytest.mark.parametrize(
    "parameters",
    [
        {"temprature": 0.5},
        {"odd-name": 1},
        {"temperature": -0.1},
        {"temperature": "0.5"},
        {"top_k": 0},
        {"top_k": 2**31},
        {"top_k": 2**64},
        {"top_k": 1.5},
        {"top_p": 0},
        {"top_p": 1.1},
        {"seed": -1},
        {"seed": 2**63},
        {"max_new_tokens": 0},
        {"truncate": 0},
        {"do_sample": "yes"},
        {"stop": ["a", "b", "c", "d", "e"]},
        {"stop": [""]},
        {"stop": "text"},
        {"details": 1},
        {"best_of": 0},
        {"typical_p": 0},
        {"typical_p": 1},
        {"repetition_penalty": 0},
        {"frequency_penalty": 2.1},
        {"presence_penalty": -2.1},
        {"watermark": "no"},
        {"decoder_input_details": 1},
        {"return_k_alternatives": -1},
        {"return_k_alternatives": 21},
        {"response_format": "json_object"},
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "schema": "{}"}},
        {"response_format": {"type": "json_object", "schema": {"const": float("nan")}}},
        {"response_format": {"type": "json_object", "schema": {"const": "\ud800"}}},
        {"response_format": {"type": "text", "schema": {}}},
        {"response_format": {"type": "regex", "grammar": "a"}},
        {"response_format": {"type": "regex", "regex": ""}},
        {"response_format": {"type": "ebnf", "grammar": "a", "strict": True}},
        {"adapter_id": "\ud800"},
    ],
)
def test_a_wrong_parameter_is_refused_by_name(parameters: dict[str, Any]) -> None:
    backend = saying("x")
    response = post(backend, "/generate", json.dumps({"inputs": "hello", "parameters": parameters}).encode())
    assert (response.status_code, response.json()["error_type"], backend.requests) == (422, "validation", [])
    name = next(iter(parameters))
    is_known = name in Parameters.model_fields
    assert response.json()["error"].startswith((f"{name}:", f"{name}.") if is_known else f"parameters.{name}: unknown field")


def test_every_wrong_field_is_named() -> None:
    error = post(saying("x"), "/generate", {"input": "hello", "parameters": {"top_k": -1}}).json()["error"]
    assert "inputs: field required" in error and "input: unknown field" in error and " top_k: " in error


@pytest.mark.parametrize(
    ("parameters", "name"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 1000}, "max_new_tokens"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 2}, "best_of"),
        ({"adapter_source": 5}, "adapter_source"),
        ({"adapter_source": "ftp"}, "adapter_source"),
        ({"response_format": {"type": "regex"}}, "response_format"),
        ({"merged_adapters": 5}, "merged_adapters"),
        ({"stream": True}, "parameters.stream"),
        (5, "parameters"),
    ],
)
def test_a_field_has_one_name_whatever_is_wrong_with_it(parameters: Any, name: str) -> None:
    assert post(saying("x"), "/generate", {"inputs": "hello", "parameters": parameters}).json()["error"].startswith(f"{name}: ")


def test_a_number_that_is_none_is_refused() -> None:
    response = post(saying("x"), "/generate", b'{"inputs": "hello", "parameters": {"temperature": NaN}}')
    assert (response.status_code, "temperature" in response.json()["error"]) == (422, True)


@pytest.mark.parametrize("path", ["/", "/invocations"])
def test_the_compatible_door_answers_an_array_or_a_stream(path: str) -> None:
    whole = post(saying("x"), path, {"inputs": "hello"})
    assert whole.json() == [{"generated_text": "x"}] and "x-total-time" in whole.headers
    streamed = post(saying("x"), path, {"inputs": "hello", "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert events(streamed.text)[-1]["generated_text"] == "x"


def test_generate_does_not_ignore_that_a_stream_was_asked_for() -> None:
    response = post(saying("x"), "/generate", {"inputs": "hello", "stream": True})
    assert (response.status_code, "stream" in response.json()["error"]) == (422, True)


def test_a_stream_has_an_event_for_each_token_and_the_last_has_it_all() -> None:
    response = post(saying(" world 日本語"), "/generate_stream", {"inputs": "hello", "parameters": {"return_full_text": True}})
    *firsts, last = events(response.text)
    assert all(event.keys() == {"token", "generated_text", "details"} for event in [*firsts, last])
    assert all(event["token"].keys() == TOKEN_FIELDS for event in [*firsts, last])
    assert all(event["generated_text"] is None and event["details"] is None for event in firsts)
    assert "".join(event["token"]["text"] for event in firsts) == " world 日本語"
    assert last["generated_text"] == "hello world 日本語"
    assert last["details"]["finish_reason"] == "eos_token" and last["details"]["generated_tokens"] == len(firsts) + 1


def test_tokens_that_come_together_are_events_of_their_own() -> None:
    token_ids = HF.encode(" world, this")
    response = post(ScriptedBackend([token_ids], finish="length"), "/generate_stream", {"inputs": "hello"})
    assert [event["token"]["id"] for event in events(response.text)] == token_ids


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
@pytest.mark.parametrize(
    ("error", "status", "error_type"),
    [
        (AdapterNotFound("no adapter 'x'"), 424, "generation"),
        (AdapterFailed("adapter 'x' is for another base"), 424, "generation"),
        (Overloaded("the queue is full"), 429, "overloaded"),
        (Incomplete("lost"), 500, "incomplete_generation"),
        (Unhealthy("no replica took the request"), 503, "healthcheck"),
    ],
)
def test_an_error_before_the_first_token_has_its_status(path: str, error: LorayError, status: int, error_type: str) -> None:
    response = post(ScriptedBackend([error]), path, {"inputs": "hello"})
    assert (response.status_code, response.json()) == (status, {"error": error.message, "error_type": error_type})
    assert ("retry-after" in response.headers) == (status in (429, 503))


def test_an_error_after_acceptance_but_before_a_token_has_its_status_too() -> None:
    response = post(ScriptedBackend([[], Incomplete("lost")]), "/generate_stream", {"inputs": "hello"})
    assert (response.status_code, response.json()["error_type"]) == (500, "incomplete_generation")


@pytest.mark.parametrize("error", [Incomplete("lost"), KeyError("a bug")])
def test_an_error_within_a_stream_is_its_last_event(error: Exception) -> None:
    response = post(ScriptedBackend([*tokens_of("hello"), error]), "/generate_stream", {"inputs": "hello"})
    *_, token, last = events(response.text)
    assert (response.status_code, token["generated_text"]) == (200, None)
    assert last == {"error": "lost" if isinstance(error, Incomplete) else "internal error", "error_type": "incomplete_generation"}


def test_headers_tell_counts_and_times() -> None:
    response = post(saying("x", turn_s=0.01), "/generate", {"inputs": "hello", "parameters": {"adapter_id": "org/poét"}})
    headers = response.headers
    num_prompt = len(HF.encode("hello"))
    assert (headers["x-compute-type"], headers["x-model-id"], headers["x-compute-characters"]) == ("cpu", "smollm2-135m", "5")
    assert (headers["x-prompt-tokens"], headers["x-generated-tokens"]) == (str(num_prompt), "2")
    assert (headers["x-total-tokens"], headers["x-skipped-tokens"]) == (str(num_prompt + 2), "0")
    assert (headers["x-adapter-id"], headers["x-adapter-source"]) == ("org/po%C3%A9t", "local")
    assert all(headers[f"x-{name}-time"].isdigit() for name in TIMES)
    assert 10 <= int(headers["x-time-to-first-token"]) <= int(headers["x-total-time"])
    assert int(headers["x-time-per-token"]) >= 10


def test_a_stream_has_the_headers_that_are_known_at_its_start() -> None:
    headers = post(saying("x"), "/generate_stream", {"inputs": "hello"}).headers
    assert {"x-compute-type", "x-model-id", "x-prompt-tokens", "x-time-to-first-token", "x-queue-time"} <= headers.keys()
    assert "x-adapter-id" not in headers and headers["cache-control"] == "no-cache"


def test_the_python_handle_takes_the_same_body() -> None:
    async def both() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        api = NativeApi(service_of(saying(" world")))
        body = {"inputs": "hello", "parameters": {"details": True}}
        return await api.generate(body), [event async for event in api.generate_stream(body)]

    whole, streamed = run(both())
    assert whole["generated_text"] == streamed[-1]["generated_text"] == " world"
    assert [event["token"] for event in streamed] == whole["details"]["tokens"]


@pytest.mark.parametrize("body", [{}, [], None, {"inputs": "x", "parameters": {"top_k": -1}}, {"inputs": "x", "stream": True}])
def test_the_python_handle_raises_what_http_would_answer(body: Any) -> None:
    with pytest.raises(InvalidRequest):
        run(NativeApi(service_of(saying("x"))).generate(body))


def test_tokenize_gives_ids_and_places() -> None:
    text = "hello world"
    spans = post(saying("x"), "/tokenize", {"inputs": text}).json()
    assert [span["id"] for span in spans] == HF.encode(text)
    assert "".join(span["text"] for span in spans) == text
    assert all(text[span["start"] : span["stop"]] == span["text"] for span in spans)


def test_no_character_of_the_text_breaks_an_events_line() -> None:
    said = "a\u0085b\u2028c\u2029d\x1ce"
    lines = [line for line in post(saying(said), "/generate_stream", {"inputs": "x"}).text.splitlines() if line]
    assert [json.loads(line.removeprefix("data:")) for line in lines][-1]["generated_text"] == said
