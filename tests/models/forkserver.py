"""Starts processes from one that has imported the slow packages. What they do is their own matter.

A fork of the tests' own process would inherit its OpenMP threads, and hang.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

PRELOAD = [
    "loray.models.runner",
    "numpy",
    "gguf",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.modeling_gguf_pytorch_utils",
    "transformers.integrations.ggml",
]


def forkserver() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)  # counts where it is not started yet
    return context


def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """subprocess.run of `python -m module argument...`, without the seconds that imports take a new interpreter."""
    assert command[:2] == [sys.executable, "-m"] and options == {"capture_output": True, "text": True, "check": False}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("stdout", "stderr")]
        process = forkserver().Process(target=_main, args=(command[2:], os.getcwd(), dict(os.environ), files))
        process.start()
        process.join()
        assert process.exitcode is not None
        return subprocess.CompletedProcess(command, process.exitcode, *(file.read_text(encoding="utf-8") for file in files))


def _main(arguments: list[str], folder: str, environment: dict[str, str], files: list[Path]) -> None:
    for descriptor, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = arguments
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
