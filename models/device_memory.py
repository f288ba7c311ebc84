"""How much of a GPU a rank may still take."""

import torch


def free_bytes(device: torch.device, memory_fraction: float) -> int:
    """What is left until memory_fraction of the GPU is in use; the rest is for activations. 0 on a CPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(total * memory_fraction) - (total - free))
