"""Turns what an adapter has beside its matrices into changes of layers, on the device. Reads no files, knows no pages, waits for no step.

Runs on every rank for the same adapters in the same order: DoRA's lengths are summed over the ranks.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from loray.models.adapter import TrainedTokens
from loray.models.adapter_tensors import RankAdapter, Target
from loray.models.hosted_linear import HostedLinear
from loray.models.linear import Linear
from loray.models.parallel import Parallel
from loray.models.special import Change, LowRank, TokenRows
from loray.models.to_device import sent, upload
from loray.models.vocabulary import Embedding, Head

Matrices = dict[tuple[str, str], Tensor]
Targets = Mapping[str, Target]


def fold_gains(adapter: RankAdapter, matrices: Matrices, targets: Targets, parallel: Parallel) -> dict[str, Tensor]:
    """DoRA's factor for each output, [width] float32 by module path; B in matrices is multiplied by it."""
    if not adapter.squares:
        return {}
    device = targets[next(iter(adapter.squares))].layer.weight.device
    joined = sent(torch.cat(list(adapter.squares.values())), device).split([len(square) for square in adapter.squares.values()])
    squares = dict(zip(adapter.squares, joined, strict=True))
    summed = [path for path in squares if not isinstance(layer := targets[path].layer, HostedLinear) and layer.is_summed]
    if summed:  # one sum over the ranks for all of them
        totals = parallel.all_reduce(torch.cat([squares[path] for path in summed]))
        squares.update(zip(summed, totals.split([len(squares[path]) for path in summed]), strict=True))
    gains = {path: sent(adapter.vectors[path, "magnitude"], total.device) / total.sqrt() for path, total in squares.items()}
    for path, gain in gains.items():
        b = matrices[path, "b"]
        matrices[path, "b"] = torch.mul(b, gain, out=torch.empty_like(b))  # in float32, which is not kept: a head's B is large
    return gains


def changes_of(adapter: RankAdapter, matrices: Matrices, gains: Mapping[str, Tensor], targets: Targets) -> dict[nn.Module, Change]:
    """By layer; a layer that fuses several linears has one change for all."""
    offsets = {path: gain - 1 for path, gain in gains.items()}
    shifts = {path: shift for path, target in targets.items() if (shift := _shift(adapter, path, target)) is not None}
    changes: dict[nn.Module, Change] = {}
    for path, target in targets.items():
        if isinstance(target.layer, Embedding | Head):
            # Copies: a view would keep all the adapter's matrices alive.
            lora = LowRank(matrices[path, "a"].clone(), matrices[path, "b"].clone()) if path in adapter.spec.modules else None
            tokens = _token_rows(target.layer, path, adapter.spec.tokens, matrices)
        else:
            lora, tokens = None, None
        if path in offsets or path in shifts or lora or tokens:
            former = changes.get(target.layer, Change())
            gain = _join(former.gain, target, offsets.get(path))
            changes[target.layer] = Change(gain, _join(former.shift, target, shifts.get(path)), lora, tokens)
    return changes


def _shift(adapter: RankAdapter, path: str, target: Target) -> Tensor | None:
    """[width] float32; None where there is none, or where another rank counts it."""
    own, trained = adapter.vectors.get((path, "bias of B")), adapter.vectors.get((path, "bias"))
    layer = target.layer
    if isinstance(layer, Linear | HostedLinear):
        if not layer.counts_shifts:
            return None
        if trained is not None:
            assert layer.bias is not None, "a bias that the base model has not is refused"
            base = target.columns(layer.bias)
            difference = sent(trained, base.device) - base.float()
            return difference if own is None else difference + sent(own, base.device)
    return None if own is None else sent(own, layer.weight.device)


def _join(former: Tensor | None, target: Target, part: Tensor | None) -> Tensor | None:
    """The part in its columns of the layer's outputs, beside those that are there."""
    if part is None:
        return former
    layer = target.layer
    size = layer.out_size if isinstance(layer, Linear | HostedLinear) else target.projection.width
    joined = layer.weight.new_zeros(size) if former is None else former
    target.columns(joined).copy_(part)
    return joined


def _token_rows(layer: Embedding | Head, path: str, trained: Mapping[str, TrainedTokens], matrices: Matrices) -> TokenRows | None:
    if isinstance(layer, Head) and layer.follows_embedding and path not in trained:
        path = next(iter(trained), path)
    if path not in trained:
        return None
    rows, token_ids, device = matrices[path, "rows"], np.array(trained[path].token_ids, np.int64), layer.weight.device
    if isinstance(layer, Embedding):
        return TokenRows(upload(token_ids, device), rows.clone())
    local = token_ids - layer.part.start
    own = ((local >= 0) & (local < layer.part.size)).nonzero()[0]
    return TokenRows(upload(local[own], device), rows[upload(own, device)])
