"""Llama against transformers in float32: the numbers, the shapes it must take, every rotary kind."""

from pathlib import Path
from typing import Any

import pytest
import torch

from loray.models.layers import RMSNorm
from loray.models.step import Admission, Row, Sampling
from tests.models.conductor import Conductor, Request, prompt_of
from tests.models.tiny_llama import oracle, oracle_generate, save_llama

SHAPES: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "nine_heads_three_kv": {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 36},
    "head_dim_of_its_own": {"head_dim": 20},
    "one_kv_head": {"num_attention_heads": 5, "num_key_value_heads": 1, "hidden_size": 40},
    "no_sharing": {"num_attention_heads": 4, "num_key_value_heads": 4},
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "dynamic_within": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0},
    "longrope_short": {
        "rope_type": "longrope",
        "factor": 2.0,
        "original_max_position_embeddings": 128,
        "short_factor": [1.0, 1.5, 2.0, 2.5],
        "long_factor": [4.0, 5.0, 6.0, 7.0],
        "rope_theta": 10000.0,
    },
    "longrope_long": {
        "rope_type": "longrope",
        "factor": 2.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0, 1.5, 2.0, 2.5],
        "long_factor": [4.0, 5.0, 6.0, 7.0],
        "rope_theta": 10000.0,
    },
}


def logits_of(conductor: Conductor, prompt: list[int]) -> torch.Tensor:
    """Of the last token, from one whole prefill."""
    runner = conductor.runner
    seen: list[torch.Tensor] = []
    handle = runner._model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out))
    conductor.step([Row(0, len(prompt), conductor.blocks(0, 0, len(prompt)), True)], [Admission(0, prompt, [], 0, [], Sampling())])
    handle.remove()
    return seen[0][0]


@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    folder = save_llama(tmp_path, **SHAPES[name])
    conductor, reference, prompt = Conductor(folder), oracle(folder), prompt_of(21)
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(logits_of(conductor, prompt), expected, atol=1e-4, rtol=1e-4)
    output = conductor.generate(prompt)
    token_ids, logprobs = oracle_generate(reference, prompt)
    assert output.token_ids == token_ids
    assert output.logprobs == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("name", ROPES)
def test_every_rotary_kind_equals_transformers(name: str, tmp_path: Path) -> None:
    folder = save_llama(tmp_path, rope_parameters=ROPES[name], head_dim=8)
    prompt = prompt_of(50)
    output = Conductor(folder).generate(prompt)
    token_ids, logprobs = oracle_generate(oracle(folder), prompt)
    assert output.token_ids == token_ids
    assert output.logprobs == pytest.approx(logprobs, abs=1e-4)


def test_dynamic_rope_uses_the_frequencies_of_the_longest_sequence_the_server_admits(tmp_path: Path) -> None:
    folder = save_llama(
        tmp_path, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}, max_position_embeddings=32
    )
    prompt = prompt_of(64)
    output = Conductor(folder, max_total_tokens=64).generate(prompt, num_new=1)
    assert output.logprobs == pytest.approx(oracle_generate(oracle(folder), prompt, num_new=1)[1], abs=1e-4)


@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_a_prefill_in_chunks_gives_what_one_piece_gives(base: Path, chunk: int) -> None:
    conductor, prompt = Conductor(base), prompt_of(53)
    whole, chunked = conductor.generate(prompt), conductor.play([Request(prompt)], chunk)[0]
    assert chunked.token_ids == whole.token_ids
    assert chunked.logprobs == pytest.approx(whole.logprobs, abs=1e-4)


def test_a_cached_prefix_gives_what_a_whole_prefill_gives(base: Path) -> None:
    conductor, prompt = Conductor(base), prompt_of(40)
    whole = conductor.generate(prompt)
    cached = conductor.blocks(0, 0, 32)
    admission = Admission(3, prompt, cached, 32, [], Sampling())
    token_ids, logprobs, _ = conductor.step([Row(3, 8, conductor.blocks(3, 32, 40), True)], [admission])
    assert token_ids == whole.token_ids[:1]
    assert logprobs == pytest.approx(whole.logprobs[:1], abs=1e-4)


@pytest.mark.parametrize("stagger", [0, 1])
@pytest.mark.parametrize("chunk", [10_000, 6])
def test_a_request_gets_the_same_tokens_alone_and_among_others(base: Path, stagger: int, chunk: int) -> None:
    conductor = Conductor(base)
    requests = [Request(prompt_of(length, seed=length)) for length in (1, 2, 15, 16, 17, 40, 90, 3)]
    together = conductor.play(requests, chunk, stagger)
    for request, output in zip(requests, together, strict=True):
        alone = conductor.generate(request.prompt)
        assert output.token_ids == alone.token_ids
        assert output.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


