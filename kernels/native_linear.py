"""Matrices as native_linear.c reads them: ARM CPUs with a compiler.

Once in float32, and for a token alone once more in float16, unless that would change a number or memory is short.
"""

import torch
from torch import Tensor

from loray.kernels import native
from loray.kernels.free_memory import leaves_room

LANES = 4
OUTPUTS_AT_ONCE = 16
ROWS_AT_ONCE = 1 << 12  # while they are laid out, which copies them


class NativeMatrix:
    """[out, in] float32"""

    def __init__(self, weight: Tensor) -> None:
        self._outputs, self._inputs = weight.shape
        self._groups = _groups(weight, torch.float32)
        self._half = _groups(weight, torch.float16) if _is_exact(weight) and leaves_room(weight.nbytes // 2) else None
        self.num_bytes = self._groups.nbytes + (0 if self._half is None else self._half.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """x W^T: [num_tokens, in] -> [num_tokens, out]"""
        if len(x) == 1:
            return native.linear_of_one(x, self._groups, self._half, self._outputs)
        return native.linear(x, self._groups, self._outputs)


def pack_native(weight: Tensor) -> NativeMatrix | None:
    """None where it can't be had."""
    if not native.has_linear() or not native.serves(weight.device, weight.dtype) or weight.numel() == 0:
        return None
    return NativeMatrix(weight)


def _groups(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[groups, inputs, LANES]"""
    outputs, inputs = weight.shape
    laid_out = torch.zeros(-(-outputs // OUTPUTS_AT_ONCE) * OUTPUTS_AT_ONCE // LANES, inputs, LANES, dtype=dtype)
    for first in range(0, outputs, ROWS_AT_ONCE):
        rows = weight[first : first + ROWS_AT_ONCE]
        whole = len(rows) // LANES
        groups = laid_out[first // LANES :]
        groups[:whole] = rows[: whole * LANES].view(whole, LANES, inputs).transpose(1, 2)
        if rest := len(rows) % LANES:
            groups[whole, :, :rest] = rows[whole * LANES :].T
    return laid_out


def _is_exact(weight: Tensor) -> bool:
    """In float16, where there is no infinity either: native_linear.c would take it for a number."""
    largest = torch.finfo(torch.float16).max
    return all(
        torch.equal(rows.half().float(), rows) and -largest <= low <= high <= largest
        for rows in weight.split(ROWS_AT_ONCE)
        for low, high in [rows.aminmax()]
    )
