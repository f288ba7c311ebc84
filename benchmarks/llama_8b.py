"""Random weights and adapters in the shape of Llama-3.1-8B: `python -m benchmarks.llama_8b FOLDER` makes what gpu_decode.py serves.

Speed does not depend on what they hold. Made on the GPU, since a CPU would take minutes.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HIDDEN, INTERMEDIATE, NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, VOCABULARY = 4096, 14336, 32, 32, 8, 128, 128256
LINEARS = {  # name -> (inputs, outputs)
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, NUM_KV_HEADS * HEAD_DIM),
    "self_attn.v_proj": (HIDDEN, NUM_KV_HEADS * HEAD_DIM),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INTERMEDIATE),
    "mlp.up_proj": (HIDDEN, INTERMEDIATE),
    "mlp.down_proj": (INTERMEDIATE, HIDDEN),
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "dtype": "bfloat16",
}

NUM_PROMPT = 128
MIXED_RANKS = (8, 16, 32, 64)
POOL_PAGES = 32 * 8  # 32 adapters of rank 64


@dataclass(frozen=True)
class Case:
    rows: int
    adapters: int
    ranks: str = "r16"  # or "mixed"

    @property
    def names(self) -> list[str]:
        return [f"{self.ranks}-{i}" for i in range(self.adapters)]


def make(folder: Path) -> tuple[Path, Path]:
    model, adapters = make_model(folder / "model"), folder / "adapters"
    for i in range(32):
        make_adapter(adapters / f"r16-{i}", 16, seed=i)
        make_adapter(adapters / f"mixed-{i}", MIXED_RANKS[i % len(MIXED_RANKS)], seed=i)
    return model, adapters


def make_model(folder: Path) -> Path:
    """A file for each layer, and one for the rest."""
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    for name, tensors in _files():
        save_file(tensors, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, name)
    _tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def make_adapter(folder: Path, rank: int, seed: int) -> Path:
    """A PEFT folder with all seven linears."""
    if (folder / "adapter_config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    tensors = {}
    for layer in range(NUM_LAYERS):
        for name, (inputs, outputs) in LINEARS.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = _random(rank, inputs, scale=0.01)
            tensors[f"{prefix}.lora_B.weight"] = _random(outputs, rank, scale=0.01)
    save_file(tensors, folder / "adapter_model.safetensors")
    names = [name.rpartition(".")[2] for name in LINEARS]
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "target_modules": names, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _tokenizer() -> Tokenizer:
    """A token for each byte, and as many more as the model has, so that every one has a text."""
    vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"token{i}" for i in range(256, VOCABULARY))]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _files() -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    torch.manual_seed(0)
    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    rest = {
        "model.embed_tokens.weight": _random(VOCABULARY, HIDDEN),
        "lm_head.weight": _random(VOCABULARY, HIDDEN),
        "model.norm.weight": ones,
    }
    yield "model-rest.safetensors", rest
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}."
        tensors = {f"{prefix}{name}.weight": _random(outputs, inputs) for name, (inputs, outputs) in LINEARS.items()}
        norms = ("input_layernorm", "post_attention_layernorm")
        yield f"model-{layer:02}.safetensors", tensors | {f"{prefix}{name}.weight": ones.clone() for name in norms}


def _random(*shape: int, scale: float = 0.02) -> torch.Tensor:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return (torch.randn(*shape, device=device) * scale).bfloat16().cpu()


if __name__ == "__main__":
    make(Path(sys.argv[1]))
