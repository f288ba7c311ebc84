"""Converts one GGUF file into a folder in Hugging Face format: `python -m loray.models.gguf FILE FOLDER`."""

import functools
import json
import sys
from pathlib import Path
from typing import Any


def convert(gguf: Path, folder: Path) -> None:
    """Weights as float16 safetensors, a fast tokenizer with its chat template, and a generation config that knows every end token."""
    import gguf as gguf_library
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # transformers parses the file anew for config, weights and tokenizer, 4 s each; this process reads one file, so once is enough
    gguf_library.GGUFReader = functools.cache(gguf_library.GGUFReader)
    folder.mkdir(parents=True)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = model.config
    tensors = {name: tensor.half().contiguous() for name, tensor in model.state_dict().items()}  # finer than any GGUF quantisation
    config.dtype = torch.float16
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]  # the same tensor as the embedding
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.architectures = [type(model).__name__]
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # says how the file was packed; the folder is not
    config.save_pretrained(folder)

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.save_pretrained(folder)
    _split_digits(folder / "tokenizer.json", _pre_tokenizer(gguf))

    generation = model.generation_config
    end_of_text = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    ends = [tokenizer.eos_token_id, end_of_text]  # an adapter trained on plain text ends with <|endoftext|>, a chat with <|im_end|>
    generation.eos_token_id = [token for token in dict.fromkeys(ends) if token is not None]
    generation.save_pretrained(folder)


def _pre_tokenizer(gguf: Path) -> str:
    from gguf import GGUFReader

    field = GGUFReader(str(gguf)).get_field("tokenizer.ggml.pre")
    return str(field.contents()) if field is not None else ""


def _split_digits(path: Path, pre_tokenizer: str) -> None:
    """SmolLM's tokenizer takes each digit alone before its byte-level BPE; transformers' GGUF reader leaves that step out."""
    if pre_tokenizer != "smollm":
        return
    tokenizer: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    digits = {"type": "Digits", "individual_digits": True}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, tokenizer["pre_tokenizer"]]}
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
