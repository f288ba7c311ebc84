"""The functions of native*.c for tensors. Without a compiler there are none: the twins do the work.

Their calls can be recorded, to be made again by a single call: native_tape.py.
"""

import ctypes
import logging
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from loray.kernels.attention import Scoring
from loray.kernels.choice import IS_INTERPRETED
from loray.kernels.native_library import FUNCTIONS, IS_ARM, compiled, load
from loray.kernels.native_tape import Recorded, Recording, Tape
from loray.kernels.paged_kv import PagedKV

logger = logging.getLogger("loray.native")

PAGE_RANK = 8  # as in native.c
MAX_TILE = 8  # tokens, as in native_linear_x86.c; native_linear_arm.c has 16 only where as many come
_library: ctypes.CDLL | None = None
_recording = Recording()


def prepare(folder: Path) -> None:
    """Compiles them into this folder, unless they are there, and uses them from now on. Where that fails, a line in the log says why."""
    global _library
    if _library is None and not IS_INTERPRETED:
        try:
            _library = load(compiled(folder))
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            reason = getattr(error, "stderr", None) or error  # what the compiler said, if it did
            logger.warning("steps are slower than they could be: native.c can't be compiled or loaded here (%s)", reason)


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    return _library is not None and device.type == "cpu" and dtype == torch.float32


def recorded(calls: Callable[[], Tensor]) -> tuple[Tensor, Recorded | None]:
    """Their result, and what they do, to be done again with the same tensors, whatever is in them then. None if torch has a part in it."""
    _recording.tape = tape = Tape()
    try:
        with tape.watched():
            output = calls()
    finally:
        _recording.tape = None
    if not tape.is_whole:
        return output, None
    assert _library is not None
    return output, tape.recorded(output, _library.replay)


def _call(name: str, *arguments: float | None) -> None:
    assert _library is not None, "the caller asks `serves` first"
    if _recording.tape is not None:
        _recording.tape.add(name, arguments)
    getattr(_library, name)(*arguments)


def _empty(*shape: int) -> Tensor:
    return torch.empty(shape) if _recording.tape is None else _recording.tape.empty(shape)


@cache
def _table(numbers: tuple[int, ...]) -> "ctypes.Array[ctypes.c_int64]":
    """Kept, since a recorded call reads it later."""
    return (ctypes.c_int64 * len(numbers))(*numbers)


def embed(ids: Tensor, table: Tensor) -> Tensor:
    """The ids' rows. ids [num_tokens] int32, table [ids, size]."""
    assert ids.dtype == torch.int32 and ids.is_contiguous() and table.is_contiguous()
    out = _empty(len(ids), table.shape[1])
    _call("embed", ids.data_ptr(), table.data_ptr(), *table.shape, out.data_ptr(), len(ids))
    return out


def take_angles(positions: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The positions' rows of both, [num_tokens, 1, rotary_dim] each. positions [num_tokens] int64; cos and sin [positions, rotary_dim]."""
    assert positions.dtype == torch.int64 and positions.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    found = _empty(len(positions), 1, cos.shape[1]), _empty(len(positions), 1, cos.shape[1])
    _call(
        "take_angles",
        positions.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        *cos.shape,
        found[0].data_ptr(),
        found[1].data_ptr(),
        len(positions),
    )
    return found


def add_bias(y: Tensor, bias: Tensor) -> None:
    assert y.stride(1) == 1 and bias.is_contiguous()
    _call("add_bias", y.data_ptr(), y.stride(0), bias.data_ptr(), *y.shape)


def most_and_total(logits: Tensor) -> tuple[Tensor, Tensor]:
    """As greedy.py has it."""
    assert logits.stride(1) == 1
    tokens, totals = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits))
    _call("most_and_total", logits.data_ptr(), logits.stride(0), *logits.shape, tokens.data_ptr(), totals.data_ptr())
    return tokens, totals


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None, added: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """As norm.py has it; with `added`, x += scale * added in place before. x [num_tokens, size]."""
    out = _empty(*x.shape) if out is None else out
    assert x.stride(1) == 1 and out.stride(1) == 1 and weight.is_contiguous(), "rows are contiguous"
    assert added is None or added.stride(1) == 1, "rows are contiguous"
    more = (None, 0) if added is None else (added.data_ptr(), added.stride(0))
    _call("rms_norm", x.data_ptr(), x.stride(0), *more, scale, weight.data_ptr(), eps, out.data_ptr(), out.stride(0), *x.shape)
    return out


def silu_gate(gate_up: Tensor) -> Tensor:
    assert gate_up.stride(1) == 1
    num_tokens, size = len(gate_up), gate_up.shape[1] // 2
    out = _empty(num_tokens, size)
    _call("silu_gate", gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), num_tokens, size)
    return out