def test_contexts_of_very_different_lengths_share_a_step(base: Path) -> None:
    conductor = Conductor(base, max_total_tokens=700, max_running=16)
    requests = [Request(prompt_of(length, seed=length), num_new=4) for length in (5, 600, 290, 30, 280)]
    reference = oracle(base)
    for request, output in zip(requests, conductor.play(requests), strict=True):
        assert output.token_ids == oracle_generate(reference, request.prompt, 4)[0]


def test_the_last_admitted_position_can_be_sampled(base: Path) -> None:
    conductor = Conductor(base, max_total_tokens=20)
    prompt = prompt_of(20)
    rows, admissions = [Row(0, 20, conductor.blocks(0, 0, 20), True)], [Admission(0, prompt, [], 0, [], Sampling())]
    token_ids, _, _ = conductor.step(rows, admissions)
    assert token_ids == oracle_generate(oracle(base), prompt, 1)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # attended in compiled code, and in torch
def test_what_a_former_owner_left_in_a_block_cannot_reach_its_next_owner(base: Path, dtype: torch.dtype) -> None:
    conductor, prompt = Conductor(base, dtype=dtype), prompt_of(5)
    expected = conductor.generate(prompt)
    assert conductor.runner._kv_cache is not None
    with torch.inference_mode():
        for layer, _ in conductor.runner._kv_cache.layers:
            layer.fill_(float("nan"))
    requests = [Request(prompt), Request(prompt_of(30, seed=1))]
    assert conductor.play(requests)[0].logprobs == pytest.approx(expected.logprobs, abs=1e-4 if dtype == torch.float32 else 0.05)


def test_results_come_in_the_order_of_the_rows_and_only_for_those_that_sample(base: Path) -> None:
    conductor = Conductor(base)
    prompts = {4: prompt_of(9, seed=4), 1: prompt_of(12, seed=1), 2: prompt_of(20, seed=2)}
    admissions = [Admission(slot, prompt, [], 0, [], Sampling()) for slot, prompt in prompts.items()]
    rows = [
        Row(2, 10, conductor.blocks(2, 0, 10), False),
        Row(4, 9, conductor.blocks(4, 0, 9), True),
        Row(1, 12, conductor.blocks(1, 0, 12), True),
    ]
    token_ids, _, _ = conductor.step(rows, admissions)
    assert token_ids == [conductor.generate(prompts[slot], num_new=1).token_ids[0] for slot in (4, 1)]


def test_a_preempted_request_resumes_with_the_same_tokens(base: Path) -> None:
    conductor, prompt = Conductor(base), prompt_of(14)
    sampling = Sampling(temperature=1.0, top_p=0.95, seed=42)
    whole = conductor.play([Request(prompt, sampling=sampling, num_new=12)])[0]
    start = conductor.play([Request(prompt, sampling=sampling, num_new=5)])[0]
    rest = conductor.play([Request(prompt_of(30)), Request(prompt + start.token_ids, sampling=sampling, num_new=7)], chunk=6)[1]
    assert start.token_ids + rest.token_ids == whole.token_ids
    assert len(set(whole.token_ids)) > 3


def test_a_fresh_prefill_and_a_later_chunk_share_a_call(base: Path) -> None:
    conductor, fresh, chunked = Conductor(base), prompt_of(20, seed=1), prompt_of(19, seed=2)
    expected = [conductor.generate(prompt, num_new=1).logprobs[0] for prompt in (fresh, chunked)]
    admissions = [Admission(slot, prompt, [], 0, [], Sampling()) for slot, prompt in enumerate((fresh, chunked))]
    conductor.step([Row(1, 2, conductor.blocks(1, 0, 2), False)], admissions)
    rows = [Row(0, 20, conductor.blocks(0, 0, 20), True), Row(1, 17, conductor.blocks(1, 2, 19), True)]
    assert conductor.step(rows)[1] == pytest.approx(expected, abs=1e-4)


def test_a_norm_whose_weight_is_a_distance_from_one_keeps_it_in_float32() -> None:
    """As Gemma's: in bfloat16 the sum would lose what the checkpoint has."""
    stored = torch.randn(64).bfloat16()
    norms = [RMSNorm(64, 1e-6, offset).bfloat16() for offset in (1.0, 0.0)]
    for norm in norms:
        norm.weight.copy_(stored)
        norm.pack(False)
    assert torch.equal(norms[0].weight, 1 + stored.float()) and torch.equal(norms[1].weight, stored)
