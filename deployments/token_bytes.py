"""The bytes of tokens that are not whole characters by themselves. Decodes no texts."""

import re
from collections.abc import Container
from typing import Any

BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # of vocabularies that fall back to bytes


def byte_symbols() -> dict[str, int]:
    """The characters by which byte-level vocabularies write bytes: printable ones of latin-1 as they are, the others from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


def whole_text(own: bytes) -> str:
    """Empty where they are not whole characters."""
    try:
        return own.decode()
    except UnicodeDecodeError:
        return ""


class TokenBytes:
    def __init__(self, backend: Any, special_ids: Container[int]) -> None:
        decoder = backend.decoder.__getstate__() if backend.decoder else b""  # its JSON
        self._symbols = byte_symbols() if b'"ByteLevel"' in decoder else {}
        self._falls_back = b'"ByteFallback"' in decoder
        self._backend = backend
        self._special_ids = special_ids
        self._found: dict[int, bytes] = {}

    def partial(self, token_id: int) -> bytes:
        """Empty for a token of whole characters, and for one that there is not."""
        found = self._found.get(token_id)
        if found is None:
            found = self._found[token_id] = self._partial(token_id)
        return found

    def _partial(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None or token_id in self._special_ids:
            return b""
        fallback = BYTE_TOKEN.fullmatch(token) if self._falls_back else None
        if not fallback and not all(symbol in self._symbols for symbol in token):
            return b""  # an added token: the decoder takes it as it is
        own = bytes.fromhex(fallback[1]) if fallback else bytes(self._symbols[symbol] for symbol in token)
        return b"" if whole_text(own) else own
