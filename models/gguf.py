"""Converts one GGUF file into a folder in Hugging Face format: `python -m loray.models.gguf FILE FOLDER`. transformers reads the file."""

import functools
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase


class GGUFError(Exception):
    """The file can't be converted; the message is one line."""


def convert(gguf: Path, folder: Path) -> None:
    """Weights as safetensors, a fast tokenizer with its chat template, and a generation config that knows every end token."""
    import gguf as gguf_library

    # transformers parses the file anew for config, weights and tokenizer, 4 s each; this process reads one file, so once is enough
    gguf_library.GGUFReader = functools.cache(gguf_library.GGUFReader)
    reader = _open(gguf)
    from transformers import AutoModelForCausalLM, AutoTokenizer  # 5 s, which a broken file need not cost

    model, loading = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=_dtype(reader), output_loading_info=True)
    if lacking := sorted(loading["missing_keys"]):  # transformers would go on with random numbers
        raise GGUFError(f"it lacks {len(lacking)} of the model's tensors: {', '.join(lacking[:8])}")
    config = model.config
    if hasattr(config, "quantization_config"):  # says how the file was packed; by now the weights are plain numbers
        del config.quantization_config
    model.hf_quantizer = None
    _stretch_positions(reader, config)

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = getattr(config, "max_position_embeddings", None) or tokenizer.model_max_length
    tokenizer.clean_up_tokenization_spaces = False
    model.generation_config.eos_token_id = _end_tokens(reader, tokenizer, model.generation_config) or None
    model.save_pretrained(folder)  # config, generation config and weights, without the head where it is the embedding
    tokenizer.save_pretrained(folder)
    _split_digits(folder / "tokenizer.json", str(_field(reader, "tokenizer.ggml.pre")))


def _open(gguf: Path) -> "GGUFReader":
    from gguf import GGUFReader

    try:
        reader = GGUFReader(str(gguf))
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:  # what reading past the end or nonsense comes to
        raise GGUFError(f"it is cut short, damaged or no GGUF file ({' '.join(str(error).split())})") from error
    if not reader.tensors:
        raise GGUFError("there is no tensor in it")
    num_pieces = _field(reader, "split.count") or 1
    if num_pieces > 1:
        raise GGUFError(f"it is one of {num_pieces} pieces; join them first (llama-gguf-split --merge)")
    if not _field(reader, "general.architecture"):
        raise GGUFError("it does not name its architecture")
    return reader


def _dtype(reader: "GGUFReader") -> "torch.dtype":
    """float16 is finer than any quantisation, half as large as float32, and stays float16 on a CPU. Finer matrices lose nothing."""
    import torch
    from gguf import GGMLQuantizationType as Type

    finer = {Type.F32, Type.F64, Type.BF16}  # float16 has fewer digits than F32 and a smaller range than BF16
    is_fine = any(tensor.tensor_type in finer for tensor in reader.tensors if len(tensor.shape) > 1)
    return torch.float32 if is_fine else torch.float16


def _stretch_positions(reader: "GGUFReader", config: "PretrainedConfig") -> None:
    """transformers' reader leaves out how rotary positions are scaled; with other positions a model gives other numbers."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "default":  # it has none, or the reader has read them after all
        return
    factors = next((tensor.data.tolist() for tensor in reader.tensors if tensor.name == "rope_freqs.weight"), None)
    if factors is not None:  # Llama 3: one for each frequency, which is what longrope takes
        lists = {"short_factor": factors, "long_factor": factors, "factor": 1.0, "attention_factor": 1.0}
        length = config.max_position_embeddings
        config.rope_parameters = {**rope, "rope_type": "longrope", "original_max_position_embeddings": length, **lists}
        return
    kind = _field(reader, f"{_field(reader, 'general.architecture')}.rope.scaling.type") or "none"
    if kind != "none":
        raise GGUFError(f"its positions are scaled ({kind}), which transformers can't read from GGUF files; take the safetensors instead")


def _end_tokens(reader: "GGUFReader", tokenizer: "PreTrainedTokenizerBase", generation: "GenerationConfig") -> list[int]:
    """Those of the model, the file's end of turn, and <|endoftext|>: an adapter trained on plain text ends with it, a chat does not."""
    known = generation.eos_token_id
    ends = known if isinstance(known, list) else [known]
    ends = [tokenizer.eos_token_id, *ends, _field(reader, "tokenizer.ggml.eot_token_id"), tokenizer.get_vocab().get("<|endoftext|>")]
    return [token for token in dict.fromkeys(ends) if token is not None]


def _field(reader: "GGUFReader", name: str) -> Any:
    field = reader.get_field(name)
    return None if field is None else field.contents()


def _split_digits(path: Path, pre_tokenizer: str) -> None:
    """SmolLM's tokenizer takes each digit alone before its byte-level BPE; transformers' GGUF reader leaves that step out."""
    if pre_tokenizer != "smollm":
        return
    tokenizer: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    digits = {"type": "Digits", "individual_digits": True}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, tokenizer["pre_tokenizer"]]}
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    source, target = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    os.chdir(source.parent)  # transformers prefers a file of that name in the current folder
    try:
        convert(source, target)
    except GGUFError as error:
        sys.exit(str(error))
