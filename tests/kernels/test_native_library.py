"""The compiled library on disk, and the compiler that makes it."""

import subprocess
import time
from pathlib import Path

import psutil
import pytest

from loray.kernels import native_library
from loray.kernels.native_library import ASK_S, compiled


@pytest.mark.slow
def test_it_is_compiled_once_and_anew_when_its_file_was_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "cc -O2")  # a command, not a name alone
    first = compiled(tmp_path)
    content, made = first.read_bytes(), first.stat().st_mtime_ns
    assert compiled(tmp_path) == first and first.stat().st_mtime_ns == made
    first.write_bytes(content[: len(content) // 2])
    again = compiled(tmp_path)
    assert list(tmp_path.iterdir()) == [again] and len(again.read_bytes()) == len(content)


def test_what_a_compiler_that_hangs_has_started_ends_with_it(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        native_library._run(0.5, "sh", "-c", f"sleep 1000 & echo $! > {tmp_path}/pid; wait")
    child = int((tmp_path / "pid").read_text())
    ends = time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE and time.monotonic() < ends:
        time.sleep(0.02)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_what_a_compiler_says_may_be_of_any_encoding() -> None:
    assert native_library._run(ASK_S, "printf", r"caf\351") == "caf\ufffd"
