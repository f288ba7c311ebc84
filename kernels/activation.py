"""The gate of a gated MLP. Plain torch; on a GPU activation_triton.py does it for the activations that it knows."""

from collections.abc import Callable

from torch import Tensor

from loray.kernels import native
from loray.kernels.delta import Parted

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
