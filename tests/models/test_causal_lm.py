"""Any AutoModelForCausalLM: the same tokens as transformers and PEFT give a request alone, and as the native models give."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoConfig

from loray.models.causal_lm import CausalLMRunner
from loray.models.hosted_model import HostedOptions
from loray.models.runner_sizes import RunnerSizes
from loray.models.step import AdapterLoad, Admission, Row, Sampling, Step
from tests.models.conductor import BLOCK_SIZE, Conductor, Output, Request, prompt_of
from tests.models.families import Adapter, base_oracle, random_model, save_adapter
from tests.models.tiny_llama import oracle_generate

pytestmark = pytest.mark.slow

ALIBI = {"vocab_size": 101, "hidden_size": 40, "initializer_range": 0.2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom", {**ALIBI, "n_layer": 2, "n_head": 5}),
    "mpt": ("mpt", {**ALIBI, "d_model": 40, "n_layers": 2, "n_heads": 5, "max_seq_len": 128, "expansion_ratio": 4}),
    "falcon": ("falcon", {**ALIBI, "num_hidden_layers": 2, "num_attention_heads": 5}),
    "falcon_alibi": ("falcon", {**ALIBI, "num_hidden_layers": 2, "num_attention_heads": 5, "alibi": True, "multi_query": False}),
    "starcoder": (
        "gpt_bigcode",
        {"vocab_size": 101, "n_embd": 40, "n_layer": 2, "n_head": 5, "n_positions": 128, "initializer_range": 0.2},
    ),
    "phi": ("phi", {**ALIBI, "intermediate_size": 75, "num_hidden_layers": 2, "num_attention_heads": 5, "max_position_embeddings": 128}),
    "llama": (
        "llama",
        {**ALIBI, "intermediate_size": 75, "num_hidden_layers": 2, "num_attention_heads": 10, "num_key_value_heads": 5},
    ),
    "mistral": (
        "mistral",
        {
            **ALIBI,
            "intermediate_size": 75,
            "num_hidden_layers": 2,
            "num_attention_heads": 10,
            "num_key_value_heads": 5,
            "sliding_window": 4,
        },
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {
            **ALIBI,
            "intermediate_size": 75,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 10,
            "num_key_value_heads": 5,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "gpt2": ("gpt2", {"vocab_size": 101, "n_embd": 40, "n_layer": 2, "n_head": 5, "n_positions": 128, "initializer_range": 0.2}),
    "gpt_neox": ("gpt_neox", {**ALIBI, "intermediate_size": 75, "num_hidden_layers": 2, "num_attention_heads": 5, "rotary_pct": 0.25}),
}
RANKS = {"r4": Adapter(4), "r16": Adapter(16), "rs8": Adapter(8, uses_rslora=True)}
PAGES = {"": [], "r4": [3], "r16": [7, 1], "rs8": [4]}  # the pages of rank 16 are not neighbours
MIX = [("", 5), ("r16", 1), ("r4", 12), ("", 19), ("rs8", 7), ("r16", 12)]  # adapter and prompt length of requests that run together
WAYS = {"whole": {}, "chunked": {"chunk": 3}, "staggered": {"chunk": 5, "stagger": 2}}


class HostedConductor(Conductor):
    def __init__(self, folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32, options: HostedOptions | None = None) -> None:
        self.runner = CausalLMRunner(folder, torch.device(device), dtype, RunnerSizes(16, 100, BLOCK_SIZE), options)
        self.report = self.runner.report(0.5)
        self.max_blocks = -(-101 // BLOCK_SIZE)
        self.runner.allocate(16 * self.max_blocks, num_pages=8)
        self.step_id = 0

    def embed(self, prompts: list[list[int]], pooling: str, chunk: int = 10_000, page_ids: list[int] | None = None) -> list[list[float]]:
        """All at once, chunk by chunk."""
        embeddings: dict[int, list[float]] = {}
        for start in range(0, max(map(len, prompts)), chunk):
            admissions = [Admission(s, p, [], 0, page_ids or [], Sampling(), pooling) for s, p in enumerate(prompts)] if not start else []
            parts = {slot: prompt[start : start + chunk] for slot, prompt in enumerate(prompts) if len(prompt) > start}
            rows = [Row(slot, len(part), [], start + len(part) == len(prompts[slot])) for slot, part in parts.items()]
            self.step_id += 1
            result = self.runner.execute(Step(self.step_id, [], admissions, rows))
            assert result.token_ids == []
            embeddings.update(zip([row.slot for row in rows if row.samples], result.embeddings, strict=True))
        return [embeddings[slot] for slot in range(len(prompts))]


@dataclass
class Served:
    """A model's folder and those of its adapters, what transformers and PEFT make of them, and the runner under test."""

    base: Path
    adapters: dict[str, Path]
    hosted: HostedConductor
    oracles: dict[str, nn.Module]
    known: dict[tuple[str, int], tuple[list[int], list[float]]] = field(default_factory=dict)

    def wanted(self, adapter: str, length: int) -> tuple[list[int], list[float]]:
        if (adapter, length) not in self.known:
            self.known[adapter, length] = oracle_generate(self.oracles[adapter], prompt_of(length, length))
        return self.known[adapter, length]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Served]:
    """By the name of a model; each is made once."""
    made: dict[str, Served] = {}

    def make(name: str) -> Served:
        folder = tmp_path_factory.mktemp(name)
        model_type, settings = MODELS[name]
        random_model(AutoConfig.for_model(model_type, **settings)).save_pretrained(folder / "base")
        adapters = {key: save_adapter(folder / "base", folder / key, adapter) for key, adapter in RANKS.items()}
        oracles = {key: PeftModel.from_pretrained(base_oracle(folder / "base"), path).eval() for key, path in adapters.items()}
        hosted = HostedConductor(folder / "base")
        for key, path in adapters.items():
            hosted.load(path, PAGES[key])
        return Served(folder / "base", adapters, hosted, {"": base_oracle(folder / "base"), **oracles})

    def get(name: str) -> Served:
        if name not in made:
            made[name] = make(name)
        return made[name]

    return get


