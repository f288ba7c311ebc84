"""What admins want, brought to one driver replica without a registry's deployment between them."""

import asyncio
from typing import Any

import msgspec

from loray.deployments.adapter_records import AdapterChange, AdapterSet, Changed
from loray.deployments.adapter_service import AdapterService
from loray.deployments.request import AdapterRef


class ReplicaAdmin:
    """Changes the set as the registry does, and has the service act on the whole of it."""

    def __init__(self, service: AdapterService) -> None:
        self._service = service
        self._set = AdapterSet()

    async def change(self, action: Any, adapter: AdapterRef | str, is_pinned: bool = False) -> Changed:
        """Returns at once."""
        ref = AdapterRef(adapter_id=adapter) if isinstance(adapter, str) else adapter
        changed = self._set.change(AdapterChange(action=action, ref=ref, is_pinned=is_pinned))
        await self.apply()
        return changed

    async def undo(self, changed: Changed) -> None:
        self._set.undo(changed)
        await self.apply()

    async def apply(self) -> None:
        await self._service.apply(msgspec.msgpack.encode(self._set.snapshot()))


async def settled(service: AdapterService) -> None:
    """Nothing that an admin asked for is still being done."""
    while service._tasks or service._unloading:
        await asyncio.sleep(0.01)
