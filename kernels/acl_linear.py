"""Matrices kept once more, as ARM's Compute Library reads them: half the time for products of several tokens. CPUs where torch has it.

Alone, a token is faster with the matrix as it is; so both are kept, unless memory is short.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from loray.kernels.free_memory import leaves_room

HAS_ACL = torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_acl_supported())


class AclMatrix:
    """[out, in] float32"""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight.detach()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self._weight)
        self.num_bytes = 2 * weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """x W^T: [num_tokens, in] -> [num_tokens, out]"""
        if len(x) == 1:
            return F.linear(x, self._weight)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], "")


def pack_acl(weight: Tensor) -> AclMatrix | None:
    """None where it can't be had or does not fit."""
    if not HAS_ACL or weight.device.type != "cpu" or weight.dtype != torch.float32 or weight.numel() == 0:
        return None
    return AclMatrix(weight) if leaves_room(weight.nbytes) else None
