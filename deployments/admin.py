"""The adapters' life cycle for admins: /admin/adapters and the same for Python handles. Knows neither keys nor where adapters lie."""

import asyncio
import contextlib
import time
from typing import Any, get_args

import msgspec
from fastapi import APIRouter
from pydantic import Field, field_validator

from loray.deployments.adapter_records import AdapterChange, AdapterRecord, Changed
from loray.deployments.adapter_sources import named
from loray.deployments.adapter_status import AdapterState, AdapterStatus, AdminAction
from loray.deployments.error_docs import ADMIN_CHANGE, ADMIN_ENTRY, ADMIN_LIST, ADMIN_LOAD
from loray.deployments.errors import AdapterFailed, InvalidRequest, LorayError, Unhealthy, UnknownAdapter
from loray.deployments.native_request import Body, Text, parse
from loray.deployments.request import SOURCES, AdapterRef
from loray.deployments.service import Service

LOAD_S = 600.0  # a download may take as long
LOOK_S = 0.2  # between two looks at a load, each at all adapters
LOOK_SHARE = 0.1  # of the time that it has taken, where that is longer
GONE_S = 10.0  # that a replica may know nothing of a load; its report may be a few seconds old, or it has just been started
STANDING = {"loading": 1, "known": 2, "failed": 3, "unloading": 4}  # which of several by one name is meant: rather one that is loaded

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
        self._undoing: set[asyncio.Task[None]] = set()

    async def listing(self, state: str | None = None) -> dict[str, Any]:
        if state not in (None, *get_args(AdapterState)):
            raise InvalidRequest(f"state: {state!r} is none of {', '.join(get_args(AdapterState))}", "state")
        return _shape([status for status in await self._service.adapter_statuses() if state in (None, status.state)])

    async def get(self, adapter_id: str) -> dict[str, Any]:
        return _shape(await self._known(adapter_id))

    async def load(self, body: Any) -> dict[str, Any]:
        """Returns when every replica has it in host memory."""
        wanted = parse(LoadBody, body) if not isinstance(body, LoadBody) else body
        ref = AdapterRef(
            adapter_id=wanted.adapter_id,
            source=wanted.source or "",
            revision=wanted.revision or "",
            api_token=wanted.api_token or "",
        )
        as_told = named(ref, self._service.args.adapters.default_source)  # as statuses name it
        ref = msgspec.structs.replace(as_told, api_token=ref.api_token)
        return await self._load(AdapterChange(action="load", ref=ref, is_pinned=bool(wanted.pin)))

    async def change(self, action: AdminAction, adapter_id: str) -> dict[str, Any]:
        """Of an adapter that is known. Pin and reload return when every replica has it in host memory."""
        known = await self._known(adapter_id)
        current = min(
            known, key=lambda status: (status.is_merge, action == "unpin" and not status.is_pinned, STANDING.get(status.state, 0))
        )
        if current.is_merge and action in ("pin", "reload"):
            raise InvalidRequest(f"{adapter_id!r} is a merge, made by requests; {action} the adapters that it is made of")
        ref = AdapterRef(adapter_id=current.adapter_id, source=current.source, revision=current.revision)
        change = AdapterChange(action=action, ref=ref)
        if action in ("pin", "reload"):
            return await self._load(change)
        await self._backend.change_adapter(change)
        return _shape(await self._versions(adapter_id))

    async def _load(self, change: AdapterChange) -> dict[str, Any]:
        """A load that fails or that nobody waits for leaves no record behind: no replica that starts later is to try it again. Only one
        that a replica has not begun with is recorded, and the error says so."""
        changing = asyncio.ensure_future(self._backend.change_adapter(change))
        try:
            changed = await asyncio.shield(changing)
            await self._wait_until_loaded(changed.record)
            return _shape(await self._versions(change.ref.adapter_id))
        except BaseException:  # also that the client has left
            undoing = asyncio.create_task(self._undo(changing))
            self._undoing.add(undoing)
            undoing.add_done_callback(self._undoing.discard)
            await asyncio.shield(undoing)
            raise

    async def _undo(self, changing: "asyncio.Future[Changed]") -> None:
        with contextlib.suppress(LorayError):  # why the load failed says more
            await self._backend.undo_adapter_change(await changing)

    async def _wait_until_loaded(self, record: AdapterRecord) -> None:
        """Others by its name, of other sources and revisions, have their own fate."""
        ref = record.ref
        overtaken = AdapterFailed(f"adapter {ref.adapter_id!r} is not being loaded any more: it was changed again meanwhile")
        began = last_seen = time.monotonic()
        while True:
            by_replica = await self._backend.adapter_statuses()
            loads = [[status for status in statuses if _is_of(ref, status)] for statuses in by_replica.values()]
            are_loaded = [_is_loaded(ref.adapter_id, load) for load in loads]  # each is looked at for a failure
            if await self._backend.is_overtaken(record):  # what is there now may be there for requests
                raise overtaken
            if all(are_loaded):
                return
            now = time.monotonic()
            last_seen = now if all(loads) else last_seen
            if now - last_seen > GONE_S:
                raise overtaken
            if now > began + LOAD_S:
                raise Unhealthy(f"adapter {ref.adapter_id!r} is still being loaded after {LOAD_S:.0f} s")
            await asyncio.sleep(min(GONE_S / 4, max(LOOK_S, LOOK_SHARE * (now - began))))

    async def _known(self, adapter_id: str) -> list[AdapterStatus]:
        if not isinstance(adapter_id, str):  # a handle's caller may send anything
            raise InvalidRequest(f"adapter_id: a string is needed, not {type(adapter_id).__name__}", "adapter_id")
        versions = await self._versions(adapter_id)
        if not versions:
            raise UnknownAdapter(f"adapter {adapter_id!r} is not known here; POST /admin/adapters loads it")
        return versions

    async def _versions(self, adapter_id: str) -> list[AdapterStatus]:
        """However it is written, as a folder's name or a URL may be."""
        names = {adapter_id}
        with contextlib.suppress(InvalidRequest):
            names.add(named(AdapterRef(adapter_id=adapter_id), self._service.args.adapters.default_source).adapter_id)
        statuses = await self._service.adapter_statuses()
        return [status for status in statuses if status.adapter_id in (*names, f"{status.source}://{adapter_id}")]


