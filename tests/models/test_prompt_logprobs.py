"""Log-probabilities against transformers: of prompts, of sampled tokens and of the alternatives to both."""

from pathlib import Path

import pytest
import torch

from loray.models.step import Admission, Alternatives, Row, Sampling
from tests.models.conductor import Conductor, Output, Request, prompt_of
from tests.models.peft_items import items_of, save_item
from tests.models.test_causal_lm import HostedConductor
from tests.models.tiny_llama import oracle

TOLERANCE = 1e-4
DRAWN = Sampling(temperature=1.3, top_k=40, seed=3, repetition_penalty=1.2, num_alternatives=4, num_prompt_alternatives=3)


def requests(pages: list[int] | None = None) -> list[Request]:
    return [
        Request(prompt_of(23, 1), sampling=DRAWN, wants_prompt_logprobs=True),
        Request(prompt_of(9, 2), sampling=Sampling(temperature=0.7, seed=1)),
        Request(prompt_of(1, 3), wants_prompt_logprobs=True),
        Request(prompt_of(14, 4), pages or [], Sampling(num_alternatives=2), wants_prompt_logprobs=True),
    ]


@torch.inference_mode()
def check(model: torch.nn.Module, request: Request, output: Output) -> None:
    tokens = request.prompt + output.token_ids
    expected = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
    of_each = expected[range(len(tokens) - 1), tokens[1:]]
    num_prompt = len(request.prompt)
    assert output.logprobs == pytest.approx(of_each[num_prompt - 1 :].tolist(), abs=TOLERANCE)
    wanted = of_each[: num_prompt - 1].tolist() if request.wants_prompt_logprobs else []
    assert output.prompt_logprobs == pytest.approx(wanted, abs=TOLERANCE)
    sampling = request.sampling
    assert len(output.prompt_alternatives) == (num_prompt - 1 if sampling.num_prompt_alternatives else 0)
    assert len(output.alternatives) == (len(output.token_ids) if sampling.num_alternatives else 0)
    check_alternatives(expected, output.prompt_alternatives, sampling.num_prompt_alternatives)
    check_alternatives(expected[num_prompt - 1 :], output.alternatives, sampling.num_alternatives)


def check_alternatives(expected: torch.Tensor, found: list[Alternatives], num: int) -> None:
    """expected: [num_places or more, vocab_size] log-probabilities."""
    for logprobs, alternatives in zip(expected, found, strict=False):
        top = logprobs.topk(num)
        assert [token_id for token_id, _ in alternatives] == top.indices.tolist()
        assert [logprob for _, logprob in alternatives] == pytest.approx(top.values.tolist(), abs=TOLERANCE)


@pytest.mark.parametrize("chunk", [10_000, 6, 1])
@pytest.mark.parametrize("kind", [Conductor, HostedConductor])
def test_every_logprob_is_transformers_whole_or_in_chunks(base: Path, kind: type[Conductor], chunk: int) -> None:
    model = oracle(base)
    for request, output in zip(requests(), kind(base).play(requests(), chunk, stagger=1), strict=True):
        check(model, request, output)


@pytest.mark.parametrize("kind", [Conductor, HostedConductor])
def test_a_long_prompt_is_scored_in_pieces(base: Path, kind: type[Conductor], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("runner", "causal_lm"):
        monkeypatch.setattr(f"loray.models.{module}.MAX_PIECE", 5)
    for request, output in zip(requests(), kind(base).play(requests()), strict=True):
        check(oracle(base), request, output)


@pytest.mark.parametrize("kind", [Conductor, HostedConductor])
def test_a_slot_forgets_a_prompt_that_was_given_up(base: Path, kind: type[Conductor]) -> None:
    conductor = kind(base)
    given_up = Admission(0, prompt_of(20), [], 0, [], Sampling(), wants_prompt_logprobs=True)
    conductor.step([Row(0, 8, conductor.blocks(0, 0, 8), samples=False)], [given_up])
    for request in (Request(prompt_of(9, 2)), Request(prompt_of(11, 5), sampling=DRAWN, wants_prompt_logprobs=True)):
        (output,) = conductor.play([request])
        check(oracle(base), request, output)


def test_prompts_are_scored_under_their_own_adapter(base: Path, adapters: dict[int, Path]) -> None:
    conductor = Conductor(base)
    conductor.load(adapters[8], [6])
    *others, adapted = requests([6])
    *outputs, output = conductor.play([*others, adapted], chunk=6)
    check(oracle(base, adapters[8]), adapted, output)
    for request, plain in zip(others, outputs, strict=True):
        check(oracle(base), request, plain)


def test_prompts_are_scored_with_what_an_adapter_changes_in_the_head(base: Path, tmp_path: Path) -> None:
    adapter = save_item(base, tmp_path, items_of("llama")["LoRA on the head"])
    conductor = Conductor(base)
    conductor.load(adapter, [4, 5])
    for request, output in zip(requests([4, 5]), conductor.play(requests([4, 5]), chunk=6), strict=True):
        check(oracle(base, adapter if request.page_ids else None), request, output)
