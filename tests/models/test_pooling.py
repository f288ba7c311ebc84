"""Embeddings against the final hidden states of transformers and PEFT in float32."""

import functools
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from loray.models.step import Admission, Pooling, Row, Sampling, Step
from tests.models.conductor import Conductor, Request, prompt_of
from tests.models.embedding_oracle import oracle, oracle_embedding
from tests.models.pooling_jobs import PAGES, Text, embed_on_ranks, mixed, play
from tests.models.rank_processes import run_ranks
from tests.models.tiny_llama import oracle_generate, save_adapter, save_llama

pytestmark = pytest.mark.slow

POOLINGS: list[Pooling] = ["mean", "last"]


def save_gpt2(folder: Path) -> Path:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=101, n_embd=36, n_layer=2, n_head=3, n_positions=128, initializer_range=0.15))
    model.save_pretrained(folder)
    return folder


def save_gpt2_adapter(base: Path, folder: Path) -> Path:
    torch.manual_seed(1)
    config = LoraConfig(r=12, lora_alpha=12, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)
    model = get_peft_model(GPT2LMHeadModel.from_pretrained(base), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base model and an adapter for it."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "gpt2":
        base = save_gpt2(folder / "base")
        return base, save_gpt2_adapter(base, folder / "adapter")
    base = save_llama(folder / "base")
    return base, save_adapter(base, folder / "adapter", r=12, lora_alpha=12)


@pytest.fixture
def conductor(case: tuple[Path, Path]) -> Conductor:
    conductor = Conductor(case[0])
    conductor.load(case[1], PAGES)
    return conductor


@functools.cache
def oracles(base: Path, adapter: Path) -> dict[bool, torch.nn.Module]:
    """By whether a text is the adapter's."""
    return {False: oracle(base), True: oracle(base, adapter)}


def assert_equals_transformers(texts: list[Text], base: Path, adapter: Path) -> None:
    models = oracles(base, adapter)
    for text in texts:
        model = models[bool(text.page_ids)]
        if text.pooling:
            assert text.embedding == pytest.approx(oracle_embedding(model, text.prompt, text.pooling), abs=1e-4)
        else:
            assert text.token_ids == oracle_generate(model, text.prompt, text.num_new)[0]


@pytest.mark.parametrize("chunk", [10_000, 16, 5])
@pytest.mark.parametrize("page_ids", [[], PAGES], ids=["base", "adapter"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_an_embedding_alone_is_the_pooled_last_hidden_state(
    case: tuple[Path, Path], conductor: Conductor, pooling: Pooling, page_ids: list[int], chunk: int
) -> None:
    texts = [Text(prompt_of(37), pooling, page_ids)]
    play(conductor, texts, chunk)
    assert_equals_transformers(texts, *case)


def test_the_adapter_and_the_kind_of_pooling_change_the_embedding(case: tuple[Path, Path]) -> None:
    """Else the tests above would show nothing."""
    base, adapter = oracles(*case).values()
    mean, last, adapted = (
        torch.tensor(oracle_embedding(model, prompt_of(37), pooling))
        for model, pooling in ((base, POOLINGS[0]), (base, POOLINGS[1]), (adapter, POOLINGS[0]))
    )
    assert (mean - last).abs().max() > 0.01 and (mean - adapted).abs().max() > 0.01


@pytest.mark.parametrize("chunk", [10_000, 7])
@pytest.mark.parametrize("stagger", [0, 2])
def test_embeddings_and_generations_share_steps(case: tuple[Path, Path], conductor: Conductor, chunk: int, stagger: int) -> None:
    texts = mixed(PAGES)
    play(conductor, texts, chunk, stagger)
    assert_equals_transformers(texts, *case)


def test_a_slot_forgets_an_embedding_that_was_given_up(case: tuple[Path, Path], conductor: Conductor) -> None:
    """Its sum must leak neither into the next embedding nor keep a generation from sampling."""
    prompt = prompt_of(20)
    half = [Row(0, 10, conductor.blocks(0, 0, 10), samples=False)]
    for text in (Text(prompt, "mean"), Text(prompt)):
        conductor.runner.execute(Step(0, [], [Admission(0, prompt_of(20, seed=9), [], 0, [], Sampling(), "mean")], half))
        play(conductor, [text])
        assert_equals_transformers([text], *case)


def test_rows_that_pool_never_reach_the_head(conductor: Conductor) -> None:
    seen: list[int] = []
    model = conductor.runner._model
    model.lm_head.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    play(conductor, [Text(prompt_of(20), "mean"), Text(prompt_of(9), "last")], chunk=6)
    assert seen == []
    play(conductor, [Text(prompt_of(20), "mean"), Text(prompt_of(9), num_new=1)])
    assert seen == [1]


def test_a_generation_in_the_slot_of_a_finished_embedding_is_undisturbed(conductor: Conductor) -> None:
    expected = conductor.generate(prompt_of(20)).token_ids
    play(conductor, [Text(prompt_of(9), "last")])
    assert conductor.play([Request(prompt_of(20))])[0].token_ids == expected


@pytest.mark.slow
@pytest.mark.parametrize("pooling", POOLINGS)
def test_an_embedding_that_is_fetched_after_the_next_step_is_its_own(tmp_path: Path, pooling: Pooling) -> None:
    conductor = Conductor(save_llama(tmp_path))
    steps = [
        Step(
            number,
            [],
            [Admission(number, [number], [], 0, [], Sampling(), pooling)],
            [Row(number, 1, conductor.blocks(number, 0, 1), True)],
        )
        for number in range(4)
    ]
    alone = [conductor.runner.launch(step).result().embeddings for step in steps]
    launched = [conductor.runner.launch(step) for step in steps[:2]]
    assert [one.result().embeddings for one in launched] == alone[:2] and alone[0] != alone[1]


def test_two_ranks_give_the_embeddings_of_one(case: tuple[Path, Path]) -> None:
    for texts in run_ranks(2, embed_on_ranks, *case):
        assert_equals_transformers(texts, *case)