def rotate_and_store(qkv: Tensor, rope: tuple[Tensor, Tensor] | None, kv_cache: Tensor, slots: Tensor, num_heads: int) -> None:
    assert qkv.stride(1) == 1 and kv_cache.is_contiguous() and slots.is_contiguous()
    cos, sin = rope or (qkv, qkv)
    assert cos.stride(0) == sin.stride(0) and cos.stride(-1) == 1 and sin.stride(-1) == 1, "a token's angles lie side by side"
    _call(
        "rotate_and_store",
        *(qkv.data_ptr(), qkv.stride(0), cos.data_ptr(), sin.data_ptr(), cos.stride(0), cos.shape[-1] if rope else 0),
        *(kv_cache.data_ptr(), slots.data_ptr(), len(qkv), num_heads, kv_cache.shape[2] // 2, kv_cache.shape[3]),
    )


def paged_attention(q: Tensor, kv: PagedKV, scoring: Scoring) -> Tensor:
    num_seqs, num_heads, head_dim = q.shape
    _, block_size, twice_kv_heads, _ = kv.cache.shape
    assert q.stride(1) == head_dim and q.stride(2) == 1 and kv.cache.is_contiguous(), "heads lie together"
    assert kv.block_table.stride(1) == 1 and kv.context_lens.is_contiguous(), "a sequence's blocks lie together"
    out = _empty(num_seqs, num_heads, head_dim)
    _call(
        "paged_attention",
        *(q.data_ptr(), q.stride(0), kv.cache.data_ptr(), kv.block_table.data_ptr(), kv.block_table.stride(0), kv.context_lens.data_ptr()),
        *(out.data_ptr(), num_seqs, num_heads, twice_kv_heads // 2, head_dim, block_size, scoring.scale, scoring.cap, scoring.window),
    )
    return out


def add_lora(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, widths: Sequence[int], blocks: Tensor, page_ids: Tensor, page_rank: int, max_pages: int
) -> None:
    """As add_lora_segments has it. a [projections, pool_ranks, in], b [pool_ranks, sum(widths)]; blocks and page_ids of LoraSegments."""
    assert x.stride(1) == 1 and y.stride(1) == 1 and a.is_contiguous() and b.is_contiguous()
    assert page_rank == PAGE_RANK, "native.c knows pages of one size"
    shrunk = _empty(len(x) * len(widths) * max_pages * page_rank)
    _call(
        "add_lora",
        *(y.data_ptr(), y.stride(0), x.data_ptr(), x.stride(0), a.data_ptr(), a.shape[1], a.shape[2], b.data_ptr(), b.shape[1]),
        *(ctypes.addressof(_table(tuple(widths))), len(widths), blocks.data_ptr(), len(blocks), page_ids.data_ptr(), max_pages),
        shrunk.data_ptr(),
    )


def has_linear() -> bool:
    return _library is not None and "linear" in FUNCTIONS


def linear_layout() -> tuple[int, int]:
    """How native_linear.py lays matrices out: outputs in a group, and in as many groups as are computed at once."""
    if IS_ARM:
        return 4, 16
    assert _library is not None, "the caller asks `serves` first"
    lanes, outputs_at_once = ctypes.c_int64(), ctypes.c_int64()
    _library.linear_layout(ctypes.addressof(lanes), ctypes.addressof(outputs_at_once))
    return lanes.value, outputs_at_once.value


def is_exact_in_half(weight: Tensor) -> bool:
    """Whether float16 has every one of its numbers; it has no infinity here: native_linear_arm.c would take that for a number."""
    assert _library is not None and weight.is_contiguous() and weight.dtype == torch.float32
    num_inexact = ctypes.c_int64()
    _library.count_inexact(weight.data_ptr(), weight.numel(), ctypes.addressof(num_inexact))
    return num_inexact.value == 0


def linear(x: Tensor, groups: Tensor, outputs: int) -> Tensor:
    """x W^T. groups: as native_linear.py lays them out, in float32, or on x86 in float16."""
    assert x.stride(1) == 1
    num_tokens, inputs = x.shape
    y, room = _empty(num_tokens, outputs), _empty((num_tokens + MAX_TILE - 1) * inputs)
    _call(
        "linear" if groups.dtype == torch.float32 else "linear_of_half",
        *(x.data_ptr(), x.stride(0), groups.data_ptr(), inputs, outputs, y.data_ptr(), outputs, num_tokens, room.data_ptr()),
    )
    return y


def linear_of_one(x: Tensor, groups: Tensor, half: Tensor | None, outputs: int) -> Tensor:
    """As `linear`, of one token, on ARM. half: the matrix in float16."""
    assert x.stride(1) == 1
    y, room = _empty(1, outputs), _empty(x.shape[1])
    bits = None if half is None else half.data_ptr()
    _call("linear_of_one", x.data_ptr(), groups.data_ptr(), bits, x.shape[1], outputs, y.data_ptr(), room.data_ptr())
    return y
