"""What the routes share: what a wanted generation becomes, and what of it is refused before the model sees it."""

from typing import Any

import pytest

from loray.deployments.config import ServerArgs
from loray.deployments.errors import DeadlineExceeded, InvalidRequest
from loray.deployments.request import AdapterRef
from loray.deployments.service import FieldNames, Service, Wanted
from loray.deployments.tokenizer import Tokenizer
from loray.models.step import Sampling
from tests.deployments.scripted_backend import HF, MAX_TOTAL_TOKENS, ScriptedBackend, post, saying, send, service_of

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
    assert [request.deadline_s for request in backend.requests] == [2.5, 0.0]


@pytest.mark.parametrize(("path", "error_type"), [("/generate", "incomplete_generation"), ("/embed", "embedding_failure")])
def test_a_deadline_that_passed_is_told(path: str, error_type: str) -> None:
    response = post(ScriptedBackend([DeadlineExceeded("not done after 2.5 s")]), path, {"inputs": "hello"})
    assert (response.status_code, response.json()["error_type"]) == (500, error_type)
    assert "not done after 2.5 s" in response.json()["error"]
