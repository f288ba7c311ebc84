"""Whether Triton's kernels do the work, or their twins in plain torch. Imports neither Triton nor anything of a GPU."""

import os

import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's own switch: its kernels run without a GPU, slowly, to be tested


def uses_triton(device: torch.device) -> bool:
    return device.type == "cuda" or IS_INTERPRETED
