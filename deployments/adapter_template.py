"""The chat template that an adapter brings, read from its folder. Blocking. Renders nothing."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import msgspec

from loray.deployments.adapter_sources import EXTRA_FILES, TEMPLATE_FILE, TOKENIZER_FILE
from loray.deployments.errors import AdapterFailed
from loray.models.adapter_config import CONFIG_FILE
from loray.models.adapter_header import WEIGHTS_FILE

MAX_TEMPLATE_BYTES = 1 << 20
MAX_BYTES = {TEMPLATE_FILE: MAX_TEMPLATE_BYTES, TOKENIZER_FILE: 16 << 20}  # the tokens added to a vocabulary may be many


class _TokenizerConfig(msgspec.Struct):
    """What of it is read. A stranger wrote it, so no values are made of the rest."""

    chat_template: msgspec.Raw = msgspec.Raw(b"null")


_TOKENIZER_CONFIG = msgspec.json.Decoder(_TokenizerConfig)


def adapter_template(folder: Path, adapter_id: str) -> str:
    """The template that an adapter's folder has, "" for none. Raises AdapterFailed."""
    if (text := _read(folder, TEMPLATE_FILE, adapter_id)) is not None:
        return text
    text = _read(folder, TOKENIZER_FILE, adapter_id)
    if text is None:
        return ""
    try:
        template = _template_field(text) or ""
        if isinstance(template, list):  # several, by name
            template = next((one["template"] for one in template if one["name"] == "default"), "")
        if not isinstance(template, str):
            raise TypeError
    except (ValueError, RecursionError, AttributeError, LookupError, TypeError):
        raise AdapterFailed(f"adapter {adapter_id!r}: {TOKENIZER_FILE} is not what it should be") from None
    return template


def template_stamp(folder: Path) -> str:
    """Changes whenever the files do that may hold the template. Reads none."""
    stamps = []
    for name in EXTRA_FILES:
        try:
            found = os.stat(f"{folder}/{name}")
            stamps.append(f"{found.st_ino}-{found.st_size}-{found.st_mtime_ns}-{found.st_ctime_ns}")
        except OSError:
            stamps.append("")
    return ",".join(stamps)


def _template_field(text: str) -> Any:
    try:
        raw = bytes(_TOKENIZER_CONFIG.decode(text).chat_template)
    except msgspec.DecodeError:  # NaN is no JSON, but Python writes it
        if len(text) > MAX_TEMPLATE_BYTES:
            raise
        return json.loads(text).get("chat_template")
    if len(raw) > MAX_TEMPLATE_BYTES:
        raise ValueError("too long")
    return json.loads(raw)


def _own_folders(folder: Path) -> set[str]:
    """Its own, and where links to its other files lead, as in the hub's cache: those have been checked."""
    return {os.path.realpath(folder), *(os.path.dirname(os.path.realpath(folder / name)) for name in (CONFIG_FILE, WEIGHTS_FILE))}


def _read(folder: Path, name: str, adapter_id: str) -> str | None:
    """None: there is no such file."""
    file = folder / name
    try:
        if os.path.dirname(os.path.realpath(file)) not in _own_folders(folder):  # a link may lead anywhere
            raise AdapterFailed(f"adapter {adapter_id!r}: {name} does not lie with its other files")
        found = file.stat()
        if not stat.S_ISREG(found.st_mode):  # a pipe would be waited for
            raise AdapterFailed(f"adapter {adapter_id!r}: {name} is not a file")
        if found.st_size > MAX_BYTES[name]:
            raise AdapterFailed(f"adapter {adapter_id!r}: {name} has more than {MAX_BYTES[name]} bytes")
        return file.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise AdapterFailed(f"adapter {adapter_id!r}: {name} can't be read ({type(error).__name__})") from None
