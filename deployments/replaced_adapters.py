"""What adapter ids meant before an admin gave them another source or revision, until what they mean now is there. Unloads nothing."""

from loray.deployments.request import AdapterRef


class ReplacedAdapters:
    def __init__(self) -> None:
        self._refs: dict[str, set[AdapterRef]] = {}  # by adapter id

    def of(self, adapter_id: str) -> list[AdapterRef]:
        return list(self._refs.get(adapter_id, ()))

    def add(self, adapter_id: str, ref: AdapterRef) -> None:
        self._refs.setdefault(adapter_id, set()).add(ref)

    def drop(self, adapter_id: str, ref: AdapterRef) -> None:
        """It is unloaded, or is what the id means again."""
        refs = self._refs.get(adapter_id, set())
        refs.discard(ref)
        if not refs:
            self._refs.pop(adapter_id, None)

    def drop_all(self, adapter_id: str) -> list[AdapterRef]:
        return list(self._refs.pop(adapter_id, ()))
