"""Whose token may read which private adapter, as its source has said. Keeps no token, but a salted hash. Any thread may call this."""

import hashlib
import secrets

from loray.deployments.expiring import Expiring
from loray.deployments.remembered_failures import Asker

TOKEN_S = 300.0  # how long a token counts as one that may read
PROVEN_S = 3600.0  # how long one that could read does not wait among those of whom nobody knows
MAX_REMEMBERED = 10_000


class AdapterReaders:
    def __init__(self) -> None:
        self._readers: Expiring[Asker, bool] = Expiring(TOKEN_S, MAX_REMEMBERED)
        self._proven: Expiring[Asker, bool] = Expiring(PROVEN_S, MAX_REMEMBERED)
        self._salt = secrets.token_bytes(32)

    def asker(self, key: str, token: str) -> Asker:
        """key: of a place."""
        return key, hashlib.blake2b(token.encode(), key=self._salt).digest()

    def add(self, asker: Asker) -> None:
        self._readers.put(asker, True)
        self._proven.put(asker, True)

    def may_read(self, asker: Asker) -> bool:
        return self._readers.get(asker) is not None

    def could_read(self, asker: Asker) -> bool:
        """A while ago, which permits nothing."""
        return self._proven.get(asker) is not None

    def ask_anew(self, key: str) -> None:
        """Nobody may read it before its source says so again."""
        self._readers.drop(lambda asker: asker[0] == key)

    def forget(self, key: str) -> None:
        for known in (self._readers, self._proven):
            known.drop(lambda asker: asker[0] == key)
