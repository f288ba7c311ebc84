"""Loading a model that transformers runs: its padding token, code of its own, older caches, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase, dynamic_module_utils

from loray.kernels.lora import LoraPages
from loray.models.causal_lm import CausalLMRunner
from loray.models.hosted_linear import ForwardRows, SeenTokens, host_lora
from loray.models.hosted_model import HostedModel, HostedOptions, pad_token_id
from loray.models.loader import WeightsError
from loray.models.lora_groups import lora_groups, page_runs
from loray.models.runner_sizes import RunnerSizes
from loray.models.step import AdapterLoad, Admission, Row, Sampling
from tests.models.conductor import BLOCK_SIZE, Conductor, Request, prompt_of
from tests.models.families import base_oracle, random_model
from tests.models.tiny_llama import oracle_generate
from tests.models.transposed_model import TransposedConfig, TransposedForCausalLM
from tests.tiny_tokenizer import tiny_tokenizer

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
TRUSTED = HostedOptions(trust_remote_code=True)


def load(folder: Path, options: HostedOptions | None = None) -> HostedModel:
    return HostedModel(folder, CPU, torch.float32, options or HostedOptions())


def save(folder: Path, model_type: str, **settings: Any) -> Path:
    random_model(AutoConfig.for_model(model_type, **settings)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bloom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("bloom"), "bloom", vocab_size=101, hidden_size=40, n_layer=1, n_head=5)


@pytest.fixture
def transposed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint that brings its own code."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    torch.manual_seed(0)
    model = TransposedForCausalLM(TransposedConfig())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    model.save_pretrained(folder := tmp_path / "transposed")
    shutil.copy(Path(__file__).with_name("transposed_model.py"), folder / "modeling_transposed.py")
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "TransposedConfig", "AutoModelForCausalLM": "TransposedForCausalLM"}
    config["auto_map"] = {auto: f"modeling_transposed.{name}" for auto, name in names.items()}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class OptionsConductor(Conductor):
    def __init__(self, folder: Path, options: HostedOptions | None = None) -> None:
        self.runner = CausalLMRunner(folder, CPU, torch.float32, RunnerSizes(16, 100, BLOCK_SIZE), options)
        self.max_blocks = -(-101 // BLOCK_SIZE)
        self.runner.allocate(0, 1)
        self.step_id = 0


@pytest.mark.parametrize(("chunk", "stagger"), [(10_000, 0), (3, 0), (5, 2)])
def test_a_model_with_code_of_its_own_and_transposed_keys_gives_the_tokens_each_request_gets_alone(
    transposed: Path, chunk: int, stagger: int
) -> None:
    oracle = TransposedForCausalLM.from_pretrained(transposed).eval()
    requests = [Request(prompt_of(length, length)) for length in (5, 1, 12, 12, 19)]
    outputs = OptionsConductor(transposed, TRUSTED).play(requests, chunk, stagger)
    assert [output.token_ids for output in outputs] == [oracle_generate(oracle, request.prompt)[0] for request in requests]


def test_the_keys_of_such_a_model_are_known_to_be_transposed(transposed: Path) -> None:
    ids = torch.zeros(2, 5, dtype=torch.long)
    with torch.inference_mode():
        batch = load(transposed, TRUSTED).logits([0, 1], ids, torch.ones(2, 5, dtype=torch.bool), None)[1]
    assert batch.is_transposed
    assert [part.shape for part in batch.layers[0]] == [(6, 8, 5), (6, 5, 8)]


def test_code_that_comes_with_a_checkpoint_does_not_run_unless_trusted(transposed: Path) -> None:
    with pytest.raises(ValueError, match="trust_remote_code"):
        load(transposed)


class Config(PretrainedConfig):
    def __init__(self, pad_token_id: int | None = None, eos_token_id: int | list[int] | None = None) -> None:
        super().__init__()
        self.pad_token_id, self.eos_token_id = pad_token_id, eos_token_id


def tokenizer(pad: str | None, eos: str | None) -> PreTrainedTokenizerBase:
    made = tiny_tokenizer()
    made.pad_token, made.eos_token = pad, eos
    return made


START, END = 1, 2  # ids of <|im_start|> and <|im_end|>


@pytest.mark.parametrize(
    ("pad", "eos", "config", "wanted"),
    [
        ("<|im_start|>", "<|im_end|>", Config(11, 12), START),
        (None, "<|im_end|>", Config(11, 12), 11),
        (None, "<|im_end|>", Config(None, 12), 12),
        (None, "<|im_end|>", Config(None, [13, 12]), 13),
        (None, "<|im_end|>", Config(), END),
        (None, "<|im_end|>", Config(-1, 5_000), END),
        (None, None, Config(0, 12), 0),
    ],
    ids=["tokenizer-pad", "config-pad", "config-eos", "first-config-eos", "tokenizer-eos", "ids-without-embedding", "zero-is-an-id"],
)
def test_the_padding_token_is_the_first_that_is_named(pad: str | None, eos: str | None, config: Config, wanted: int) -> None:
    assert pad_token_id(tokenizer(pad, eos), config, 400) == wanted


def test_without_any_named_token_a_padding_token_is_added() -> None:
    bare = tokenizer(None, None)
    assert pad_token_id(bare, Config(), 400) == bare.convert_tokens_to_ids("[PAD]") == len(bare) - 1


def test_an_added_padding_token_that_has_no_embedding_is_token_0() -> None:
    bare = tokenizer(None, None)
    assert pad_token_id(bare, Config(), len(bare)) == 0


def test_without_a_tokenizer_the_config_names_the_padding_token() -> None:
    assert pad_token_id(None, Config(None, 12), 400) == 12
    assert pad_token_id(None, Config(), 400) == 0


def test_the_model_takes_the_tokenizer_in_its_folder(bloom: Path, tmp_path: Path) -> None:
    shutil.copytree(bloom, folder := tmp_path / "with-tokenizer")
    tokenizer("<|im_start|>", "<|im_end|>").save_pretrained(folder)
    assert load(folder).pad_id == START
    assert load(bloom).pad_id == AutoConfig.from_pretrained(bloom).eos_token_id != START


def test_8_bit_weights_need_a_gpu(bloom: Path) -> None:
    with pytest.raises(ValueError, match="needs a GPU, and this rank runs on cpu"):
        load(bloom, HostedOptions(quantization="bitsandbytes-8bit"))


def test_8_bit_weights_need_bitsandbytes(bloom: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the package bitsandbytes: install loray with the extra `bnb`"):
        HostedModel(bloom, torch.device("cuda"), torch.float16, HostedOptions(quantization="bitsandbytes-8bit"))


def test_an_unknown_quantization_is_refused(bloom: Path) -> None:
    with pytest.raises(ValueError, match="'int3' is unknown"):
        load(bloom, HostedOptions(quantization="int3"))


def test_missing_and_unexpected_tensors_are_named(bloom: Path, tmp_path: Path) -> None:
    shutil.copytree(bloom, folder := tmp_path / "broken")
    tensors = load_file(bloom / "model.safetensors")
    gone = next(name for name in tensors if name.endswith("dense.weight"))
    save_file({name: tensor for name, tensor in tensors.items() if name != gone}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightsError, match=rf"broken: missing tensors: \S*{gone.rpartition('h.0.')[2]}"):
        load(folder)
    save_file({**tensors, "stray.weight": torch.zeros(3)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightsError, match="broken: unexpected tensors: stray.weight"):
        load(folder)


def test_models_that_keep_more_than_keys_and_values_are_refused(tmp_path: Path) -> None:
    sizes = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2}
    with pytest.raises(ValueError, match="MambaForCausalLM does not keep the keys and values of each token: cannot be served"):
        load(save(tmp_path / "mamba", "mamba", **sizes))
    hybrid = {
        **sizes,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "layer_types": ["conv", "full_attention"],
    }
    moe = {**hybrid, "num_local_experts": 2, "head_dim": 8, "layer_types": ["full_attention", "linear_attention"]}
    with pytest.raises(ValueError, match="MiniMaxForCausalLM keeps a cache of type MiniMaxCache, not just the keys and values"):
        load(save(tmp_path / "minimax", "minimax", **moe))
    with pytest.raises(ValueError, match="Lfm2ForCausalLM keeps LinearAttentionLayer, not just the keys and values"):
        load(save(tmp_path / "lfm2", "lfm2", **hybrid))


def test_linears_that_do_not_see_every_token_carry_no_lora(tmp_path: Path) -> None:
    """This BLOOM multiplies slices of `dense` itself, so what the linear would add is never asked for."""
    sizes = {"vocab_size": 101, "hidden_size": 40, "n_layer": 1, "n_head": 5, "pretraining_tp": 2, "slow_but_exact": True}
    folder = save(tmp_path / "sliced", "bloom", **sizes)
    runner = CausalLMRunner(folder, CPU, torch.float32, RunnerSizes(4, 100))
    paths = set(runner.report(0.5).lora_shapes)
    assert paths == {"transformer.h.0.self_attention.query_key_value", "transformer.h.0.mlp.dense_h_to_4h"}


def test_keys_that_are_not_one_for_each_token_are_refused(transposed: Path) -> None:
    code = transposed / "modeling_transposed.py"
    code.write_text(code.read_text().replace("presents.append(present)", "presents.append((present[0][:, :, 1:], present[1]))"))
    with pytest.raises(ValueError, match=r"keeps keys \(6, 8, \d+\) and values \(6, \d+, 8\): cannot be served"):
        load(transposed, TRUSTED)


SIZES: dict[str, Any] = {"vocab_size": 101, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
LLAMA = {**SIZES, "initializer_range": 0.2, "intermediate_size": 80, "num_key_value_heads": 2, "max_position_embeddings": 128}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
WITH_OTHER_LINEARS: dict[str, tuple[dict[str, Any], str]] = {  # settings, and the end of such a linear's path
    "phimoe": ({**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}, "mlp.router"),
    "llama4_text": ({**LLAMA, "head_dim": 8, "num_local_experts": 2, "pad_token_id": 0}, "feed_forward.router"),
    "modernbert-decoder": ({**LLAMA, **TOKENS, "local_attention": 16}, "lm_head.dense"),
    "doge": (LLAMA, "self_attn.dt_proj"),
}


@pytest.mark.parametrize("model_type", WITH_OTHER_LINEARS)
def test_a_linear_that_answers_with_more_or_sees_other_tokens_refuses_lora_and_leaves_the_others_theirs(
    tmp_path: Path, model_type: str
) -> None:
    settings, other = WITH_OTHER_LINEARS[model_type]
    base = save(tmp_path / "base", model_type, **settings)
    for name, target in (("good", "q_proj"), ("bad", other)):
        model = get_peft_model(base_oracle(base), LoraConfig(r=8, target_modules=rf".*{target}", init_lora_weights=False))
        model.save_pretrained(tmp_path / name)
    conductor = OptionsConductor(base)
    conductor.load(tmp_path / "good", [0])
    oracle = PeftModel.from_pretrained(base_oracle(base), tmp_path / "good").eval()
    requests = [Request(prompt_of(length, length), [0]) for length in (5, 9)]
    for request, output in zip(requests, conductor.play(requests, chunk=4), strict=True):
        assert output.token_ids == oracle_generate(oracle, request.prompt)[0]
    conductor.step([Row(0, 4, [], True)], [Admission(0, prompt_of(4), [], 0, [0], Sampling(), "mean")])
    failed = conductor.step(loads=[AdapterLoad(str(tmp_path / "bad"), [0])])[2]
    assert "the base model has no module" in failed[0] and other in failed[0]


BART = {"vocab_size": 101, "d_model": 48, "decoder_layers": 2, "decoder_attention_heads": 6, "decoder_ffn_dim": 80, "init_std": 0.15}
BERT = {**SIZES, "intermediate_size": 80, "initializer_range": 0.15, "is_decoder": True}
WITH_OTHER_POSITIONS: dict[str, dict[str, Any]] = {
    "roberta": {**BERT, "pad_token_id": 0},  # its positions begin after the padding's
    "bart": {**BART, "is_decoder": True, "is_encoder_decoder": False},  # its positions are columns
    "roformer": {**BERT, "embedding_size": 48},  # turns keys by columns, which change when a row moves
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", WITH_OTHER_POSITIONS)
def test_a_model_that_gives_a_padded_row_other_numbers_is_refused(tmp_path: Path, model_type: str, dtype: torch.dtype) -> None:
    folder = save(tmp_path, model_type, **WITH_OTHER_POSITIONS[model_type])
    with pytest.raises(ValueError, match="ForCausalLM gives other numbers in a padded batch than alone: cannot be served"):
        HostedModel(folder, CPU, dtype, HostedOptions())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_type", ["bloom", "falcon", "mpt", "mixtral"])
def test_half_precision_is_not_taken_for_other_numbers(tmp_path: Path, model_type: str, dtype: torch.dtype) -> None:
    names = {"mpt": {"d_model": 48, "n_layers": 2, "n_heads": 6}, "mixtral": {**LLAMA, "num_local_experts": 4}}
    HostedModel(save(tmp_path, model_type, **{**SIZES, **names.get(model_type, {})}), CPU, dtype, HostedOptions())


def test_loading_is_logged(bloom: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "loray.loader"):
        num_tensors = len(list(load(bloom).model.parameters()))
    assert [record.message.partition(", in ")[0] for record in caplog.records] == [f"loaded {num_tensors} tensors, 0.00 GB"]


def test_an_expert_that_by_chance_sees_every_token_carries_no_lora() -> None:
    gate, expert = nn.Linear(4, 4), nn.Linear(4, 4)
    seen = SeenTokens(nn.ModuleDict({"mlp": nn.ModuleDict({"gate": gate, "experts": nn.ModuleList([expert])})}), None)
    with seen.watch(2, 3):
        gate(expert(torch.zeros(2, 3, 4)))
    assert seen.close() == [gate]


class Int8Linear(nn.Linear):
    """As bitsandbytes has it: int8 weights, and an output in half precision whatever comes in."""

    def __init__(self) -> None:
        super().__init__(4, 4, bias=False)
        self.weight = nn.Parameter(torch.eye(4, dtype=torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.to(x.dtype)).bfloat16()


def test_an_input_of_another_dtype_than_the_pages_gets_its_lora() -> None:
    linear, rows = Int8Linear(), ForwardRows()
    host_lora([linear], torch.bfloat16, rows)
    pages = torch.eye(8, 4, dtype=torch.bfloat16)
    linear.lora_part.lora = LoraPages(pages[None], 2 * pages, [4])
    rows.num_tokens, rows.lora_work = 3, tuple(lora_groups([page_runs([0])], [3], torch.from_numpy))
    x = torch.arange(12.0).view(1, 3, 4)
    assert torch.equal(linear(x), 3 * x.bfloat16())
