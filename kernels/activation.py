"""The gate of a gated MLP. Plain torch; on a GPU activation_triton.py does it for the activations that it knows."""

from collections.abc import Callable

from torch import Tensor

from loray.kernels.delta import plus_delta

# transformers' and torch's classes -> what the kernel calls them
KERNEL_NAMES = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
}


def gate(
    act: Callable[[Tensor], Tensor], gate_up: Tensor, delta: Tensor | None = None, has_delta: Tensor | None = None
) -> Tensor:  # [num_tokens, intermediate]
    """act(gate) * up, each rounded to the model's dtype. gate_up [num_tokens, 2 * intermediate], gate | up.

    delta [num_tokens, 2 * intermediate] is first added to it for the tokens that have one: has_delta [num_tokens] int32, 0 = no.
    """
    if gate_up.is_cuda and (name := KERNEL_NAMES.get(type(act).__name__)) is not None:
        from loray.kernels.activation_triton import gate as on_gpu  # needs Triton, which a machine without a GPU may lack

        return on_gpu(name, gate_up, delta, has_delta)
    gated, up = plus_delta(gate_up, delta, has_delta).chunk(2, dim=-1)
    return act(gated).mul_(up)
