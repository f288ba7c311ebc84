"""Merges adapters in a process of its own: the driver, which wants them merged, has neither torch nor time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from loray.models.adapter import AdapterError

Shapes = dict[str, tuple[int, int]]  # of the base model's linears: module path -> (in_features, out_features)


def merge_elsewhere(folders: Sequence[Path], weights: Sequence[float], method: dict[str, Any], shapes: Shapes, out: Path) -> None:
    """Returns when `out` is written; raises AdapterError, and FilesChanged where a folder's files were replaced meanwhile.

    Runs on the caller's node: a driver's tasks stay in its placement group. method: the fields of a MergeMethod."""
    task = ray.remote(_merge).options(num_cpus=0, max_retries=0)
    error = ray.get(task.remote([str(folder) for folder in folders], list(weights), method, shapes, str(out)))
    if error:
        raise error


def _merge(folders: list[str], weights: list[float], method: dict[str, Any], shapes: Shapes, out: str) -> AdapterError | None:
    """Why it failed."""
    from loray.models.merging import MergeMethod, merge_adapters

    try:
        merge_adapters([Path(folder) for folder in folders], weights, MergeMethod(**method), shapes, Path(out))
    except AdapterError as error:
        return error
    return None
