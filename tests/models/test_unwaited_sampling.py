"""What a GPU is never asked while it samples, seen without one: on the meta device there are no values, so a look at one is an error."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xgrammar
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from loray.models import sampler
from loray.models.grammar_masks import GrammarMasks
from loray.models.pooler import Pooler
from loray.models.prompt_logprobs import PromptLogprobs
from loray.models.slot_sampling import SlotSampling
from loray.models.step import Admission, Pooling, Row, Sampling, Step
from tests.models.sampling_jobs import LARGE_VOCAB_SIZE, PLAIN, VOCAB_SIZE, grammar, save_model


class Uploads(TorchDispatchMode):
    """Counts copies to the device, and refuses those that are waited for."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if func is torch.ops.aten._to_copy.default and tensors[0].is_cpu and kwargs.get("device", torch.device("cpu")).type != "cpu":
            assert kwargs.get("non_blocking"), "the host would wait for this copy"
            self.count += 1
        if func is torch.ops.aten.copy_.default:
            assert tensors[0].device == tensors[1].device, "the host would wait for this copy"
        assert func is not torch.ops.aten.scalar_tensor.default, "a number of the host's, put in many places, is a copy that is waited for"
        return func(*args, **kwargs)


@pytest.fixture(autouse=True)
def kernel_on_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of the one launch that draws on a GPU: it takes what lies there, and looks at nothing."""

    def launch(scores: Tensor, *limits: Tensor) -> Tensor:
        assert all(tensor.is_meta and len(tensor) == len(scores) for tensor in (scores, *limits))
        return torch.empty(len(scores), dtype=torch.int64, device="meta")

    monkeypatch.setattr(sampler, "draw", launch)


def slots_of(samplings: list[Sampling]) -> SlotSampling:
    sampling = SlotSampling(torch.zeros(len(samplings), 64, dtype=torch.int32, device="meta"), GrammarMasks(Path("no model")))
    sampling.admit([Admission(slot, [1, 2, 3], [], 0, [], one) for slot, one in enumerate(samplings)])
    return sampling


def draw(samplings: list[Sampling]) -> int:
    """How many copies to the device it takes."""
    sampling, num_rows = slots_of(samplings), len(samplings)
    with torch.no_grad(), Uploads() as uploads:
        drawn = sampling.sample(torch.empty(num_rows, LARGE_VOCAB_SIZE, device="meta"), np.arange(num_rows), np.full(num_rows, 5))
    assert all(tensor.is_meta for tensor in drawn.tokens.wait())
    return uploads.count


def test_plain_parameters_need_no_look_at_the_device() -> None:
    for one in PLAIN:
        draw([one])
    draw(PLAIN)


def test_the_number_of_copies_does_not_grow_with_the_rows() -> None:
    assert draw(PLAIN) == draw(PLAIN * 3) <= 10
    assert draw([Sampling(temperature=1.0, seed=i) for i in range(9)]) == 3


def test_a_watermark_is_drawn_on_the_host() -> None:
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        draw([Sampling(watermark=True)])


def test_only_grammars_and_watermarks_need_the_tokens_before() -> None:
    rows = [Row(slot, 1, [], True) for slot in range(len(PLAIN))]
    sampling = slots_of(PLAIN)
    assert not sampling.needs_tokens(Step(1, [], [], rows))
    for special in (Sampling(watermark=True), Sampling(temperature=1.0, grammar=b"any")):
        admission = Admission(0, [1, 2], [], 0, [], special)
        assert sampling.needs_tokens(Step(1, [], [admission], rows))
    marked = slots_of([*PLAIN, Sampling(watermark=True)])
    others = Step(1, [], [], rows)
    own = Step(2, [], [], [Row(len(PLAIN), 1, [], True)])
    anew = Step(3, [], [Admission(len(PLAIN), [1], [], 0, [], Sampling(temperature=1.0))], own.rows)
    assert [marked.needs_tokens(step) for step in (others, own, anew)] == [False, True, False]


def test_the_mask_of_a_grammar_is_sent_without_waiting_for_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    masked: list[Tensor] = []
    monkeypatch.setattr(xgrammar, "apply_token_bitmask_inplace", lambda scores, bits, vocab_size: masked.extend((scores, bits)))
    masks = GrammarMasks(save_model(tmp_path))
    masks.admit(1, grammar(regex="[ab]"), [])
    with Uploads() as uploads:
        masks.mask(torch.empty(2, VOCAB_SIZE, device="meta"), [0, 1], [[], []])
    assert uploads.count == 2 and [tensor.is_meta for tensor in masked] == [True, True]


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_an_embedding_is_fetched_when_it_is_asked_for(pooling: Pooling) -> None:
    pooler = Pooler()
    pooler.admit(Admission(0, [1, 2, 3], [], 0, [], Sampling(), pooling))
    (embedding,) = pooler.pool([Row(0, 3, [0], True)], np.array([0]), torch.empty(3, 8, device="meta")).wait()
    assert embedding.is_meta and embedding.shape == (8,)


@pytest.mark.parametrize("num_alternatives", [0, 2])
def test_log_probabilities_of_a_prompt_are_fetched_when_they_are_asked_for(num_alternatives: int) -> None:
    prompts = PromptLogprobs()
    sampling = Sampling(num_prompt_alternatives=num_alternatives)
    prompts.admit(Admission(0, [1, 2, 3], [], 0, [], sampling, wants_prompt_logprobs=True))
    prompts.add(0, torch.empty(2, 50, device="meta"))
    prompts.add(0, torch.empty(1, 50, device="meta"))
    ((_, scores),) = prompts.take([0])
    assert all(tensor.is_meta for piece in scores.pieces for tensor in piece.wait())
