"""How often adapters came into a tier and had to leave it: of all, and of the last thousands each for itself. For many threads."""

import threading
from collections import OrderedDict

from loray.deployments.adapter_status import TierUse

MAX_REMEMBERED = 10_000  # adapters


class TierUses:
    def __init__(self) -> None:
        self.total = TierUse()
        self._by_key: OrderedDict[str, TierUse] = OrderedDict()  # least recently changed first
        self._lock = threading.Lock()

    def add(self, key: str, use: TierUse) -> None:
        with self._lock:
            self.total += use
            self._by_key[key] = self._by_key.pop(key, TierUse()) + use
            if len(self._by_key) > MAX_REMEMBERED:
                self._by_key.popitem(last=False)

    def of(self, key: str) -> TierUse:
        return self._by_key.get(key, TierUse())
