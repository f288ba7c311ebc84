"""The gate of a gated MLP. Plain torch; on a GPU activation_triton.py does it for the activations that it knows."""

from collections.abc import Callable

from torch import Tensor

from loray.kernels import native
from loray.kernels.delta import Parted
from loray.kernels.lora import LONG_BLOCK, LoraPages, LoraSegments, LoraWork, add_lora

# transformers' and torch's classes -> what the kernel calls them
KERNEL_NAMES = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
}


def gate(act: Callable[[Tensor], Tensor], gate_up: Parted) -> Tensor:  # [num_tokens, intermediate]
    """act(gate) * up, each rounded to the model's dtype. gate_up [num_tokens, 2 * intermediate], gate | up."""
    if gate_up.y.is_cuda and (name := KERNEL_NAMES.get(type(act).__name__)) is not None:
        from loray.kernels.activation_triton import gate as on_gpu  # needs Triton, which a machine without a GPU may lack

        return on_gpu(name, gate_up)
    if KERNEL_NAMES.get(type(act).__name__) == "silu" and native.serves(gate_up.y.device, gate_up.y.dtype):
        return native.silu_gate(gate_up.joined())
    gated, up = gate_up.joined().chunk(2, dim=-1)
    return act(gated).mul_(up)


def gate_updated(act: Callable[[Tensor], Tensor], y: Tensor, x: Tensor, pages: LoraPages, work: LoraWork) -> Tensor:
    """The gate of y + what LoRA adds to it, of x; y is anything afterwards. [num_tokens, intermediate]"""
    name = KERNEL_NAMES.get(type(act).__name__)
    if y.is_cuda and name is not None and isinstance(work, LoraSegments) and work.block_tokens == LONG_BLOCK:
        from loray.kernels.lora_gate_triton import gate_updated as on_gpu  # needs Triton, which a machine without a GPU may lack

        return on_gpu(name, y, x, pages, work)
    add_lora(y, x, pages, work)
    return gate(act, Parted(y))
