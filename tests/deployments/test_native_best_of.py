"""best_of at the native doors: several sequences at once, one answer."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from loray.deployments.errors import LorayError, Overloaded
from loray.deployments.native import NativeApi
from loray.deployments.request import GenerationRequest, TokenEvent
from tests.deployments.scripted_backend import EOS_ID, HF, ScriptedBackend, post, run, saying, send, service_of, tokens_of

BODY = {"inputs": "hello", "parameters": {"best_of": 2, "do_sample": True, "details": True}}
SAID = [" one, two, three", " world"]
LOGPROBS = [-0.4, -0.3]  # the longer one is the less probable on average, the more so in all


class Several(ScriptedBackend):
    """Says another thing for each request, and nothing before `together` requests are there."""

    def __init__(self, together: int = 1, said: Sequence[str] = SAID, logprobs: Sequence[float] = LOGPROBS) -> None:
        super().__init__([])
        self._together = together
        self._said = said
        self._logprobs = logprobs

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        async for event in super().generate(request):
            while len(self.requests) < self._together:
                await asyncio.sleep(0)
            yield event

    def script_of(self, request: GenerationRequest) -> Sequence[list[int] | Exception]:
        return [*tokens_of(self._said[self.requests.index(request)]), [EOS_ID]]

    def logprob_of(self, request: GenerationRequest) -> float:
        return self._logprobs[self.requests.index(request)]


def answer(backend: ScriptedBackend, **parameters: Any) -> dict[str, Any]:
    response = post(backend, "/generate", {**BODY, "parameters": {**BODY["parameters"], **parameters}})  # type: ignore[dict-item]
    assert response.status_code == 200, response.text
    return response.json()


def refusal(path: str = "/generate", body: dict[str, Any] | None = None, **parameters: Any) -> str:
    backend = saying("x")
    response = post(backend, path, {"inputs": "hello", "parameters": {"best_of": 2, **parameters}, **(body or {})})
    assert (response.status_code, response.json()["error_type"], backend.requests) == (422, "validation", [])
    return response.json()["error"]


def test_the_sequence_whose_tokens_are_the_most_probable_on_average_is_the_answer() -> None:
    response = answer(Several())
    assert response["generated_text"] == " world"
    (other,) = response["details"]["best_of_sequences"]
    assert other["generated_text"] == " one, two, three"
    assert other.keys() == {"generated_text", "finish_reason", "generated_tokens", "seed", "prefill", "tokens"}
    assert (other["finish_reason"], other["generated_tokens"], other["prefill"]) == ("eos_token", len(other["tokens"]), [])
    assert "".join(token["text"] for token in other["tokens"] if not token["special"]) == " one, two, three"


def test_of_equals_the_first_is_the_answer() -> None:
    assert answer(Several(logprobs=[-0.5, -0.5]))["generated_text"] == SAID[0]


def test_the_sequences_run_at_once_with_different_seeds() -> None:
    backend = Several(together=2)
    details = answer(backend)["details"]
    seeds = [request.sampling.seed for request in backend.requests]
    assert len(set(seeds)) == len({request.request_id for request in backend.requests}) == 2
    assert [details["best_of_sequences"][0]["seed"], details["seed"]] == seeds


def test_the_full_text_and_the_stop_string_are_in_every_sequence() -> None:
    response = answer(Several(), return_full_text=True, stop=["three"])
    assert response["details"]["best_of_sequences"][0]["generated_text"] == "hello one, two, three"
    assert response["generated_text"] == "hello world"


def test_without_details_only_the_answer_is_told() -> None:
    assert answer(Several(), details=False) == {"generated_text": " world"}


def test_one_sequence_has_no_others_beside_it() -> None:
    backend = Several()
    assert "best_of_sequences" not in answer(backend, best_of=1)["details"]
    assert len(backend.requests) == 1


def test_the_prompts_logprobs_are_asked_for_once_and_told_of_all() -> None:
    backend = Several()
    details = answer(backend, decoder_input_details=True)["details"]
    assert [request.wants_prompt_logprobs for request in backend.requests] == [True, False]
    assert [token["id"] for token in details["prefill"]] == HF.encode("hello")
    assert details["best_of_sequences"][0]["prefill"] == details["prefill"]


def test_the_headers_count_the_answer() -> None:
    response = post(Several(), "/generate", BODY)
    assert response.headers["x-generated-tokens"] == str(len(tokens_of(" world")) + 1)
    assert int(response.headers["x-total-time"]) >= int(response.headers["x-inference-time"])


def test_an_error_of_one_ends_the_others_and_is_the_answer() -> None:
    class Refusing(ScriptedBackend):
        def script_of(self, request: GenerationRequest) -> Sequence[list[int] | Exception]:
            return [Overloaded("the queue is full")] if self.requests.index(request) == 1 else [[1]] * 1000

    backend = Refusing([], turn_s=0.02)
    response = post(backend, "/generate", BODY)
    assert (response.status_code, response.json()["error_type"]) == (429, "overloaded")
    assert sorted(backend.endings) == ["CancelledError", "Overloaded"]


def test_cancelling_the_request_cancels_every_sequence() -> None:
    backend = ScriptedBackend([[1]] * 1000, turn_s=0.02)

    async def give_up() -> None:
        call = asyncio.create_task(NativeApi(service_of(backend)).generate(BODY))
        while len(backend.requests) < 2:
            await asyncio.sleep(0)
        call.cancel()
        await call

    with pytest.raises(asyncio.CancelledError):
        run(give_up())
    assert backend.endings == ["CancelledError"] * 2


def test_best_of_is_limited_by_the_config_which_info_tells() -> None:
    assert "best_of: 3 is more than this server's max_best_of, 2" in refusal(best_of=3, do_sample=True)
    service = service_of(Several(said=SAID * 2, logprobs=LOGPROBS * 2), limits={"max_best_of": 4})
    body = {"inputs": "hello", "parameters": {"best_of": 4, "temperature": 0.5, "details": True}}
    assert len(send(service, "POST", "/generate", json=body).json()["details"]["best_of_sequences"]) == 3
    assert send(service, "GET", "/info").json()["max_best_of"] == 4
    assert send(service_of(saying("x")), "GET", "/info").json()["max_best_of"] == 2


@pytest.mark.parametrize("parameters", [{}, {"temperature": 0}, {"temperature": 1}, {"temperature": 0, "do_sample": True}])
def test_best_of_needs_sampling(parameters: dict[str, Any]) -> None:
    assert "best_of" in refusal(**parameters) and "sampling" in refusal(**parameters)


def test_best_of_has_no_seed() -> None:
    message = refusal(do_sample=True, seed=0)
    assert "seed" in message and "best_of" in message


@pytest.mark.parametrize(("path", "body"), [("/generate_stream", {}), ("/", {"stream": True}), ("/invocations", {"stream": True})])
def test_best_of_is_not_streamed(path: str, body: dict[str, Any]) -> None:
    assert "best_of" in refusal(path, body, do_sample=True)


def test_the_python_handle_streams_no_best_of_either() -> None:
    async def stream() -> None:
        async for _ in NativeApi(service_of(saying("x"))).generate_stream(BODY):
            pass

    with pytest.raises(LorayError, match="best_of"):
        run(stream())
