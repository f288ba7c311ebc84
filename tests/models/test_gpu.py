"""The same tokens on a GPU as on the CPU."""

import gc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig

from loray.kernels.noise import gumbel_noise
from loray.models.device_memory import release
from loray.models.hosted_model import HostedOptions
from loray.models.sampler import noise_keys
from loray.models.step import Sampling
from tests.kernels.triton_marks import REAL_GPU
from tests.models import tiny_llama
from tests.models.conductor import Conductor, Request, prompt_of
from tests.models.families import FAMILIES, Adapter, random_model, save_adapter, save_family
from tests.models.group_of_one import group_of_one
from tests.models.peft_items import items_of, save_item
from tests.models.pooling_jobs import mixed, play
from tests.models.test_causal_lm import MODELS, HostedConductor

pytestmark = REAL_GPU
PAGES = {4: [9], 12: [7, 3], 64: [20, 21, 22, 10, 24, 25, 27, 26]}


def loaded(base: Path, adapters: dict[int, Path], device: str, dtype: torch.dtype) -> Conductor:
    conductor = Conductor(base, device=device, dtype=dtype)
    for rank, pages in PAGES.items():
        conductor.load(adapters[rank], pages)
    return conductor


def mixed_requests() -> list[Request]:
    drawn = Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=5)
    ranks = (0, 64, 12, 4, 64, 0)
    return [Request(prompt_of(5 + 9 * i, seed=i), PAGES.get(rank, []), drawn if i % 2 else Sampling()) for i, rank in enumerate(ranks)]


@pytest.mark.parametrize("chunk", [10_000, 6])
def test_a_gpu_gives_the_tokens_of_the_cpu_in_float32(base: Path, adapters: dict[int, Path], chunk: int) -> None:
    outputs = [loaded(base, adapters, device, torch.float32).play(mixed_requests(), chunk, stagger=1) for device in ("cpu", "cuda")]
    for expected, found in zip(*outputs, strict=True):
        assert found.token_ids == expected.token_ids
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-3)


def test_a_gpu_gives_the_tokens_of_transformers_and_peft_in_float32(base: Path, adapters: dict[int, Path]) -> None:
    requests = [Request(prompt_of(5 + 9 * i, seed=i), PAGES.get(rank, []), num_new=32) for i, rank in enumerate((0, 64, 12, 4))]
    found = loaded(base, adapters, "cuda", torch.float32).play(requests, chunk=10, stagger=1)
    for rank, request, output in zip((0, 64, 12, 4), requests, found, strict=True):
        token_ids, logprobs = tiny_llama.oracle_generate(tiny_llama.oracle(base, adapters.get(rank)), request.prompt, 32)
        assert output.token_ids == token_ids
        assert output.logprobs == pytest.approx(logprobs, abs=1e-3)


@pytest.mark.parametrize("chunk", [10_000, 7])
def test_embeddings_beside_generations_are_those_of_the_cpu_in_float32(base: Path, adapters: dict[int, Path], chunk: int) -> None:
    on_cpu, on_gpu = mixed(PAGES[12]), mixed(PAGES[12])
    for device, texts in (("cpu", on_cpu), ("cuda", on_gpu)):
        play(loaded(base, adapters, device, torch.float32), texts, chunk, stagger=2)
    assert sum(bool(text.pooling) for text in on_gpu) >= 2
    for expected, found in zip(on_cpu, on_gpu, strict=True):
        assert found.token_ids == expected.token_ids
        assert found.embedding == pytest.approx(expected.embedding, abs=1e-3)


@pytest.mark.parametrize(("chunk", "stagger"), [(10_000, 1), (300, 0)], ids=["whole, beside decodes", "in pieces, together"])
def test_prompts_that_no_graph_has_room_for_give_the_tokens_of_the_cpu(
    base: Path, adapters: dict[int, Path], chunk: int, stagger: int
) -> None:
    requests = [Request(prompt_of(530 + 25 * i, seed=i), PAGES.get(rank, [])) for i, rank in enumerate((0, 64, 12, 4, 64, 0))]
    outputs = []
    for device in ("cpu", "cuda"):
        conductor = Conductor(base, device=device, max_total_tokens=700)
        for rank, pages in PAGES.items():
            conductor.load(adapters[rank], pages)
        outputs.append(conductor.play(requests, chunk, stagger))
    for expected, found in zip(*outputs, strict=True):
        assert found.token_ids == expected.token_ids
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-3)


