"""LoRA for the linears of a model that transformers runs: a part of each that adds to its output. The linear itself stays as it is."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from loray.kernels.lora import LoraPages, LoraWork, add_lora
from loray.models.linear import Projection
from loray.models.shards import Shard
from loray.models.special import SpecialRows


class ForwardRows:
    """What the linears must know of the forward in progress, which transformers does not pass on. Its runner sets it before each."""

    num_tokens: int = 0  # rows * padded length
    lora_work: LoraWork = ()
    specials: tuple[SpecialRows, ...] = ()


class HostedLinear(nn.Module):
    """Lives inside its linear as the child `lora_part`; to the pool of rank pages it looks like a Linear with one projection."""

    def __init__(self, linear: nn.Module, dtype: torch.dtype, rows: ForwardRows) -> None:
        super().__init__()
        self.in_size, self.out_size = _sizes(linear)
        self.projections = [Projection("", self.in_size, self.out_size, Shard(0, self.in_size), (Shard(0, self.out_size),))]
        self.widths = [self.out_size]
        weight = linear.weight
        assert isinstance(weight, Tensor)
        # Says dtype and device of the pages; a quantized linear's own weight would say int8.
        self.weight = torch.empty(0, dtype=weight.dtype if weight.is_floating_point() else dtype, device=weight.device)
        self.bias = linear.bias.detach() if isinstance(linear.bias, Tensor) else None
        self.counts_shifts = True
        self.lora: LoraPages | None = None
        self._rows = rows

    def paths(self, path: str) -> list[str]:
        return [path.rpartition(".")[0]]

    def add(self, _linear: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        """A forward hook: output [rows, length, out] or [num_tokens, out], changed in place."""
        if not self._rows.lora_work:
            return
        assert self.lora is not None, "a row has LoRA pages, but no pages were allocated"
        x = inputs[0].reshape(-1, self.in_size).to(self.weight.dtype)
        assert len(x) == self._rows.num_tokens, "a linear with LoRA sees every token of the batch"
        y = output.view(-1, self.out_size)
        for rows in self._rows.specials:
            if change := rows.special.changes.get(self):
                change.of_linear(y[rows.tokens], None)
        add_lora(y, x, self.lora, self._rows.lora_work)


class SeenTokens:
    """Which linears every watched forward gives all of its tokens, in their order. Others, as experts and heads, cannot carry LoRA."""

    def __init__(self, model: nn.Module, head: nn.Module | None) -> None:
        linears = {path: module for path, module in model.named_modules() if _is_linear(module) and module is not head}
        # By name too: in a small forward an expert may by chance see every token.
        self._linears: Mapping[str, nn.Module] = {path: module for path, module in linears.items() if ".experts." not in path}
        self._able = set(self._linears)
        self._handles = [module.register_forward_hook(self._hook(path)) for path, module in self._linears.items()]
        self._whole: set[tuple[int, ...]] = set()  # shapes of all tokens of the forward in progress
        self._seen: dict[str, bool] = {}  # path -> whether each call of it in this forward was given them all

    @contextmanager
    def watch(self, num_rows: int, length: int) -> Iterator[None]:
        """One forward."""
        self._whole, self._seen = {(num_rows, length), (num_rows * length,)}, {}
        yield
        self._able &= {path for path, is_whole in self._seen.items() if is_whole}

    def _hook(self, path: str) -> Any:
        def look(linear: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            is_whole = False
            if inputs and isinstance(output, Tensor):  # a router that is a linear answers with more
                tokens, in_size = tuple(inputs[0].shape[:-1]), inputs[0].shape[-1]
                is_whole = tokens in self._whole and (in_size, tuple(output.shape)) == (_sizes(linear)[0], (*tokens, _sizes(linear)[1]))
            self._seen[path] = self._seen.get(path, True) and is_whole

        return look

    def close(self) -> list[nn.Module]:
        """The linears that saw, at each call in each watched forward, every token of every row."""
        for handle in self._handles:
            handle.remove()
        return [linear for path, linear in self._linears.items() if path in self._able]


def host_lora(linears: Iterable[nn.Module], dtype: torch.dtype, rows: ForwardRows) -> None:
    for linear in linears:
        part = HostedLinear(linear, dtype, rows)
        linear.add_module("lora_part", part)
        linear.register_forward_hook(part.add)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D)


def _sizes(linear: nn.Module) -> tuple[int, int]:
    """(in_features, out_features)"""
    if isinstance(linear, nn.Linear):
        return linear.in_features, linear.out_features
    assert isinstance(linear, Conv1D)
    return linear.nx, linear.nf
