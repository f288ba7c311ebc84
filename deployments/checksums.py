"""The digest that a source tells of a file, and whether a file has it. Fetches nothing."""

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Digest = tuple[str, str]  # hashlib's name, lower-case hexadecimal

NUM_HEX = {"md5": 32, "sha256": 64}
HTTP_NAMES = {"md5": "md5", "sha-256": "sha256"}  # of the header Digest


def told_digest(scheme: str, info: Mapping[str, Any]) -> Digest | None:
    """info: fsspec's of a file. None: it does not say, or in no way that can be compared."""
    if scheme == "s3":
        return digest_of("md5", str(info.get("ETag") or "").strip('"').lower())  # of many parts: "…-2", which is no digest of the file
    if scheme == "gs":
        return digest_of("md5", _hex(info.get("md5Hash")))
    if scheme == "az":
        return digest_of("md5", _hex((info.get("content_settings") or {}).get("content_md5")))
    told = {"sha256": "", "md5": _hex(info.get("Content-MD5"))}
    for part in str(info.get("Digest") or "").split(","):
        name, _, value = part.strip().partition("=")
        if name.lower() in HTTP_NAMES:
            told[HTTP_NAMES[name.lower()]] = _hex(value)
    return digest_of("sha256", told["sha256"]) or digest_of("md5", told["md5"])


def mismatch(file: Path, digest: Digest | None) -> str:
    """How the file differs from what was told, "" = it does not."""
    if digest is None:
        return ""
    name, expected = digest
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, lambda: hashlib.new(name, usedforsecurity=False)).hexdigest()
    return "" if found == expected else f"{file.name} came with the {name} {found}, its source says {expected}"


def digest_of(name: str, value: str) -> Digest | None:
    """None: it can't be one."""
    return (name, value) if re.fullmatch(f"[0-9a-f]{{{NUM_HEX[name]}}}", value) else None


def _hex(value: Any) -> str:
    """Of bytes, or of their base64; anything else is no digest."""
    if isinstance(value, bytes | bytearray):
        return value.hex()
    try:
        return base64.b64decode(value, validate=True).hex() if isinstance(value, str) else ""
    except binascii.Error:
        return ""
