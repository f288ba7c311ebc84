"""The adapters' life cycle for admins: /admin/adapters and the same for Python handles. Knows neither keys nor where adapters lie."""

import asyncio
import contextlib
import posixpath
import time
from typing import Any, get_args

import msgspec
from fastapi import APIRouter
from pydantic import Field, field_validator

from loray.deployments.adapter_records import AdapterChange
from loray.deployments.adapter_status import AdapterState, AdapterStatus, AdminAction
from loray.deployments.errors import AdapterFailed, InvalidRequest, LorayError, Unhealthy, UnknownAdapter
from loray.deployments.native_request import Body, Text, parse
from loray.deployments.request import SOURCES, AdapterRef
from loray.deployments.service import Service

LOAD_S = 600.0  # a download may take as long
LOOK_S = 0.2  # between two looks at a load
STANDING = {"known": 1, "failed": 2, "unloading": 3}  # which of several by one name is meant: rather one that is there, or comes

# As OpenAPI shows the answers.
(_STATUS,), STATUS_SCHEMAS = msgspec.json.schema_components([AdapterStatus], ref_template="#/components/schemas/{name}")
_SCHEMA = {"type": "object", "properties": {"adapters": {"type": "array", "items": _STATUS}}, "required": ["adapters"]}
STATUSES: dict[str, Any] = {"content": {"application/json": {"schema": _SCHEMA}}}


class LoadBody(Body):
    adapter_id: Text = Field(min_length=1)
    source: Text | None = None
    """As the id's scheme says, else the server's default, when not given."""
    revision: Text | None = None
    """Branch, tag or commit, where the source has them."""
    pin: bool | None = None
    """Keep it in memory whoever else needs the room."""
    api_token: Text | None = None
    """For adapters that not everybody may read."""

    @field_validator("source")
    @classmethod
    def _check_source(cls, source: str | None) -> str | None:
        if source not in (None, *SOURCES):
            raise ValueError(f"{source!r} is not supported, only {', '.join(SOURCES)}")
        return source


class AdapterAdmin:
    """Every answer is {"adapters": […]}: the versions it is about, one status each, of all replicas together."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._backend = service.backend

    async def listing(self, state: str | None = None) -> dict[str, Any]:
        if state not in (None, *get_args(AdapterState)):
            raise InvalidRequest(f"state: {state!r} is none of {', '.join(get_args(AdapterState))}", "state")
        return _shape([status for status in await self._service.adapter_statuses() if state in (None, status.state)])

    async def get(self, adapter_id: str) -> dict[str, Any]:
        return _shape(await self._known(adapter_id))

    async def load(self, body: Any) -> dict[str, Any]:
        """Returns when every replica has it in host memory."""
        wanted = parse(LoadBody, body) if not isinstance(body, LoadBody) else body
        is_url = "://" in wanted.adapter_id
        ref = AdapterRef(
            adapter_id=wanted.adapter_id if is_url else posixpath.normpath(wanted.adapter_id),  # as statuses name it
            source=wanted.source or "",
            revision=wanted.revision or "",
            api_token=wanted.api_token or "",
        )
        return await self._load(AdapterChange(action="load", ref=ref, is_pinned=bool(wanted.pin)))

    async def change(self, action: AdminAction, adapter_id: str) -> dict[str, Any]:
        """Of an adapter that is known. Pin and reload return when every replica has it in host memory."""
        known = await self._known(adapter_id)
        current = min(known, key=lambda status: STANDING.get(status.state, 0))
        ref = AdapterRef(adapter_id=adapter_id, source=current.source, revision=current.revision)
        change = AdapterChange(action=action, ref=ref)
        if action in ("pin", "reload"):
            return await self._load(change)
        await self._backend.change_adapter(change)
        return _shape(await self._versions(adapter_id))

    async def _load(self, change: AdapterChange) -> dict[str, Any]:
        """A load that fails leaves no record behind: no replica that starts later is to try it again."""
        changed = await self._backend.change_adapter(change)
        try:
            await self._wait_until_loaded(change.ref.adapter_id)
        except AdapterFailed:
            with contextlib.suppress(LorayError):  # why the load failed says more
                await self._backend.undo_adapter_change(changed)
            raise
        return _shape(await self._versions(change.ref.adapter_id))

    async def _wait_until_loaded(self, adapter_id: str) -> None:
        deadline = time.monotonic() + LOAD_S
        while True:
            by_replica = await self._backend.adapter_statuses()
            are_loaded = [_is_loaded(adapter_id, statuses) for statuses in by_replica.values()]  # each is looked at for a failure
            if all(are_loaded):
                return
            if time.monotonic() > deadline:
                raise Unhealthy(f"adapter {adapter_id!r} is still being loaded after {LOAD_S:.0f} s")
            await asyncio.sleep(LOOK_S)

    async def _known(self, adapter_id: str) -> list[AdapterStatus]:
        versions = await self._versions(adapter_id)
        if not versions:
            raise UnknownAdapter(f"adapter {adapter_id!r} is not known here; POST /admin/adapters loads it")
        return versions

    async def _versions(self, adapter_id: str) -> list[AdapterStatus]:
        return [status for status in await self._service.adapter_statuses() if status.adapter_id == adapter_id]


def _is_loaded(adapter_id: str, statuses: list[AdapterStatus]) -> bool:
    """On one replica. Raises when its load has failed, also when an older version is still there."""
    versions = [status for status in statuses if status.adapter_id == adapter_id]
    if any(status.state == "loading" for status in versions):
        return False
    for status in versions:
        if status.error:
            raise AdapterFailed(status.error if adapter_id in status.error else f"adapter {adapter_id!r}: {status.error}")
    return any(status.state != "unloading" for status in versions)  # perhaps evicted again by now


def _shape(statuses: list[AdapterStatus]) -> dict[str, Any]:
    return {"adapters": msgspec.to_builtins(statuses)}


def make_router(service: Service) -> APIRouter:
    admin = AdapterAdmin(service)
    router = APIRouter(prefix="/admin/adapters", tags=["admin"], responses={200: STATUSES})

    @router.get("", response_model=None)
    async def listing(state: str | None = None) -> dict[str, Any]:
        """Every version of every adapter, or those in one state."""
        return await admin.listing(state)

    @router.post("", response_model=None)
    async def load(body: LoadBody) -> dict[str, Any]:
        """Answered when the adapter is in host memory, or with the reason why it can't be."""
        return await admin.load(body)

    @router.post("/{adapter_id:path}/pin", response_model=None)
    async def pin(adapter_id: str) -> dict[str, Any]:
        """Keep it in memory whoever else needs the room."""
        return await admin.change("pin", adapter_id)

    @router.post("/{adapter_id:path}/unpin", response_model=None)
    async def unpin(adapter_id: str) -> dict[str, Any]:
        return await admin.change("unpin", adapter_id)

    @router.post("/{adapter_id:path}/reload", response_model=None)
    async def reload(adapter_id: str) -> dict[str, Any]:
        """Look at its source again: running requests keep their version, new ones get the new one."""
        return await admin.change("reload", adapter_id)

    @router.get("/{adapter_id:path}", response_model=None)
    async def get(adapter_id: str) -> dict[str, Any]:
        return await admin.get(adapter_id)

    @router.delete("/{adapter_id:path}", response_model=None)
    async def unload(adapter_id: str) -> dict[str, Any]:
        """Free all memory and disk it takes, after its last running request."""
        return await admin.change("unload", adapter_id)

    return router
