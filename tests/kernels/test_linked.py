"""Kernels that are launched before the one before has ended wait for it: on one GPU or another they would be right by chance without."""

import ast
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
LAUNCHED_EARLY = [file for file in sorted(KERNELS.glob("*.py")) if "linked import" in file.read_text()]
SHARED = "loray.kernels.lora_segments import"  # its shape() has LINKED
FILES = sorted({*LAUNCHED_EARLY, *(file for file in KERNELS.glob("*_triton.py") if SHARED in file.read_text())})


def calls(statement: ast.stmt) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(statement) if isinstance(node, ast.Call)}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_kernel_that_is_launched_early_waits_before_it_reads_or_writes(file: Path) -> None:
    found = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")]
    assert found
    for kernel in found:
        before = []
        for statement in kernel.body:
            if "wait_for_earlier" in calls(statement):
                assert isinstance(statement, ast.Expr), f"{kernel.name} waits only sometimes"
                break
            before.append(statement)
        else:
            pytest.fail(f"{kernel.name} does not wait")
        touched = set().union(*map(calls, before)) & {"tl.load", "tl.store", "tl.atomic_add"}
        assert not touched and not any(isinstance(node, ast.Return) for statement in before for node in ast.walk(statement))
