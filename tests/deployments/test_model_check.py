"""Models that can't be served as asked are refused before anything starts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from loray.deployments.config import ServerArgs
from loray.deployments.model_check import check_model
from loray.models.checkpoint import CheckpointError

LLAMA = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 6}
LLAMA_SHAPE = LLAMA | {"num_key_value_heads": 3, "num_hidden_layers": 2, "hidden_size": 192}
ON_GPU = {"quantization": "fp8", "device": "cuda"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    return tmp_path


def args_for(
    folder: Path, config: dict[str, Any], ranks: int = 1, device: str = "cpu", kv_dtype: str = "auto", kv_bytes: int = 1 << 20, **model: Any
) -> ServerArgs:
    (folder / "config.json").write_text(json.dumps(config))
    kv_cache = {"dtype": kv_dtype, "cpu_bytes": kv_bytes}
    tree = {"model": {"id": str(folder), **model}, "device": device, "tensor_parallel_size": ranks, "kv_cache": kv_cache}
    return ServerArgs.model_validate(tree)


def test_a_model_is_served_natively_or_through_transformers(folder: Path) -> None:
    assert check_model(args_for(folder, LLAMA, ranks=6)) == "native"
    assert check_model(args_for(folder, LLAMA, implementation="transformers")) == "transformers"
    assert check_model(args_for(folder, {"architectures": ["MptForCausalLM"]})) == "transformers"


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("implementation", ["auto", "native"])
def test_weights_in_eight_bits_are_served_as_their_quantization_says(folder: Path, implementation: str, dtype: str) -> None:
    float8 = args_for(folder, LLAMA, 2, **ON_GPU, implementation=implementation, dtype=dtype)
    assert check_model(float8) == "native"
    assert check_model(args_for(folder, LLAMA, quantization="bitsandbytes-8bit", device="cuda", dtype=dtype)) == "transformers"


@pytest.mark.parametrize(
    ("config", "settings", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"], "num_attention_heads": 6}, {"ranks": 7}, "7 is more than this model allows: it has 6"),
        ({"architectures": ["BloomForCausalLM"]}, {"ranks": 2}, "BloomForCausalLM is served through transformers, on one rank only"),
        (LLAMA_SHAPE, {"kv_bytes": 12287}, "kv_cache.cpu_bytes: 12287 bytes are no room for 16 tokens, which take at least 12288"),
        (LLAMA_SHAPE, {"kv_bytes": 4095, "ranks": 6}, "kv_cache.cpu_bytes: 4095 bytes are no room for 16 tokens, which take at least 4096"),
        ({"architectures": ["BertForMaskedLM"]}, {}, "no causal language model with a key-value cache"),
        ({"architectures": ["BloomForCausalLM"]}, {"implementation": "native"}, "native does not know BloomForCausalLM"),
        ({"architectures": ["LlamaForCausalLM"]}, {"quantization": "bitsandbytes-8bit"}, "needs a GPU"),
        ({"architectures": ["LlamaForCausalLM"]}, {"quantization": "fp8"}, "model.quantization: fp8 needs a GPU, and device is cpu"),
        (LLAMA, {**ON_GPU, "implementation": "transformers"}, "model.quantization: fp8 needs a model that loray runs natively"),
        ({"architectures": ["BloomForCausalLM"]}, ON_GPU, "model.quantization: fp8 needs a model that loray runs natively"),
        (LLAMA, {**ON_GPU, "dtype": "float16"}, "model.quantization: fp8 needs model.dtype auto or bfloat16, not float16"),
        (LLAMA, {**ON_GPU, "dtype": "float32"}, "model.quantization: fp8 needs model.dtype auto or bfloat16, not float32"),
        ({"architectures": ["LlamaForCausalLM"]}, {"kv_dtype": "fp8"}, "kv_cache.dtype: fp8 needs a GPU"),
        ({"architectures": ["BloomForCausalLM"]}, {"kv_dtype": "fp8", "device": "cuda"}, "a model that loray runs natively"),
    ],
)
def test_a_refusal_says_why_in_one_line(folder: Path, config: dict[str, Any], settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as refusal:
        check_model(args_for(folder, config, **settings))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("tokenizer.json", "{bad", "tokenizer.json is no tokenizer: key must be a string at line 1 column 2"),
        ("tokenizer.json", "{}", "tokenizer.json is no tokenizer"),
        ("tokenizer_config.json", '{"a": ', "tokenizer_config.json can't be read"),
        ("generation_config.json", "[]", "generation_config.json does not hold a JSON object"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id is 'x', neither a token nor a list of them"),
    ],
)
def test_a_broken_tokenizer_is_refused_by_its_file(folder: Path, name: str, text: str, words: str) -> None:
    (folder / name).write_text(text)
    with pytest.raises(CheckpointError, match=words) as refusal:
        check_model(args_for(folder, LLAMA))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no') }}", "{% generation %}{{ messages[0].content }}{% endgeneration %}", "{{ a.b.c }}"]
)
def test_a_template_may_refuse_a_conversation(folder: Path, template: str) -> None:
    assert check_model(args_for(folder, LLAMA, chat_template=template)) == "native"


def test_what_is_no_template_is_refused_by_its_field(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"^model\.chat_template: no template: unexpected 'end of template' \(line 2\)$"):
        check_model(args_for(folder, LLAMA, chat_template="{{ a }}\n{% if"))
