"""Matrices as native_linear_arm.c and native_linear_x86.c read them: CPUs with a compiler.

Where float16 changes no number, x86 reads that. ARM reads it for a token alone, while memory is not short, and else float32.
"""

import torch
from torch import Tensor

from loray.kernels import native
from loray.kernels.free_memory import leaves_room

ROWS_AT_ONCE = 1 << 12  # while they are laid out, which copies them


class NativeMatrix:
    """[out, in] float32"""

    def __init__(self, weight: Tensor) -> None:
        self._outputs = len(weight)
        is_exact = native.is_exact_in_half(weight)
        self._groups = _groups(weight, torch.float16 if is_exact and not native.IS_ARM else torch.float32)
        self._half = _groups(weight, torch.float16) if is_exact and native.IS_ARM and leaves_room(weight.nbytes // 2) else None
        self.num_bytes = self._groups.nbytes + (0 if self._half is None else self._half.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """x W^T: [num_tokens, in] -> [num_tokens, out]"""
        if len(x) == 1 and native.IS_ARM:
            return native.linear_of_one(x, self._groups, self._half, self._outputs)
        return native.linear(x, self._groups, self._outputs)


def pack_native(weight: Tensor) -> NativeMatrix | None:
    """None where it can't be had."""
    if not native.has_linear() or not native.serves(weight.device, weight.dtype) or weight.numel() == 0:
        return None
    return NativeMatrix(weight)


def _groups(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[groups, inputs, lanes]"""
    outputs, inputs = weight.shape
    lanes, outputs_at_once = native.linear_layout()
    laid_out = torch.empty(-(-outputs // outputs_at_once) * outputs_at_once // lanes, inputs, lanes, dtype=dtype)
    laid_out[outputs // lanes :] = 0.0  # what no output fills
    for first in range(0, outputs, ROWS_AT_ONCE):
        rows = weight[first : first + ROWS_AT_ONCE]
        whole = len(rows) // lanes
        groups = laid_out[first // lanes :]
        groups[:whole] = rows[: whole * lanes].view(whole, lanes, inputs).transpose(1, 2)
        if rest := len(rows) % lanes:
            groups[whole, :, :rest] = rows[whole * lanes :].T
    return laid_out
