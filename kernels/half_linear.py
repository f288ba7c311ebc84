"""Matrices kept in float16 and multiplied in float32: the same numbers from half the memory. x86 with AVX2, where no compiler is found.

FBGEMM is there on ARM too, but its float16 product is for newer ones than the first Neoverse and dies there of an illegal instruction.
"""

import torch
from torch import Tensor

HAS_HALF_LINEAR = "fbgemm" in torch.backends.quantized.supported_engines and torch.backends.cpu.get_cpu_capability().startswith("AVX")
ROWS_AT_ONCE = 1024  # of a check, which copies them


class HalfMatrix:
    """[out, in] float16, laid out as FBGEMM reads it."""

    def __init__(self, weight: Tensor) -> None:
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
        self.num_bytes = 2 * weight.numel()

    def __call__(self, x: Tensor) -> Tensor:
        """x W^T: [num_tokens, in] -> [num_tokens, out], float32."""
        return torch.ops.quantized.linear_dynamic_fp16(x, self._packed)


def pack_half(weight: Tensor) -> HalfMatrix | None:
    """None where it can't be had, or where float16 would change a number."""
    if not HAS_HALF_LINEAR or weight.device.type != "cpu" or weight.dtype != torch.float32 or weight.numel() == 0:
        return None
    is_exact = all(torch.equal(rows.half().float(), rows) for rows in weight.split(ROWS_AT_ONCE))
    return HalfMatrix(weight) if is_exact else None
