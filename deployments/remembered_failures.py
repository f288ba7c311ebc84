"""Failures that are answered for a while without trying again: of who asked, or of everybody where the source itself has failed."""

from collections.abc import Iterator
from contextlib import contextmanager

from loray.deployments.errors import AdapterChanged, LorayError, Overloaded, SourceFailed
from loray.deployments.expiring import Expiring

Asker = tuple[str, bytes]  # key of a place, salted hash of a token

FAILURE_S = 10.0
MAX_REMEMBERED = 10_000
EVERYBODY = b"everybody"


class RememberedFailures:
    def __init__(self) -> None:
        self._failures: Expiring[Asker, tuple[type[LorayError], str]] = Expiring(FAILURE_S, MAX_REMEMBERED)

    def __len__(self) -> int:
        return len(self._failures)

    @contextmanager
    def of(self, asker: Asker) -> Iterator[None]:
        """Raises what this asker was told before, or remembers what is raised inside, if it may be so once more."""
        self._raise(asker)
        try:
            yield
        except (AdapterChanged, Overloaded):
            raise
        except LorayError as error:
            self._failures.put(asker, (type(error), error.message))
            raise

    @contextmanager
    def of_source(self, key: str) -> Iterator[None]:
        """Around what asks the source, for who could not be told without it."""
        self._raise((key, EVERYBODY))
        try:
            yield
        except SourceFailed as error:
            self._failures.put((key, EVERYBODY), (type(error), error.message))
            raise

    def forget(self, key: str) -> None:
        self._failures.drop(lambda asker: asker[0] == key)

    def _raise(self, asker: Asker) -> None:
        if failure := self._failures.get(asker):
            kind, message = failure
            raise kind(message)
