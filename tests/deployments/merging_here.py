"""Merges in the test's own process, without Ray."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from loray.deployments.request import AdapterRef, MergeRecipe
from loray.models.merging import MergeMethod, merge_adapters


def merge_here(folders: Any, weights: Any, method: dict[str, Any], shapes: Any, out: Path) -> None:
    merge_adapters(folders, weights, MergeMethod(**method), shapes, out)


def merge_ref(name: str, *adapter_ids: str, weights: tuple[float, ...]) -> AdapterRef:
    return AdapterRef(adapter_id=name, merge=MergeRecipe(adapter_ids=adapter_ids, weights=weights))


def merging(merges: list[Path]) -> Callable[..., None]:
    """The real merge, in this process, that counts."""

    def merge(folders: Any, weights: Any, method: dict[str, Any], shapes: Any, out: Path) -> None:
        merges.append(out)
        merge_here(folders, weights, method, shapes, out)

    return merge