def test_more_ranks_than_a_graph_has_room_for_give_the_tokens_of_the_cpu(base: Path, adapters: dict[int, Path], tmp_path: Path) -> None:
    large = tiny_llama.save_adapter(base, tmp_path / "large", std=0.05, r=264, lora_alpha=264)
    pages = list(range(33))
    requests = [Request(prompt_of(5 + 9 * i, seed=i), page_ids) for i, page_ids in enumerate((pages, [], [40], pages))]
    outputs = []
    for device in ("cpu", "cuda"):
        conductor = Conductor(base, device=device, num_pages=48)
        conductor.load(large, pages)
        conductor.load(adapters[4], [40])
        outputs.append(conductor.play(requests, stagger=1))
    for expected, found in zip(*outputs, strict=True):
        assert found.token_ids == expected.token_ids
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-3)


def test_one_rank_with_a_group_of_nccl_gives_the_same_tokens(
    base: Path, adapters: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = loaded(base, adapters, "cpu", torch.float32).play(mixed_requests(), stagger=1)
    calls: Counter[str] = Counter()
    for name in ("all_reduce", "all_gather"):
        real = getattr(dist, name)
        monkeypatch.setattr(dist, name, lambda *args, _name=name, _real=real, **kwargs: (calls.update([_name]), _real(*args, **kwargs))[1])
    with group_of_one(tmp_path, "cuda") as parallel:
        assert dist.get_backend(parallel.group) == "nccl"
        conductor = Conductor(base, parallel, device="cuda")
        for rank, pages in PAGES.items():
            conductor.load(adapters[rank], pages)
        found = conductor.play(mixed_requests(), stagger=1)
        del conductor
        gc.collect()  # its graphs hold the group's memory
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert set(calls) == {"all_reduce", "all_gather"}


def test_bfloat16_stays_near_float32(base: Path, adapters: dict[int, Path]) -> None:
    requests = [Request(prompt_of(20, seed=i), PAGES.get(rank, []), num_new=1) for i, rank in enumerate((0, 4, 12))]
    exact = loaded(base, adapters, "cpu", torch.float32).play(requests)
    rounded = loaded(base, adapters, "cuda", torch.bfloat16).play(requests)
    for expected, found in zip(exact, rounded, strict=True):
        assert found.logprobs == pytest.approx(expected.logprobs, abs=0.5)


def test_the_report_counts_free_memory(base: Path) -> None:
    report = Conductor(base, device="cuda", dtype=torch.bfloat16).report
    assert 0 < report.free_bytes < torch.cuda.get_device_properties(0).total_memory
    assert report.dtype == "bfloat16" and report.device != "cpu"


def test_weights_that_do_not_fit_are_refused_with_what_the_gpu_has(base: Path) -> None:
    release(torch.device("cuda"))
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        with pytest.raises(
            MemoryError, match=r"weights do not fit into NVIDIA .*, of \d+\.\d GB, \d+\.\d GB in use: a larger tensor_parallel"
        ):
            Conductor(base, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_where_the_blocks_do_not_fit_into_the_gpu_there_are_fewer_and_the_tokens_are_right(
    base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    release(torch.device("cuda"))
    expected = Conductor(base).generate(prompt_of(20)).token_ids
    conductor = Conductor(base, device="cuda")
    too_many = int(0.02 * torch.cuda.get_device_properties(0).total_memory) // conductor.report.block_bytes
    torch.cuda.set_per_process_memory_fraction(0.01)
    try:
        num_blocks = conductor.runner.allocate(too_many, 32)
        assert 0 < num_blocks < too_many / 2
        assert f"out of memory with {too_many} KV blocks: trying" in caplog.records[0].getMessage()
        assert conductor.generate(prompt_of(20)).token_ids == expected
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_graphs_that_are_garbage_do_not_spoil_those_that_are_captured(base: Path) -> None:
    thresholds = gc.get_threshold()
    for _ in range(3):  # graphs within cycles, which the collector alone can free
        conductor = Conductor(base, device="cuda")
        conductor.itself = conductor  # type: ignore[attr-defined]
        gc.set_threshold(20)
    gc.set_threshold(*thresholds)


def test_noise_is_the_same_on_both_devices() -> None:
    keys = torch.from_numpy(noise_keys(np.arange(9, dtype=np.uint64), np.arange(9)))
    torch.testing.assert_close(gumbel_noise(keys.cuda(), 5000).cpu(), gumbel_noise(keys, 5000), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_gives_the_tokens_of_the_cpu_in_float32(tmp_path: Path, name: str) -> None:
    saved = save_family(FAMILIES[name], tmp_path)
    pages = {"r4": [9], "r16": [7, 3]}
    outputs = []
    for device in ("cpu", "cuda"):
        conductor = Conductor(saved.base, device=device)
        for adapter, page_ids in pages.items():
            conductor.load(saved.adapters[adapter], page_ids)
        requests = [Request(prompt_of(5 + 7 * i, seed=i), page_ids) for i, page_ids in enumerate(([], [9], [7, 3], []))]
        outputs.append(conductor.play(requests, chunk=6, stagger=1))
    for expected, found in zip(*outputs, strict=True):
        assert found.token_ids == expected.token_ids
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_what_transformers_runs_gives_the_tokens_of_the_cpu_in_float32_and_finite_ones_in_bfloat16(tmp_path: Path, name: str) -> None:
    model_type, settings = MODELS[name]
    random_model(AutoConfig.for_model(model_type, **settings)).save_pretrained(tmp_path / "base")
    adapter = save_adapter(tmp_path / "base", tmp_path / "adapter", Adapter(12))
    outputs = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.float32), ("cuda", torch.bfloat16)):
        conductor = HostedConductor(tmp_path / "base", device, dtype)
        conductor.load(adapter, [5, 2])
        requests = [Request(prompt_of(3 + 6 * i, seed=i), page_ids) for i, page_ids in enumerate(([], [5, 2], [5, 2], []))]
        outputs.append(conductor.play(requests, chunk=7, stagger=1))
    for expected, found, rounded in zip(*outputs, strict=True):
        assert found.token_ids == expected.token_ids
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-3)
        assert all(-30 < logprob <= 0 for logprob in rounded.logprobs)


def test_weights_in_eight_bits_stay_near_those_in_sixteen_and_carry_adapters(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    sizes = {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    random_model(AutoConfig.for_model("llama", **sizes, initializer_range=0.1)).save_pretrained(tmp_path / "base")
    adapter = save_adapter(tmp_path / "base", tmp_path / "adapter", Adapter(12))
    logprobs = []
    for options in (HostedOptions(), HostedOptions(quantization="bitsandbytes-8bit")):
        conductor = HostedConductor(tmp_path / "base", "cuda", torch.float16, options)
        conductor.load(adapter, [5, 2])
        requests = [Request(prompt_of(12, seed=i), page_ids, num_new=1) for i, page_ids in enumerate(([], [5, 2]))]
        logprobs.append([output.logprobs[0] for output in conductor.play(requests)])
        weight_dtypes = {
            linear.weight.dtype for linear in conductor.runner._hosted.model.model.layers[0].mlp.children() if hasattr(linear, "weight")
        }
        assert weight_dtypes == {torch.int8 if options.quantization else torch.float16}
    assert logprobs[1] == pytest.approx(logprobs[0], abs=0.3)


def test_what_adapters_have_beside_pages_gives_the_tokens_of_the_cpu(tmp_path: Path) -> None:
    """Prepared in host memory first, so pinned there on the way to the GPU."""
    base = save_family(FAMILIES["llama"], tmp_path).base
    items = ["use_dora on the embedding and the head", "bias, lora_only, with DoRA", "LoRA on the head", "trainable_token_indices"]
    folders = [save_item(base, tmp_path / item, items_of("llama")[item]) for item in items]
    outputs = []
    for device in ("cpu", "cuda"):
        conductor = Conductor(base, device=device)
        for index, folder in enumerate(folders):
            conductor.runner.host_adapters.prepare(str(folder), "")
            prepared = conductor.runner.host_adapters.find(str(folder), "")
            assert prepared is not None and prepared.values.is_pinned() == (device == "cuda")
            conductor.load(folder, [2 * index])
        requests = [Request(prompt_of(5 + 4 * i, seed=i), [2 * i] if i < len(items) else []) for i in range(len(items) + 1)]
        outputs.append(conductor.play(requests, chunk=6, stagger=1))
    for expected, found in zip(*outputs, strict=True):
        assert found.token_ids == expected.token_ids
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-3)
