"""Turns a model id into a local folder in Hugging Face format, fetching or converting what is missing. Never loads weights.

An id is a bundled name, a folder, a GGUF file, or a Hugging Face id.
"""

import hashlib
from pathlib import Path

from loray.models.bundled import BUNDLED, bundled_source
from loray.models.converted import Source, converted, say
from loray.models.model_folder import (
    CheckpointError,
    ModelLimits,
    check_folder,
    check_tokenizer,
    eos_token_ids,
    least_kv_bytes,
    max_tensor_parallel,
    model_limits,
    one_line,
    read_config,
)

__all__ = [
    "BUNDLED",
    "CheckpointError",
    "ModelLimits",
    "check_folder",
    "check_tokenizer",
    "eos_token_ids",
    "least_kv_bytes",
    "max_tensor_parallel",
    "model_limits",
    "read_config",
    "resolve_model",
]

HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.py"]  # *.py runs with model.trust_remote_code only
HUB_IGNORED = ["consolidated*.safetensors"]  # the same weights again, under Mistral's own names
GGUF_MAGIC = b"GGUF"
END_BYTES = 1 << 20


def resolve_model(model_id: str, revision: str | None = None, *, verify: bool = False) -> Path:
    """A local folder with config.json, tokenizer and *.safetensors. `verify` also compares the checksums of what was converted."""
    if model_id in BUNDLED:
        return converted(bundled_source(model_id), verify)
    path = Path(model_id).expanduser()
    if path.is_dir():
        return check_folder(path.resolve())
    if path.is_file():
        return _from_gguf(model_id, path.resolve(), verify)
    if model_id.startswith(("/", ".", "~")) or model_id.count("/") > 1 or model_id.endswith(".gguf"):
        raise CheckpointError(f"model {model_id}: there is no such folder or file")
    return check_folder(_from_hub(model_id, revision))


def _from_gguf(model_id: str, path: Path, verify: bool) -> Path:
    fingerprint = _fingerprint(model_id, path)
    source = Source(model_id, f"{path.stem[:100]}-{fingerprint[:12]}", path.name, fingerprint, lambda staging: path)
    folder = converted(source, verify)
    if _fingerprint(model_id, path) != fingerprint:
        raise CheckpointError(f"model {model_id}: the file changed while it was read; start again when it is whole")
    return folder


def _fingerprint(model_id: str, path: Path) -> str:
    """Size, time of change and both ends of the file: every replica asks for it, and reading 40 GB takes a minute each time.

    Whoever changes a file changes its time; the ends tell apart what was copied with an old time. A mere `touch` costs a conversion.
    """
    try:
        with path.open("rb") as file:
            start = file.read(END_BYTES)
            if not start.startswith(GGUF_MAGIC):
                raise CheckpointError(
                    f"model {model_id}: not a GGUF file; give one, or a folder with config.json, tokenizer and *.safetensors"
                )
            stat = path.stat()
            file.seek(max(0, stat.st_size - END_BYTES))
            return hashlib.sha256(f"{stat.st_size} {stat.st_mtime_ns} ".encode() + start + file.read(END_BYTES)).hexdigest()
    except OSError as error:
        raise CheckpointError(f"model {model_id}: can't be read: {one_line(error)}") from error


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
    say(f"looking up {model_id} on Hugging Face")
    try:
        return Path(snapshot_download(model_id, revision=revision, allow_patterns=HUB_PATTERNS, ignore_patterns=HUB_IGNORED))
    except HFValidationError as error:
        raise CheckpointError(
            f"model {model_id}: neither a bundled name ({known}) nor a folder, a GGUF file or a Hugging Face id"
        ) from error
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
