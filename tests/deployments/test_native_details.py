"""What native answers tell of tokens: alternatives, the prompt's log-probabilities, times; and whose token opens an adapter."""

from typing import Any

import pytest

from tests.deployments.scripted_backend import HF, ScriptedBackend, post, saying, send, service_of, tokens_of

PROMPT = "hello wörld, this"


def details_of(backend: ScriptedBackend, **parameters: Any) -> dict[str, Any]:
    response = post(backend, "/generate", {"inputs": PROMPT, "parameters": parameters})
    assert response.status_code == 200, response.text
    return response.json()["details"]


def test_each_token_tells_the_alternatives_at_its_place() -> None:
    tokens = details_of(saying(" world"), details=True, return_k_alternatives=3)["tokens"]
    for token in tokens:
        others = token["alternative_tokens"]
        assert [other["id"] for other in others] == [token["id"], token["id"] + 1, token["id"] + 2]
        assert [other["logprob"] for other in others] == [-0.5, -1.5, -2.5]
        assert all(other.keys() == {"id", "text", "logprob"} for other in others)
        assert others[0]["text"] == token["text"]


def test_a_stream_tells_the_alternatives_too() -> None:
    response = post(saying("x"), "/generate_stream", {"inputs": PROMPT, "parameters": {"return_k_alternatives": 1}})
    assert response.text.count('"alternative_tokens":[{"id":') == len(tokens_of("x")) + 1


def test_no_alternatives_are_told_when_none_are_wanted() -> None:
    backend = saying("x")
    assert "alternative_tokens" not in details_of(backend, details=True, return_k_alternatives=0)["tokens"][0]
    assert backend.requests[0].sampling.num_alternatives == 0


@pytest.mark.parametrize("parameters", [{"decoder_input_details": True}, {"decoder_input_details": True, "details": True}])
def test_the_prompts_tokens_are_told_with_their_logprobs(parameters: dict[str, Any]) -> None:
    backend = saying("x")
    prefill = details_of(backend, **parameters)["prefill"]
    assert backend.requests[0].wants_prompt_logprobs
    assert [token["id"] for token in prefill] == HF.encode(PROMPT)
    assert "".join(token["text"] for token in prefill) == PROMPT
    assert [token["logprob"] for token in prefill] == [None, *(-float(i) for i in range(1, len(prefill)))]
    assert all(token.keys() == {"id", "text", "logprob"} for token in prefill)


def test_no_alternatives_to_the_prompt_are_asked_for_since_none_are_told() -> None:
    backend = saying("x")
    details_of(backend, decoder_input_details=True, return_k_alternatives=3)
    sampling = backend.requests[0].sampling
    assert (sampling.num_alternatives, sampling.num_prompt_alternatives) == (3, 0)


def test_a_prompt_of_one_token_has_no_logprob() -> None:
    details = details_of(saying("x"), decoder_input_details=True, truncate=1)
    assert [token["logprob"] for token in details["prefill"]] == [None]


@pytest.mark.parametrize(("path", "stream"), [("/generate_stream", False), ("/", True)])
def test_the_prompts_logprobs_are_not_streamed(path: str, stream: bool) -> None:
    backend = saying("x")
    body = {"inputs": PROMPT, "parameters": {"decoder_input_details": True}, "stream": stream}
    response = post(backend, path, body)
    assert (response.status_code, "decoder_input_details" in response.json()["error"], backend.requests) == (422, True, [])


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_the_queue_time_lasts_until_the_engine_took_it_in(path: str) -> None:
    backend = saying("x", turn_s=0.06)
    backend.queue_s = 0.04
    headers = post(backend, path, {"inputs": PROMPT}).headers
    assert 40 <= int(headers["x-queue-time"]) < int(headers["x-time-to-first-token"])
    if path == "/generate":
        assert int(headers["x-inference-time"]) <= int(headers["x-total-time"]) - 40


def test_a_stream_that_began_without_a_token_has_no_times_of_it() -> None:
    service = service_of(saying("x", turn_s=0.2), limits={"keep_alive_s": 0.02})
    response = send(service, "POST", "/generate_stream", json={"inputs": PROMPT})
    assert response.text.startswith(": keep-alive\n\n") and '"generated_text":"x"' in response.text
    assert "x-validation-time" in response.headers
    assert not {"x-queue-time", "x-time-to-first-token"} & response.headers.keys()


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/classify", {"inputs": "hello", "parameters": None, "stream": False}, "inputs: this server's model"),
        ("/classify_batch", {"inputs": ["hello", "you"], "parameters": None, "stream": False}, "inputs: this server's model"),
        ("/classify", {"inputs": ["hello"]}, "inputs: input should be a valid string"),
        ("/classify_batch", {"inputs": []}, "inputs: list should have at least 1 item"),
    ],
)
def test_classification_is_refused_and_the_reason_told(path: str, body: dict[str, Any], says: str) -> None:
    backend = saying("x")
    response = post(backend, path, body)
    assert (response.status_code, response.json()["error_type"], backend.requests) == (422, "validation", [])
    assert says in response.json()["error"]


def body_of(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"inputs": "hello", "parameters": {"adapter_id": "pirate", **parameters}}


def token_of(path: str, header: str, parameters: dict[str, Any]) -> str:
    """That the adapter is asked for with."""
    backend = saying("x")
    assert post(backend, path, body_of(parameters), {"Authorization": header}).status_code == 200
    assert backend.requests[0].adapter is not None
    return backend.requests[0].adapter.api_token


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/", "/invocations", "/embed"])
def test_the_bearer_opens_adapters_unless_the_body_has_a_token(path: str) -> None:
    assert token_of(path, "Bearer mine", {}) == "mine"
    assert token_of(path, "bearer  mine", {"api_token": None}) == "mine"
    assert token_of(path, "Bearer mine", {"api_token": "other"}) == "other"
    assert token_of(path, "Bearer mine", {"api_token": ""}) == ""
    assert token_of(path, "Basic bWluZQ==", {}) == ""


@pytest.mark.parametrize("inference", ["key", {"team": "key"}])
def test_the_servers_own_key_is_no_token_for_adapters(inference: Any) -> None:
    backend = saying("x")
    service = service_of(backend, api_keys={"inference": inference})
    for parameters in ({}, {"api_token": "mine"}):
        send(service, "POST", "/generate", json=body_of(parameters), headers={"Authorization": "Bearer key"})
    assert [request.adapter.api_token for request in backend.requests if request.adapter] == ["", "mine"]


def test_answers_of_both_kinds_are_described() -> None:
    paths = send(service_of(saying("x")), "GET", "/openapi.json").json()["paths"]
    for path in ("/generate", "/generate_stream", "/", "/invocations", "/embed", "/tokenize", "/classify", "/classify_batch"):
        responses = paths[path]["post"]["responses"]
        assert ("200" in responses) == ("classify" not in path)
    assert paths["/"]["post"]["responses"]["200"]["content"].keys() == {"application/json", "text/event-stream"}
    assert paths["/generate_stream"]["post"]["responses"]["200"]["content"].keys() == {"text/event-stream"}
