"""Matrices kept in float8 (e4m3), a scale for each row, and products of them with inputs that are brought to float8 on the way.

Plain torch on a CPU. On a GPU the product is torch's own, and float8_linear_triton.py brings the inputs to float8. Knows no layers.
"""

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max
SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # of rows that are zero
SIZE_STEP = 16  # elements of float8 that one aligned access has: torch's product takes whole ones
OLDEST_WITH_ROW_SCALES = (9, 0)  # compute capability: before it, torch 2.11 computes these on another stream than the current one


class Float8Matrix:
    """[out, in]"""

    def __init__(self, weight: Tensor) -> None:
        self.weight, scales = quantise_rows(weight)  # [out, in] float8
        self.scales = scales.view(1, -1)  # [1, out] float32
        self.num_bytes = self.weight.nbytes + self.scales.nbytes
        self._one = torch.ones(1, dtype=torch.float32, device=weight.device)
        self._has_row_scales = weight.is_cuda and torch.cuda.get_device_capability(weight.device) >= OLDEST_WITH_ROW_SCALES
        self._refused: set[int] = set()  # numbers of tokens that cuBLAS has no product with scales of rows for

    def __call__(self, x: Tensor) -> Tensor:
        """x W^T, both as float8 has them: [num_tokens, in] -> [num_tokens, out] of x's dtype, which on a GPU is bfloat16."""
        values, scales = quantise_rows(x)
        if not x.is_cuda:
            return (values.float() @ self.weight.float().T).mul_(scales).mul_(self.scales).to(x.dtype)
        if self._has_row_scales and len(x) not in self._refused:
            try:
                return torch._scaled_mm(values, self.weight.t(), scales, self.scales, out_dtype=x.dtype, use_fast_accum=True)
            except RuntimeError as error:  # of many columns and few rows, say; it was asked before anything was launched
                if "CUBLAS_STATUS_NOT_SUPPORTED" not in str(error):
                    raise
                self._refused.add(len(x))
        product = torch._scaled_mm(values, self.weight.t(), self._one, self._one, out_dtype=torch.float32, use_fast_accum=True)
        return torch.mul(product.mul_(scales), self.scales, out=torch.empty(product.shape, dtype=x.dtype, device=x.device))


def pack_float8(weight: Tensor) -> Float8Matrix | None:
    """None where torch has no product for the sizes. weight: [out, in], float32 or bfloat16."""
    is_empty = weight.numel() == 0
    return None if is_empty or any(size % SIZE_STEP for size in weight.shape) else Float8Matrix(weight)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x is about values * scales, where scales = max |x| / 448 over each row.

    x [rows, columns] -> values [rows, columns] float8, scales [rows, 1] float32, never 0
    """
    if x.is_cuda:
        from loray.kernels.float8_linear_triton import quantise_rows as on_gpu  # needs Triton, which a machine without a GPU may lack

        return on_gpu(x)
    x = x.float()
    scales = x.abs().amax(1, keepdim=True).div_(LARGEST).clamp_(min=SMALLEST_SCALE)
    return (x / scales).clamp_(-LARGEST, LARGEST).to(FLOAT8), scales
