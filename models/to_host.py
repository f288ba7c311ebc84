"""Tensors on their way from the device to the host: asked for now, read when they are there."""

import torch
from torch import Tensor


class ToHost:
    def __init__(self, *tensors: Tensor) -> None:
        if not tensors or not tensors[0].is_cuda:
            self._copies, self._event = tensors, None
            return
        self._copies = tuple(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors)
        for copy, tensor in zip(self._copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    @property
    def is_done(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> tuple[Tensor, ...]:
        """On the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._copies
