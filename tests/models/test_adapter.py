"""Every adapter that PEFT would compute differently, or that is broken, is refused with its name and the reason."""

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from loray.models.adapter import AdapterError, read_adapter, signature
from tests.models.conductor import Conductor

Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def shapes(base: Path) -> dict[str, tuple[int, int]]:
    return Conductor(base).report.lora_shapes


@pytest.fixture
def folder(adapters: dict[int, Path], tmp_path: Path) -> Path:
    return shutil.copytree(adapters[8], tmp_path / "mine")


def change_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def change_tensors(edit: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        edit(tensors)
        save_file(tensors, folder / WEIGHTS)

    return change


def change_bytes(edit: Callable[[bytes], bytes], name: str = WEIGHTS) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(edit((folder / name).read_bytes()))


def change_header(header: bytes) -> Callable[[Path], Any]:
    return change_bytes(lambda _: struct.pack("<Q", len(header)) + header)


def long_offset(data: bytes) -> bytes:
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    last = max((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"][1])
    header[last]["data_offsets"][1] += 64
    header[last]["shape"][0] += 1
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data[8 + size :]


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")


REFUSALS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "bias_of_no_kind": (change_config(bias="some"), ["bias", "'some'"]),
    "bias_of_b_not_in_the_config": (
        change_tensors(lambda t: t.update({f"{Q_PROJ}B.bias": torch.zeros(48)})),
        ["q_proj.lora_B.bias", "lora_bias is not set"],
    ),
    "bias_beside_lora": (
        change_tensors(lambda t: t.update({"base_model.model.model.layers.0.self_attn.q_proj.bias": torch.zeros(48)})),
        ["q_proj.bias", "PEFT would not read it"],
    ),
    "bias_beside_lora_that_has_no_tensors": (
        change_tensors(lambda t: [t.pop(f"{Q_PROJ}{s}.weight") for s in "AB"] and t.update({f"{Q_PROJ[:-5]}bias": torch.zeros(48)})),
        ["q_proj.bias: PEFT would not read it, for model.layers.0.self_attn.q_proj has LoRA"],
    ),
    "bias_under_no_lora": (
        change_tensors(lambda t: t.update({"base_model.model.lm_head.base_layer.bias": torch.zeros(101)})),
        ["lm_head.base_layer.bias: PEFT would not read it, for lm_head has no LoRA"],
    ),
    "token_ids_not_numbers": (
        change_tensors(
            lambda t: t.update({"base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": torch.zeros(1, 48)})
        ),
        ["embed_tokens.token_adapter", "names no tokens"],
    ),
    "excluded_modules": (change_config(exclude_modules=r".*q_proj"), ["q_proj", "does not target"]),
    "other_layers": (change_config(layers_to_transform=[1, 2]), ["layers.0", "does not target"]),
    "targets_not_a_list": (change_config(target_modules={"q_proj": 1}), ["target_modules", "neither"]),
    "bad_targets": (change_config(target_modules="("), ["target_modules", "regular expression"]),
    "weight_under_lora": (
        change_tensors(lambda t: t.update({f"{Q_PROJ[:-5]}base_layer.weight": torch.zeros(48, 48)})),
        ["q_proj.base_layer.weight", "replaced weight"],
    ),
    "embedding_tensors_of_a_linear": (
        change_tensors(lambda t: t.update({f"{Q_PROJ}embedding_A": torch.zeros(8, 48)})),
        ["q_proj.lora_embedding_A"],
    ),
    "rank_not_a_number": (change_config(r="eight"), ["'eight'"]),
    "rank_zero": (change_config(r=0), ["rank", "0"]),
    "alpha_missing": (change_config(lora_alpha=None), ["lora_alpha"]),
    "bad_pattern": (change_config(rank_pattern={"(": 4}), ["rank_pattern", "regular expression"]),
    "pattern_not_a_map": (change_config(alpha_pattern=[1]), ["alpha_pattern"]),
    "config_missing": (lambda folder: (folder / "adapter_config.json").unlink(), ["adapter_config.json", "missing"]),
    "config_not_json": (change_bytes(lambda data: b"{", "adapter_config.json"), ["adapter_config.json"]),
    "config_a_list": (change_bytes(lambda data: b"[]", "adapter_config.json"), ["adapter_config.json", "object"]),
    "weights_missing": (lambda folder: (folder / WEIGHTS).unlink(), [WEIGHTS, "missing"]),
    "pickle": (pickled, ["adapter_model.bin", "pickle", "save_file"]),
    "empty_file": (change_bytes(lambda data: b""), ["cut short"]),
    "truncated": (change_bytes(lambda data: data[:-8]), ["cut short", "lora_"]),
    "header_cut": (change_bytes(lambda data: data[:100]), ["cut short"]),
    "header_garbage": (change_bytes(lambda data: data[:8] + b"\xff" * (len(data) - 8)), ["corrupt"]),
    "header_a_list": (change_header(b"[]"), ["corrupt", "no map of tensors"]),
    "header_of_names_alone": (change_header(b"{" + b",".join(b'"%x":1' % i for i in range(80_001)) + b"}"), ["too many entries"]),
    "header_entry_a_long_list": (change_header(b'{"a":[' + b"[]," * 1_000_000 + b"[]]}"), ["entry of a", "1000 bytes"]),
    "header_entry_a_list": (change_header(b'{"a":[]}'), ["entry of a", "array"]),
    "header_nested_without_end": (change_header(b'{"a":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}"), ["nested too deeply"]),
    "offset_beyond_file": (change_bytes(long_offset), ["cut short"]),
    "bytes_of_no_tensor": (change_bytes(lambda data: data + b"\0" * 16), ["corrupt", "bytes of data"]),
    "alpha_huge": (change_config(lora_alpha=10**400), ["lora_alpha"]),
    "config_nested_without_end": (change_bytes(lambda data: b"[" * 100_000, "adapter_config.json"), ["adapter_config.json"]),
    "no_tensors": (change_tensors(lambda tensors: tensors.clear()), ["no tensors"]),
    "wrong_rank": (change_config(r=4), ["(8, 75)", "(4, 75)", "lora_A"]),
    "wrong_shape": (change_tensors(lambda t: t.update({f"{Q_PROJ}B.weight": torch.zeros(40, 8)})), ["q_proj", "(40, 8)", "(48, 8)"]),
    "unknown_module": (
        change_tensors(lambda t: t.update({"base_model.model.x.lora_A.weight": torch.zeros(8, 48)})),
        ["'base_model.model.x'"],
    ),
    "embedding": (
        change_tensors(lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(8, 101)})),
        ["embed_tokens", "does not target"],
    ),
    "other_tensor": (change_tensors(lambda t: t.update({"base_model.model.lm_head.weight": torch.zeros(2, 2)})), ["lm_head.weight"]),
    "a_without_b": (change_tensors(lambda t: t.pop(f"{Q_PROJ}B.weight")), ["q_proj", "no lora_B"]),
    "b_without_a": (change_tensors(lambda t: t.pop(f"{Q_PROJ}A.weight")), ["q_proj", "no lora_A"]),
    "integers": (change_tensors(lambda t: t.update({f"{Q_PROJ}A.weight": torch.zeros(8, 48).int()})), ["I32", "q_proj"]),
    "twice": (change_tensors(lambda t: t.update({f"{Q_PROJ}A.default.weight": torch.zeros(8, 48)})), ["both", "q_proj"]),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_served_is_refused_by_name(folder: Path, shapes: dict[str, tuple[int, int]], name: str) -> None:
    change, words = REFUSALS[name]
    read_adapter(folder, shapes)
    change(folder)
    with pytest.raises(AdapterError) as caught:
        read_adapter(folder, shapes)
    for word in ("'mine'", *words):
        assert word in str(caught.value)


def test_a_spec_names_the_tensors_with_rank_and_scale(folder: Path, shapes: dict[str, tuple[int, int]]) -> None:
    change_config(lora_alpha=4, alpha_pattern={"q_proj": 24})(folder)
    spec = read_adapter(folder, shapes)
    assert spec.rank == 8 and len(spec.modules) == 14
    module = spec.modules["model.layers.0.self_attn.q_proj"]
    assert (module.a_name, module.b_name, module.rank, module.scale) == (f"{Q_PROJ}A.weight", f"{Q_PROJ}B.weight", 8, 3.0)
    assert spec.modules["model.layers.0.self_attn.k_proj"].scale == 0.5


def test_the_signature_changes_with_either_file(folder: Path) -> None:
    first = signature(folder)
    assert signature(folder) == first
    change_config(lora_dropout=0.25)(folder)
    second = signature(folder)
    (folder / WEIGHTS).write_bytes(b"")
    assert len({first, second, signature(folder)}) == 3


def test_a_driver_validates_without_torch() -> None:
    code = "import sys, loray.models.adapter, loray.models.shards; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
