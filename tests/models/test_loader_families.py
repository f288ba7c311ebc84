"""Every native family loads from every layout that Hugging Face folders have, old habits included, and a rank reads its part alone."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from loray.models.decoder import Decoder
from loray.models.loader import load_weights
from loray.models.parallel import Parallel
from loray.models.registry import ARCHITECTURES, model_class
from tests.models.families import FAMILIES, config_of, random_model
from tests.models.tiny_llama import save_llama

Tensors = dict[str, Tensor]


def save_family(name: str, folder: Path, **changes: object) -> Tensors:
    """Its tensors too, as transformers names them."""
    family = FAMILIES[name]
    random_model(config_of(family, **changes), family.norm_center).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def save_sharded(tensors: Tensors, folder: Path) -> None:
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    (folder / "model.safetensors").unlink()
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@torch.inference_mode()
def load(folder: Path, parallel: Parallel | None = None) -> tuple[Decoder, int]:
    """The model and the bytes read. What the loader leaves out stays NaN."""
    config = AutoConfig.from_pretrained(folder)
    model = model_class(config)(config, parallel or Parallel(), 64)
    for parameter in model.parameters():
        parameter.fill_(torch.nan)
    num_bytes = load_weights(model, folder)
    assert not any(parameter.isnan().any() for parameter in model.parameters())
    return model, num_bytes


def assert_same(model: Decoder, expected: Decoder) -> None:
    for (name, found), parameter in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(found, parameter), name


def test_every_architecture_of_transformers_has_a_tiny_model() -> None:
    assert {family.architecture for family in FAMILIES.values()} >= {name for name in ARCHITECTURES if hasattr(transformers, name)}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_loads_in_one_file_or_several_with_its_prefix_or_without(name: str, tmp_path: Path) -> None:
    tensors = save_family(name, tmp_path)
    expected, num_bytes = load(tmp_path)
    assert num_bytes == sum(tensor.nbytes for tensor in tensors.values())

    bare = {tensor_name.removeprefix(expected.prefix): tensor for tensor_name, tensor in tensors.items()}
    assert bare.keys() != tensors.keys()
    save_file(bare, tmp_path / "model.safetensors")
    assert_same(load(tmp_path)[0], expected)
    save_sharded(bare, tmp_path)
    assert_same(load(tmp_path)[0], expected)

    random_model(config_of(FAMILIES[name]), FAMILIES[name].norm_center).save_pretrained(tmp_path / "sharded", max_shard_size="10KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    assert_same(load(tmp_path / "sharded")[0], expected)


def with_gpt2_buffers(tensors: Tensors) -> Tensors:
    buffers = ("bias", "masked_bias")
    return tensors | {f"transformer.h.{layer}.attn.{name}": torch.ones(1, 1, 128, 128) for layer in range(2) for name in buffers}


def with_neox_buffers(tensors: Tensors) -> Tensors:
    tensors = {"embed_out.weight" if name == "lm_head.weight" else name: tensor for name, tensor in tensors.items()}
    buffers = ("bias", "masked_bias", "rotary_emb.inv_freq")
    return tensors | {f"gpt_neox.layers.{layer}.attention.{name}": torch.ones(4) for layer in range(2) for name in buffers}


def as_decoder(tensors: Tensors) -> Tensors:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def with_head(tensors: Tensors) -> Tensors:
    names = ("embed_tokens.weight", "wte.weight", "embed_in.weight")
    return tensors | {"lm_head.weight": next(tensor.clone() for name, tensor in tensors.items() if name.endswith(names))}


@pytest.mark.parametrize(
    ("name", "changes", "edit"),
    [
        ("gpt2", {}, with_gpt2_buffers),
        ("gpt2", {}, lambda tensors: {n.removeprefix("transformer."): t for n, t in with_gpt2_buffers(tensors).items()}),
        ("gpt2", {}, with_head),
        ("gpt_neox", {}, with_neox_buffers),
        ("gpt_neox", {"tie_word_embeddings": True}, lambda tensors: with_neox_buffers(with_head(tensors))),
        ("opt", {}, as_decoder),
        ("opt_post_norm", {}, lambda tensors: with_head(as_decoder(tensors))),
        ("gemma", {"tie_word_embeddings": True}, with_head),
        ("qwen2", {}, with_head),
    ],
)
def test_old_checkpoints_load_with_all_they_carry(
    name: str, changes: dict[str, object], edit: Callable[[Tensors], Tensors], tmp_path: Path
) -> None:
    tensors = save_family(name, tmp_path, **changes)
    expected, _ = load(tmp_path)
    edited = edit(tensors)
    assert edited.keys() != tensors.keys()
    save_file(edited, tmp_path / "model.safetensors")
    assert_same(load(tmp_path)[0], expected)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_its_own_part_of_the_file_alone(rank: int, tmp_path: Path) -> None:
    """Sizes that halve evenly: what is the other rank's is spoiled, and neither it nor its bytes turn up."""
    folder = save_llama(tmp_path, vocab_size=102, intermediate_size=76)
    tensors = load_file(folder / "model.safetensors")
    num_bytes = 0
    for name, tensor in tensors.items():
        if tensor.dim() == 1:  # norms are whole on every rank
            num_bytes += tensor.nbytes
            continue
        is_cut_by_inputs = name.endswith(("o_proj.weight", "down_proj.weight"))
        mine, other = (tensor.chunk(2, dim=1 if is_cut_by_inputs else 0)[part] for part in (rank, 1 - rank))
        num_bytes += mine.nbytes
        other.fill_(torch.nan)
    save_file(tensors, folder / "model.safetensors")
    assert load(folder, Parallel(rank, 2))[1] == num_bytes
