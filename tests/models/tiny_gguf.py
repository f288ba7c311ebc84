"""Writes GGUF files of two-layer Llama models, small enough for a test."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from numpy.typing import NDArray
from tokenizers.pre_tokenizers import ByteLevel

Arrays = dict[str, NDArray[np.float32]]

F32 = GGMLQuantizationType.F32
HIDDEN, FEED_FORWARD, KV = 32, 64, 16  # rows of 32: the size of a quantised block
CHAT_TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def tiny_gguf(
    path: Path,
    matrices: GGMLQuantizationType = F32,
    architecture: str = "llama",
    is_sentencepiece: bool = False,
    edit: Callable[[Arrays], Arrays] = dict,
    seed: int = 0,
) -> Path:
    """With SmolLM2's tokenizer settings or those of Llama 2, and a small vocabulary; norms are always F32."""
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(2)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    vocab_size = _add_llama2_tokenizer(writer) if is_sentencepiece else _add_smollm_tokenizer(writer)
    writer.add_vocab_size(vocab_size)
    random = np.random.default_rng(seed)
    arrays = {name: random.standard_normal(shape, dtype=np.float32) for name, shape in _shapes(vocab_size).items()}
    for name, values in edit(arrays).items():
        if values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            scaled = values * np.float32(0.3)  # logits stay small enough that float32 rounding is far below 1e-4
            writer.add_tensor(name, scaled if matrices == F32 else quantize(scaled, matrices), raw_dtype=matrices)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _shapes(vocab_size: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab_size, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(2):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k.weight": (KV, HIDDEN),
            f"blk.{layer}.attn_v.weight": (KV, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_gate.weight": (FEED_FORWARD, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (FEED_FORWARD, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, FEED_FORWARD),
        }
    return shapes


def _add_smollm_tokenizer(writer: GGUFWriter) -> int:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*special, *sorted(ByteLevel.alphabet()), "ĊĊ", "he"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * len(special) + [TokenType.NORMAL] * (len(tokens) - len(special)))
    writer.add_token_merges(["Ċ Ċ", "h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    return len(tokens)


def _add_llama2_tokenizer(writer: GGUFWriter) -> int:
    """No <|endoftext|>, an unknown token of its own, and an end of turn beside the end of text."""
    special = ["<unk>", "<s>", "</s>", "<end_of_turn>"]
    letters = [*"▁abcdefgh", "he"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    kinds = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 3, *[TokenType.BYTE] * 256, *[TokenType.NORMAL] * len(letters)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(index) for index in range(len(tokens))])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    writer.add_unk_token_id(0)
    return len(tokens)
