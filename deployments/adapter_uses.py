"""What a driver replica knows of adapter ids, the least recently used first. Forgets those of too many that nobody needs to know."""

from collections import OrderedDict
from collections.abc import Callable
from itertools import islice

from loray.deployments.adapter_use import AdapterUse
from loray.deployments.request import AdapterRef

MAX_REMEMBERED = 10_000
NUM_LOOKED_AT = 16  # of those that may be forgotten, when there is a new one


class AdapterUses(OrderedDict[AdapterRef, AdapterUse]):
    """By reference, without anybody's token and written in one way."""

    def __init__(self, is_wanted: Callable[[AdapterUse], bool]) -> None:
        """is_wanted: whether an admin has said something of it."""
        super().__init__()
        self._is_wanted = is_wanted

    def touch(self, key: AdapterRef) -> AdapterUse:
        """It is used now; the answer is new if it was not known."""
        if key not in self:
            self._forget_idle()
            self[key] = AdapterUse(key)
        self.move_to_end(key)
        return self[key]

    def _forget_idle(self) -> None:
        """Those that somebody still needs to know are looked at last the next time."""
        for key, use in list(islice(self.items(), NUM_LOOKED_AT)):
            if len(self) < MAX_REMEMBERED:
                return
            if use.num_running or use.is_loading or self._is_wanted(use):
                self.move_to_end(key)
            else:
                del self[key]
