"""Where and when a result came to be, for the head of its file."""

import datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

PACKAGES = ("torch", "triton", "transformers", "ray", "flash-attn")


def environment(command: str, *others: str) -> dict[str, Any]:
    """others: packages whose versions count beside the usual ones."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "gpu": torch.cuda.get_device_name(),
        "versions": {name: found for name in (*PACKAGES, *others) if (found := _version(name))},
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
