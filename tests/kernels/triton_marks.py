"""Where kernels are tested: their twins on the CPU, they themselves on a GPU, or with TRITON_INTERPRET=1 without one:
`TRITON_INTERPRET=1 pytest -m gpu tests/kernels`, or -m "gpu and not slow" as `make test` does."""

import os

import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = {"twin": "cpu", "native": "cpu", "triton": "cpu" if IS_INTERPRETED else "cuda"}
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available() and not IS_INTERPRETED, reason="no CUDA GPU")]
# Where kernels are interpreted, what else a GPU does is not among the tests for one.
REAL_GPU = [*([] if IS_INTERPRETED else [pytest.mark.gpu]), pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]
BACKENDS = ["twin", pytest.param("triton", marks=ON_GPU)]
ALL_BACKENDS = [*BACKENDS, *([] if IS_INTERPRETED else ["native"])]  # of what native.c has too

# Three roundings of a number, relative; a few more in float32, where a sum of many numbers has its own.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 3 * 2.0**-11, torch.bfloat16: 3 * 2.0**-8}
SLOWLY_INTERPRETED = [pytest.mark.slow] if IS_INTERPRETED else []
# numpy, which stands in for the GPU, has no bfloat16.
DTYPES = [torch.float32, pytest.param(torch.float16, marks=SLOWLY_INTERPRETED), *([] if IS_INTERPRETED else [torch.bfloat16])]


def framed(inner: torch.Tensor, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A frame of NaN, and the tensor as a part of it: its rows are neither aligned nor side by side."""
    frame = torch.full((len(inner) + 1, *inner.shape[1:-1], inner.shape[-1] + 5), float("nan"), dtype=inner.dtype, device=device)
    part = frame[:-1, ..., 3:-2]
    part.copy_(inner)
    return frame, part


def is_whole(frame: torch.Tensor) -> bool:
    """Nothing was written beside the part."""
    beside = frame.clone()
    beside[:-1, ..., 3:-2] = float("nan")
    return bool(beside.isnan().all())
