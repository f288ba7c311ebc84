"""Where and when a result came to be, for the head of its file."""

import datetime
import os
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "triton", "transformers", "ray", "flash-attn")


def environment(command: str, *others: str) -> dict[str, Any]:
    """others: packages whose versions count beside the usual ones."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "commit": commit(),
        "gpu": torch.cuda.get_device_name(),
        "versions": {name: found for name in (*PACKAGES, *others) if (found := _version(name))},
    }


def commit() -> str:
    """Of what runs; COMMIT tells where there is no checkout, or that of something else."""
    if told := os.environ.get("COMMIT", ""):
        return told
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    )
    return found.stdout.strip()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
