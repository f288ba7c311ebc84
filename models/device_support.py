"""Refuses a GPU that the kernels can't run on, by what it or the machine lacks. Imports nothing of a GPU."""

import os
import shutil
from pathlib import Path

import torch

OLDEST = (8, 0)  # compute capability: Ampere; Triton makes no code for tensor cores before it
OLDEST_WITH_FLOAT8 = (8, 9)
MAX_HEAD_DIM = 256


class UnsupportedDevice(ValueError):
    """The message says what is supported."""


def check_device(
    device: torch.device, head_dim: int | None = None, has_float8_cache: bool = False, has_float8_weights: bool = False
) -> None:
    """head_dim: None where transformers attends, or before it is known."""
    if device.type == "cuda":
        if torch.version.hip:  # its GPUs go by the same name
            raise UnsupportedDevice(f"this torch is made for ROCm {torch.version.hip}; on a GPU loray needs one that is made for CUDA")
        check_compiler()
        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        check_gpu(name, capability, head_dim, has_float8_cache, has_float8_weights)


def check_compiler() -> None:
    """Triton compiles what launches its kernels with one, the first time."""
    compiled = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    has_compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if not has_compiler and not (compiled.is_dir() and any(compiled.iterdir())):
        raise UnsupportedDevice(
            "on a GPU loray needs a C compiler and Python's headers, for Triton: install gcc and python3-dev, or set CC"
        )


def check_gpu(name: str, capability: tuple[int, int], head_dim: int | None, has_float8_cache: bool, has_float8_weights: bool) -> None:
    if capability < OLDEST:
        raise UnsupportedDevice(f"{name} has compute capability {_shown(capability)}; loray needs {_shown(OLDEST)} (A100) or newer")
    for field, is_wanted, instead in (
        ("kv_cache.dtype", has_float8_cache, "use auto"),
        ("model.quantization", has_float8_weights, "leave it out"),
    ):
        if is_wanted and capability < OLDEST_WITH_FLOAT8:
            needed = f"{_shown(OLDEST_WITH_FLOAT8)} (L4, H100) or newer"
            raise UnsupportedDevice(f"{field}: fp8 needs compute capability {needed}; {name} has {_shown(capability)}: {instead}")
    if head_dim is not None and head_dim > MAX_HEAD_DIM:
        raise UnsupportedDevice(f"the model has heads of {head_dim}; on a GPU loray attends heads of up to {MAX_HEAD_DIM}")


def _shown(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
