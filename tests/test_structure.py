"""The shape of the code: which folder may import which, which files stay pure, how long a file may be."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ["deployments", "cluster", "models", "kernels"]  # each may import itself and those after it
PURE = [
    "loray.deployments.adapter_records",
    "loray.deployments.adapter_registry",
    "loray.deployments.adapter_store",
    "loray.deployments.adapter_tiers",
    "loray.deployments.adapters",
    "loray.deployments.block_pool",
    "loray.deployments.errors",
    "loray.deployments.fair_lines",
    "loray.deployments.fair_queue",
    "loray.deployments.fair_shares",
    "loray.deployments.host_tier",
    "loray.deployments.request",
    "loray.deployments.scheduler",
    "loray.deployments.sequence",
    "loray.models.step",
]
MAX_LINES = 350

FILES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))


def imported_names(path: Path) -> set[str]:
    """Every module the file names in an import, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import hides which folder it reaches"
            base = node.module or ""
            names.update({base, *(f"{base}.{alias.name}" for alias in node.names)})
    return names


@pytest.mark.parametrize("layer", LAYERS)
def test_a_folder_has_no_init_file_that_would_shadow_other_packages(layer: str) -> None:
    assert not list((ROOT / layer).rglob("__init__.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    layer = path.relative_to(ROOT).parts[0]
    above = LAYERS[: LAYERS.index(layer)]
    upward = {name for name in imported_names(path) if name.startswith("loray.") and name.split(".")[1] in above}
    assert not upward


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_folders_are_imported_as_packages_of_loray(path: Path) -> None:
    assert not {name for name in imported_names(path) if name.split(".")[0] in LAYERS}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_short_enough_to_be_read_whole(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def test_bookkeeping_needs_neither_ray_nor_torch() -> None:
    probe = (
        f"import sys, importlib; [importlib.import_module(name) for name in {PURE}]; print(sorted({{'ray', 'torch'}} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_launcher_starts_without_torch_and_transformers() -> None:
    probe = "import sys, loray.deployments.launcher; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
