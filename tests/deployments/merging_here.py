"""Merges in the test's own process, without Ray."""

from pathlib import Path
from typing import Any

from loray.models.merging import MergeMethod, merge_adapters


def merge_here(folders: Any, weights: Any, method: dict[str, Any], shapes: Any, out: Path) -> None:
    merge_adapters(folders, weights, MergeMethod(**method), shapes, out)
