"""What a driver replica tells of its adapters: those it uses, those that are being found, and what is on disk alone. Changes nothing.

Lives on the driver's event loop.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from loray.deployments.adapter_finder import AdapterFinder, Store
from loray.deployments.adapter_status import AdapterState, AdapterStatus
from loray.deployments.adapter_tiers import AdapterTiers
from loray.deployments.adapter_use import AdapterUse, DiskPlace
from loray.deployments.engine import Engine
from loray.deployments.request import AdapterRef

NUM_AT_ONCE = 400  # adapters that the engine is asked about between two steps: a millisecond


class AdapterReport:
    def __init__(self, store: Store, engine: Engine, finder: AdapterFinder, page_bytes: int) -> None:
        self._store = store
        self._engine = engine
        self._finder = finder
        self._page_bytes = page_bytes

    async def statuses(
        self, used: Sequence[AdapterUse], unloading: Sequence[AdapterUse], written: Callable[[AdapterRef], AdapterRef]
    ) -> list[AdapterStatus]:
        """used, unloading: what the replica has. written: a reference written in one way."""
        uses = [*unloading, *used]
        known = {use.ref for use in uses}
        searches: Counter[AdapterRef] = Counter()  # downloads, mostly, that requests have begun -> how many of these have a token
        for ref in self._finder.searching():
            searches[written(ref)] += ref.api_token != ""
        found = {AdapterUse(ref): num > 0 for ref, num in searches.items() if ref not in known}  # -> whether it may be private
        uses += found
        keys = {self._store.place_key(use.ref, use.path) for use in uses}
        uses += [AdapterUse(ref, adapter) for ref, adapter in await self._finder.left_on_disk(keys)]
        disk = await self._finder.look(lambda: [self._on_disk(use, found.get(use, False)) for use in uses])
        # Before the places: what is loaded by the time they come may be in none of them yet.
        states: dict[AdapterUse, AdapterState] = {use: "loading" for use in uses if use.is_loading or use in found}
        states.update(dict.fromkeys(unloading, "unloading"))
        statuses = []
        for start in range(0, len(uses), NUM_AT_ONCE):
            part = slice(start, start + NUM_AT_ONCE)
            work = partial(AdapterTiers.places, versions=[use.version for use in uses[part]])
            places = await asyncio.wrap_future(self._engine.call(work))
            statuses += [
                use.status(places.get(use.version), self._page_bytes, states.get(use), on_disk)
                for use, on_disk in zip(uses[part], disk[part], strict=True)
            ]
        return statuses

    def _on_disk(self, use: AdapterUse, may_be_private: bool) -> DiskPlace:
        store = self._store
        is_private = may_be_private or (use.adapter is not None and use.adapter.is_private) or store.is_private(use.ref)
        return DiskPlace(store.disk_bytes(use.ref, use.path), is_private, store.disk_use(use.ref, use.path))
