"""What every test of a kernel has: memory that is poisoned before it is written, and native.c or the twins, alike to callers."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from loray.kernels import native
from loray.kernels.choice import IS_INTERPRETED


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Of native.c; None where there is no compiler."""
    native.prepare(tmp_path_factory.mktemp("native"))
    assert native._library is not None or IS_INTERPRETED or not shutil.which("cc")
    return native._library


@pytest.fixture(autouse=True)
def backend_in_use(request: pytest.FixtureRequest, library: object) -> Iterator[None]:
    """native.c for the tests that ask for it, the twins for the rest."""
    before = native._library
    wants_native = getattr(request.node, "callspec", None) is not None and request.node.callspec.params.get("backend") == "native"
    native._library = library if wants_native else None  # type: ignore[assignment]
    yield
    native._library = before


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that leaves a part of its output unwritten, or reads what it has not written yet, finds NaN, else the largest integer."""
    unwritten = torch.empty

    def empty(*shape: Any, **options: Any) -> torch.Tensor:
        tensor = unwritten(*shape, **options)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)

    monkeypatch.setattr(torch, "empty", empty)
