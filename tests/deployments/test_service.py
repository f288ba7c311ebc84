"""What the routes share: what a wanted generation becomes, and what of it is refused before the model sees it."""

import asyncio
import time
from typing import Any

import openai
import pytest

from loray.deployments.config import ServerArgs
from loray.deployments.errors import DeadlineExceeded, InvalidRequest
from loray.deployments.generation import Timing
from loray.deployments.grammars import GrammarSpec
from loray.deployments.http_app import make_app
from loray.deployments.native import NativeApi
from loray.deployments.native_request import EmbedBody, GenerateBody
from loray.deployments.request import AdapterRef, AdapterTemplate
from loray.deployments.service import FieldNames, Service, Wanted
from loray.deployments.tokenizer import Tokenizer
from loray.models.step import Sampling
from tests.deployments.live_server import live
from tests.deployments.scripted_backend import BASE, HF, MAX_TOTAL_TOKENS, ScriptedBackend, post, run, saying, send, service_of

NAMES = FieldNames(prompt="prompt", max_new_tokens="max_tokens")
VOCAB_SIZE = 100


def service(**args: Any) -> Service:
    return Service(ServerArgs(**args), Tokenizer(HF), saying("x"), MAX_TOTAL_TOKENS, {"vocab_size": VOCAB_SIZE})


def test_all_that_is_wanted_reaches_the_request() -> None:
    sampling = Sampling(temperature=0.5, logit_bias={7: -1.0}, min_new_tokens=2, grammar=b"g", num_alternatives=3)
    adapter = AdapterRef(adapter_id="pirate")
    wanted = Wanted(
        sampling=sampling, adapter=adapter, max_new_tokens=5, ignore_eos=True, stop_token_ids=(VOCAB_SIZE - 1,), prompt_logprobs=True
    )
    request = service().request([1, 2], wanted, NAMES)
    assert (request.sampling, request.adapter, request.max_new_tokens, request.ignore_eos) == (sampling, adapter, 5, True)
    assert (request.stop_token_ids, request.wants_prompt_logprobs, request.prompt_ids) == ([VOCAB_SIZE - 1], True, [1, 2])


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (Wanted(sampling=Sampling(), stop_token_ids=(3, VOCAB_SIZE)), "stop_token_ids: token 100"),
        (Wanted(sampling=Sampling(logit_bias={3: 1.0, VOCAB_SIZE: 1.0})), "logit_bias: token 100"),
        (Wanted(sampling=Sampling(min_new_tokens=6), max_new_tokens=5), "min_tokens: 6 new tokens"),
        (Wanted(sampling=Sampling(min_new_tokens=MAX_TOTAL_TOKENS)), "min_tokens: 64 new tokens"),
    ],
)
def test_what_the_model_can_not_do_is_refused_by_name(wanted: Wanted, names: str) -> None:
    with pytest.raises(InvalidRequest, match=names) as refused:
        service().request([1], wanted, NAMES)
    assert refused.value.param == names.split(":")[0]


def test_one_more_try_differs_in_its_seed_and_id_alone() -> None:
    shared = service()
    first = shared.request([1], Wanted(sampling=Sampling(temperature=1.0, top_k=3, seed=5), prompt_logprobs=True), NAMES)
    more = shared.again(first)
    assert more.request_id != first.request_id and more.sampling.seed != 5
    assert (more.sampling.top_k, more.sampling.temperature, more.prompt_ids) == (3, 1.0, [1])
    assert (first.wants_prompt_logprobs, more.wants_prompt_logprobs) == (True, False)


@pytest.mark.parametrize("path", ["/generate", "/embed"])
def test_the_configured_deadline_goes_with_every_request(path: str) -> None:
    backend = ScriptedBackend([[1]], finish="length")
    for limits in ({"request_timeout_s": 2.5}, {}):
        assert send(service_of(backend, limits=limits), "POST", path, json={"inputs": "hello"}).status_code == 200
    limited, unlimited = [request.deadline_s for request in backend.requests]
    assert 0 < limited < 2.5 and unlimited == 0


def test_what_a_request_has_waited_before_is_taken_off_its_deadline() -> None:
    backend = ScriptedBackend([[1]], finish="length")
    api = NativeApi(service_of(backend, limits={"request_timeout_s": 100}))
    an_age = 40
    run(api.respond(GenerateBody(inputs="hello"), Timing(received=time.monotonic() - an_age)))
    run(api.respond_embed(EmbedBody(inputs="hello"), Timing(received=time.monotonic() - an_age)))
    assert [50 < request.deadline_s <= 60 for request in backend.requests] == [True, True]


FORMAT = {"type": "json_object"}
SLOW_TO_PREPARE: dict[str, dict[str, Any]] = {
    "/generate": {"inputs": "hello", "parameters": {"response_format": FORMAT}},
    "/generate_stream": {"inputs": "hello", "parameters": {"response_format": FORMAT}},
    "/v1/chat/completions": {"model": "pirate", "messages": [{"role": "user", "content": "hello"}]},
}


@pytest.mark.parametrize("path", SLOW_TO_PREPARE)
def test_a_deadline_holds_while_templates_and_grammars_are_waited_for(path: str) -> None:
    class Slow(ScriptedBackend):
        async def chat_template(self, adapter: AdapterRef) -> AdapterTemplate:
            await asyncio.Event().wait()
            raise AssertionError

    async def compile_slowly(spec: GrammarSpec, param: str) -> bytes:
        await asyncio.Event().wait()
        return b""

    backend = Slow([[1]])
    shared = service_of(backend, limits={"request_timeout_s": 0.05})
    shared.grammars.compile = compile_slowly  # type: ignore[method-assign]
    response = send(shared, "POST", path, json=SLOW_TO_PREPARE[path])
    assert response.status_code == 500 and "not finished within 0.05 s: it was still being prepared" in response.text
    assert not backend.requests


@pytest.mark.parametrize(("path", "error_type"), [("/generate", "incomplete_generation"), ("/embed", "embedding_failure")])
def test_a_deadline_that_passed_is_told(path: str, error_type: str) -> None:
    response = post(ScriptedBackend([DeadlineExceeded("not done after 2.5 s")]), path, {"inputs": "hello"})
    assert (response.status_code, response.json()["error_type"]) == (500, error_type)
    assert "not done after 2.5 s" in response.json()["error"]


def test_openais_client_does_not_start_what_ran_out_of_time_again() -> None:
    backend = ScriptedBackend([DeadlineExceeded("not done")])
    with live(make_app(service_of(backend))) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        with pytest.raises(openai.InternalServerError):
            client.completions.create(model=BASE, prompt="hi")
        with pytest.raises(openai.InternalServerError):
            client.embeddings.create(model=BASE, input="hi")
    assert len(backend.requests) == 2