def mixed_requests() -> list[Request]:
    return [Request(prompt_of(length, length), PAGES[adapter]) for adapter, length in MIX]


def check(model: Served, outputs: list[Output]) -> None:
    for (adapter, length), output in zip(MIX, outputs, strict=True):
        token_ids, logprobs = model.wanted(adapter, length)
        assert output.token_ids == token_ids, (adapter, length)
        assert output.logprobs == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama"])
def test_requests_of_different_lengths_and_adapters_get_the_tokens_they_get_alone(
    served: Callable[[str], Served], name: str, way: str
) -> None:
    model = served(name)
    check(model, model.hosted.play(mixed_requests(), **WAYS[way]))


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gpt_neox"])
def test_the_native_model_gives_the_same_tokens(served: Callable[[str], Served], name: str) -> None:
    model = served(name)
    native = Conductor(model.base)
    for key, path in model.adapters.items():
        native.load(path, PAGES[key])
    requests = mixed_requests()
    for i, request in enumerate(requests):
        request.sampling = Sampling(temperature=0.7 * (i % 3), top_k=20 * (i % 2), top_p=0.9, seed=i)
    wanted, found = native.play(requests, chunk=6, stagger=1), model.hosted.play(requests, chunk=6, stagger=1)
    assert [output.token_ids for output in found] == [output.token_ids for output in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_the_native_model_names_the_same_linears_with_the_same_sizes(served: Callable[[str], Served]) -> None:
    for name in ("llama", "gpt2", "gpt_neox"):
        model = served(name)
        native, hosted = Conductor(model.base).report, model.hosted.report
        others = native.lora_shapes.items() - hosted.lora_shapes.items()  # which only a native model can change
        assert hosted.lora_shapes.items() <= native.lora_shapes.items() and len(others) == 2 and all(101 in shape for _, shape in others)
        assert (hosted.page_bytes, hosted.block_bytes) == (native.page_bytes, native.block_bytes)
        assert (native.has_blocks, hosted.has_blocks) == (True, False)


@pytest.mark.parametrize("chunk", [10_000, 4])
@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize(("name", "adapter"), [("bloom", ""), ("starcoder", "r16"), ("phi", "rs8")])
def test_embeddings_are_the_pooled_last_hidden_states(
    served: Callable[[str], Served], name: str, adapter: str, pooling: str, chunk: int
) -> None:
    model = served(name)
    oracle = model.oracles[adapter]
    causal_lm = oracle.get_base_model() if isinstance(oracle, PeftModel) else oracle
    prompts = [prompt_of(length, length) for length in (9, 1, 4, 12)]
    with torch.inference_mode():
        hidden = [causal_lm.base_model(torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]
    wanted = [states.mean(0) if pooling == "mean" else states[-1] for states in hidden]
    found = model.hosted.embed(prompts, pooling, chunk, PAGES[adapter])
    torch.testing.assert_close(torch.tensor(found), torch.stack(wanted), atol=1e-4, rtol=1e-4)


def test_an_embedding_given_up_halfway_leaves_nothing_in_the_next_one_of_its_slot(served: Callable[[str], Served]) -> None:
    hosted = served("bloom").hosted
    wanted = hosted.embed([prompt_of(6, 6)], "mean")[0]
    hosted.step([Row(0, 4, [], False)], [Admission(0, prompt_of(9, 9), [], 0, [], Sampling(), "mean")])
    assert hosted.embed([prompt_of(6, 6)], "mean")[0] == pytest.approx(wanted, abs=1e-5)


def test_an_embedding_and_a_generation_share_a_step(served: Callable[[str], Served]) -> None:
    model = served("bloom")
    runner, prompts = model.hosted.runner, {0: prompt_of(5, 5), 1: prompt_of(7, 7), 2: prompt_of(5, 8)}
    admissions = [Admission(slot, prompt, [], 0, [], Sampling(), "last" if slot == 1 else "") for slot, prompt in prompts.items()]
    result = runner.execute(Step(1, [], admissions, [Row(slot, len(prompts[slot]), [], True) for slot in (2, 1, 0)]))
    wanted = [oracle_generate(model.oracles[""], prompts[slot], 1)[0][0] for slot in (2, 0)]
    assert result.token_ids == wanted
    assert len(result.embeddings) == 1


def test_a_slot_that_waits_keeps_its_tokens_and_one_admitted_again_forgets_them(served: Callable[[str], Served]) -> None:
    model = served("mpt")
    step = model.hosted.step
    lengths, wanted = {0: 4, 1: 9, 2: 2}, {}
    for slot, length in lengths.items():
        wanted[slot] = model.wanted("", length)[0]
    admissions = [Admission(slot, prompt_of(length, length), [], 0, [], Sampling()) for slot, length in lengths.items()]
    found: dict[int, list[int]] = {slot: [] for slot in lengths}

    def decode(*slots: int) -> None:
        for slot, token_id in zip(slots, step([Row(slot, 1, [], True) for slot in slots])[0], strict=True):
            found[slot].append(token_id)

    for slot, token_id in enumerate(step([Row(slot, length, [], True) for slot, length in lengths.items()], admissions)[0]):
        found[slot].append(token_id)
    decode(0, 1, 2)
    decode(2, 0)
    decode(1)
    # Slot 0 is preempted: it comes back with the tokens it had, in two chunks, while the others go on.
    so_far = [*prompt_of(4, 4), *found[0]]
    tokens = step([Row(1, 1, [], True), Row(0, 3, [], False)], [Admission(0, so_far, [], 0, [], Sampling())])[0]
    found[1] += tokens
    tokens = step([Row(2, 1, [], True), Row(0, len(so_far) - 3, [], True)])[0]
    found[2].append(tokens[0])
    found[0].append(tokens[1])
    decode(1, 0, 2)
    # Slot 1 goes to another request, with an adapter.
    new = step([Row(1, 7, [], True), Row(0, 1, [], True)], [Admission(1, prompt_of(7, 7), [], 0, PAGES["rs8"], Sampling())])[0]
    assert new[0] == model.wanted("rs8", 7)[0][0]
    found[0].append(new[1])
    for slot, token_ids in found.items():
        assert token_ids == wanted[slot][: len(token_ids)], slot


def test_a_slot_whose_blocks_went_to_another_gives_its_memory_back(served: Callable[[str], Served]) -> None:
    model = served("bloom")
    runner, step = HostedConductor(model.base).runner, 0

    def run(slot: int, length: int, block_ids: list[int]) -> None:
        nonlocal step
        step += 1
        runner.execute(Step(step, [], [Admission(slot, prompt_of(length), [], 0, [], Sampling())], [Row(slot, length, block_ids, True)]))

    def held() -> set[int]:
        return {slot for batch in runner._batches for slot in batch.slots}

    run(0, 20, [0, 1])
    run(1, 20, [2, 3])
    assert held() == {0, 1}
    run(2, 5, [1])  # slot 0 has ended
    assert held() == {1, 2}
    run(0, 5, [4])  # and lives again, elsewhere
    run(3, 5, [0])  # a block of its former life
    assert held() == {0, 1, 2, 3}


def test_short_and_long_requests_together_hold_at_most_twice_their_tokens(served: Callable[[str], Served]) -> None:
    """Beyond the 256 columns that any row may hold. Slots 2 and 4 grow past a power of two on the way."""
    model = served("bloom")
    lengths = [3, 1100, 254, 40, 510, 700, 9]
    runner = CausalLMRunner(model.base, torch.device("cpu"), torch.float32, RunnerSizes(16, 1200, BLOCK_SIZE))
    runner.allocate(0, 1)
    tokens = {slot: prompt_of(length, length) for slot, length in enumerate(lengths)}
    admissions = [Admission(slot, prompt, [], 0, [], Sampling()) for slot, prompt in tokens.items()]
    for step in range(6):
        rows = [Row(slot, 1 if step else lengths[slot], [], True) for slot in tokens if step != 4 or slot % 2]  # in one step some rest
        result = runner.execute(Step(step, [], admissions if step == 0 else [], rows))
        for row, token_id in zip(rows, result.token_ids, strict=True):
            tokens[row.slot].append(token_id)
        num_computed = runner._slots.num_computed
        for batch in runner._batches:
            assert all(batch.length <= max(256, 2 * num_computed[slot]) for slot in batch.slots)
        held = sum(part.untyped_storage().nbytes() for batch in runner._batches for layer in batch.layers for part in layer)
        assert held <= runner._hosted.token_bytes * sum(max(256, 2 * int(num_computed[slot])) for slot in tokens)
    assert {len(token_ids) - length for token_ids, length in zip(tokens.values(), lengths, strict=True)} == {5, 6}
    for slot, length in enumerate(lengths):
        prompt, new = tokens[slot][:length], tokens[slot][length:]
        assert new == oracle_generate(model.oracles[""], prompt, len(new))[0], length


def test_an_adapter_that_cannot_be_read_fails_alone(served: Callable[[str], Served], tmp_path: Path) -> None:
    model = served("phi")
    failed = model.hosted.step(loads=[AdapterLoad(str(tmp_path / "absent"), [0]), AdapterLoad(str(served("bloom").adapters["r4"]), [2])])[2]
    assert "adapter_config.json is missing" in failed[0]
    assert "the base model has no module" in failed[1]
    assert model.hosted.generate(prompt_of(5, 5)).token_ids == model.wanted("", 5)[0]


def test_a_cached_prefix_is_refused(served: Callable[[str], Served]) -> None:
    with pytest.raises(AssertionError, match="a prefix is cached in blocks"):
        served("bloom").hosted.step(admissions=[Admission(0, prompt_of(20), [0], 16, [], Sampling())])
