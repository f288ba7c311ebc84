"""The user's cache of model folders made from GGUF files: each made once, never half used, made anew when found broken.

Where a GGUF file comes from, its source says. Never loads weights itself.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from loray.models.model_folder import CheckpointError, check_folder, one_line

MARKER = "loray.json"  # written last into a converted folder: what it was made from, and the size and checksum of every file
FORMAT = 2  # raised when the conversion changes, so that older folders are made anew
SLOW_BYTES = 1 << 30  # what takes seconds to read is announced


@dataclass(frozen=True, slots=True)
class Source:
    """A GGUF file that is here or can be had."""

    model_id: str  # what the user calls it
    folder_name: str  # in the cache
    origin: str
    fingerprint: str  # hex; another one is another model
    fetch: Callable[[Path], Path]  # staging folder -> the GGUF file, there or where it always was


def converted(source: Source, verify: bool) -> Path:
    """The source's folder, made if it is not there. `verify` compares the checksums of its files, not only their sizes."""
    models = cache_folder() / "models"
    folder = models / source.folder_name
    if _flaw(folder, source, verify) is None:
        return folder
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _only_one(models / f"{source.folder_name}.lock"):
            flaw = _flaw(folder, source, verify)  # another process may have made it meanwhile
            if flaw:
                say(f"{flaw} is broken; making it anew")
            if flaw is not None:
                _make(source, folder)
    except OSError as error:
        raise CheckpointError(
            f"model {source.model_id}: can't write to the cache {models}: {one_line(error)}; set XDG_CACHE_HOME"
        ) from error
    return folder


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "loray"


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def say(line: str) -> None:
    print(f"loray: {line}", file=sys.stderr, flush=True)


def _make(source: Source, folder: Path) -> None:
    """Builds in a staging folder and renames, so that `folder` is never half made."""
    staging = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir()
        gguf = source.fetch(staging)
        start = time.monotonic()
        say(f"converting {gguf.name} ({gguf.stat().st_size / 1e6:.0f} MB) to safetensors, once: 20 s, or minutes for gigabytes")
        _convert(source, gguf, staging / "folder")
        (staging / "folder" / MARKER).write_text(json.dumps(_marker(source, staging / "folder"), indent=2), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        (staging / "folder").rename(folder)
        say(f"converted in {time.monotonic() - start:.0f} s: {folder}")
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _convert(source: Source, gguf: Path, folder: Path) -> None:
    """In a process of its own: torch and transformers never enter this one, and their memory goes back."""
    command = [sys.executable, "-m", "loray.models.gguf", str(gguf), str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        reason = _reason(result.stderr) or f"exit code {result.returncode}"
        raise CheckpointError(f"model {source.model_id}: {gguf.name} can't be converted: {reason}")
    check_folder(folder)


def _reason(stderr: str) -> str:
    """The line that begins the last exception of a traceback, where there is one: its message may go on for many lines."""
    lines = stderr.strip().splitlines() or [""]
    raised = [line for line in lines if re.match(r"([\w.]+\.)?\w*(Error|Exception)\b", line)]
    return one_line((raised or lines)[-1])


def is_converted(folder: Path) -> bool:
    return (folder / MARKER).exists()


def _marker(source: Source, folder: Path) -> dict[str, Any]:
    files = {path.name: {"size": path.stat().st_size, "sha256": sha256_of(path)} for path in sorted(folder.iterdir())}
    return {"format": FORMAT, "source": source.origin, "source_sha256": source.fingerprint, "files": files}


def _flaw(folder: Path, source: Source, verify: bool) -> str | None:
    """What of it is broken; empty where it is not there or another model's, None where it is whole."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        if (marker["format"], marker["source_sha256"]) != (FORMAT, source.fingerprint):
            return ""
        num_bytes = sum(expected["size"] for expected in marker["files"].values())
        if verify and num_bytes > SLOW_BYTES:
            say(f"checking {num_bytes / 1e9:.1f} GB in {folder}")
        for name, expected in marker["files"].items():
            if (folder / name).stat().st_size != expected["size"] or (verify and sha256_of(folder / name) != expected["sha256"]):
                return str(folder / name)
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return str(folder)
    return None


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say("another process is making the model's folder; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
