"""Prefill attention over contiguous ragged sequences: flash-attn, else PyTorch's own variable-length kernel. Knows no cache.

Both take float16 and bfloat16 on GPUs from Ampere on; whatever they refuse, paged_prefill.py does.
"""

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from loray.kernels import native
from loray.kernels.attention import PromptWork, Scoring, attend
from loray.kernels.choice import uses_triton

FLASH_ATTN, TORCH_VARLEN, TRITON, PLAIN = "flash-attn", "torch varlen", "triton paged", "torch"
MAX_HEAD_DIM = 256
AMPERE = (8, 0)


@cache
def _flash_attn() -> Callable[..., Tensor] | None:
    try:
        from flash_attn import flash_attn_varlen_func
    except (ImportError, OSError):  # absent, or built for another PyTorch
        return None
    return flash_attn_varlen_func


@cache
def _torch_varlen() -> Callable[..., Any]:
    from torch.nn.attention.varlen import varlen_attn  # brings torch's compiler along: two seconds that a CPU does not need

    # PyTorch 2.11 shares key heads among query heads unasked, 2.12 and later want to be told.
    return partial(varlen_attn, enable_gqa=True) if "enable_gqa" in inspect.signature(varlen_attn).parameters else varlen_attn


@cache
def backend(device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, scoring: Scoring) -> str:
    """What attends prompts: FLASH_ATTN and TORCH_VARLEN by `varlen_attention`, TRITON by `paged_prefill`; PLAIN, off a GPU, by either."""
    if device.type != "cuda":
        return PLAIN
    is_half = dtype in (torch.float16, torch.bfloat16) and kv_dtype == dtype
    if not is_half or head_dim > MAX_HEAD_DIM or head_dim % 8 or torch.cuda.get_device_capability(device) < AMPERE:
        return TRITON
    if _flash_attn() is not None:
        return FLASH_ATTN
    return TRITON if scoring.cap else TORCH_VARLEN


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, prompts: PromptWork, scoring: Scoring) -> Tensor:
    """softmax(cap(scale * q k)) v of each query over its sequence's keys up to itself; its queries are the last of its keys.

    q [num_tokens, num_heads, head_dim] -> the same; k, v [num_keys, num_kv_heads, head_dim]; rows may lie apart.
    """
    if not q.is_cuda:
        return _one_by_one(q, k, v, prompts, scoring)
    sizes = prompts.first_queries, prompts.first_keys, prompts.longest, prompts.longest_context
    window = (scoring.window - 1 if scoring.window else -1, 0)  # keys before the query's own, and after it
    if (flash_attn := _flash_attn()) is not None:
        return flash_attn(q, k, v, *sizes, softmax_scale=scoring.scale, causal=True, window_size=window, softcap=scoring.cap)
    assert not scoring.cap, "PyTorch's kernel knows no cap: backend() says who does"
    out = _torch_varlen()(q, k, v, *sizes, scale=scoring.scale, window_size=window)
    assert isinstance(out, Tensor), "nothing but the result was asked for"
    return out


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, prompts: PromptWork, scoring: Scoring) -> Tensor:
    q_lens, context_lens = prompts.first_queries.diff().tolist(), prompts.first_keys.diff().tolist()
    of_seqs = zip(q.split(q_lens), k.split(context_lens), v.split(context_lens), strict=True)
    return torch.cat([attend(*of_seq, scoring) for of_seq in of_seqs])


def shown_backend(device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, score_cap: float) -> str:
    """For people: who attends decodes, and who prompts."""
    if uses_triton(device):
        return f"triton paged, prompts {backend(device, dtype, kv_dtype, head_dim, Scoring(1.0, cap=score_cap))}"
    return "native paged, prompts sdpa" if native.serves(device, dtype) else "sdpa"