def _is_of(ref: AdapterRef, status: AdapterStatus) -> bool:
    """A record without a source, such as of a merge, may be of any."""
    return (ref.adapter_id, ref.source or status.source, ref.revision) == (status.adapter_id, status.source, status.revision)


def _is_loaded(adapter_id: str, versions: list[AdapterStatus]) -> bool:
    """On one replica. Raises when its load has failed, also when an older version is still there; those that leave had their own fate."""
    staying = [status for status in versions if status.state != "unloading"]
    if any(status.state == "loading" for status in staying):
        return False
    for status in staying:
        if status.error:
            raise AdapterFailed(status.error if adapter_id in status.error else f"adapter {adapter_id!r}: {status.error}")
    return bool(staying)  # perhaps evicted again by now


def _shape(statuses: list[AdapterStatus]) -> dict[str, Any]:
    return {"adapters": msgspec.to_builtins(statuses)}


def make_router(service: Service) -> APIRouter:
    admin = AdapterAdmin(service)
    router = APIRouter(prefix="/admin/adapters", tags=["admin"], responses={200: STATUSES})

    @router.get("", response_model=None, responses=ADMIN_LIST)
    async def listing(state: str | None = None) -> dict[str, Any]:
        """Every version of every adapter, or those in one state."""
        return await admin.listing(state)

    @router.post("", response_model=None, responses=ADMIN_LOAD)
    async def load(body: LoadBody) -> dict[str, Any]:
        """Answered when the adapter is in host memory, or with the reason why it can't be."""
        return await admin.load(body)

    @router.post("/{adapter_id:path}/pin", response_model=None, responses=ADMIN_CHANGE)
    async def pin(adapter_id: str) -> dict[str, Any]:
        """Keep it in memory whoever else needs the room."""
        return await admin.change("pin", adapter_id)

    @router.post("/{adapter_id:path}/unpin", response_model=None, responses=ADMIN_ENTRY)
    async def unpin(adapter_id: str) -> dict[str, Any]:
        return await admin.change("unpin", adapter_id)

    @router.post("/{adapter_id:path}/reload", response_model=None, responses=ADMIN_CHANGE)
    async def reload(adapter_id: str) -> dict[str, Any]:
        """Look at its source again: running requests keep their version, new ones get the new one."""
        return await admin.change("reload", adapter_id)

    @router.get("/{adapter_id:path}", response_model=None, responses=ADMIN_ENTRY)
    async def get(adapter_id: str) -> dict[str, Any]:
        return await admin.get(adapter_id)

    @router.delete("/{adapter_id:path}", response_model=None, responses=ADMIN_ENTRY)
    async def unload(adapter_id: str) -> dict[str, Any]:
        """Free all memory and disk it takes, after its last running request."""
        return await admin.change("unload", adapter_id)

    return router
