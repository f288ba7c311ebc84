import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from loray.deployments import admin
from loray.deployments.adapter_records import AdapterChange, AdapterRecord, Changed
from loray.deployments.adapter_status import AdapterStatus
from loray.deployments.admin import AdapterAdmin
from loray.deployments.errors import InvalidRequest, Unhealthy
from loray.deployments.middleware import routed_path
from loray.deployments.request import AdapterRef
from loray.deployments.service import Service
from tests.deployments.scripted_backend import ScriptedBackend, run, saying, send, service_of, status_of

KEYS = {"api_keys": {"admin": "open", "inference": "sesame"}}
ADMIN = {"Authorization": "Bearer open"}
ROUTES = [
    ("GET", "/admin/adapters"),
    ("POST", "/admin/adapters"),
    ("GET", "/admin/adapters/pirate"),
    ("DELETE", "/admin/adapters/pirate"),
    ("POST", "/admin/adapters/pirate/pin"),
    ("GET", "/admin/nope"),
    ("GET", "/admin"),
]


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "LOOK_S", 0.001)


@pytest.fixture
def backend() -> ScriptedBackend:
    backend = saying("x")
    backend.statuses = {
        "one": [status_of("pirate", "gpu", num_served=2), status_of("org/poet", "host", is_private=True)],
        "replica": [status_of("pirate", "host", num_served=3)],
    }
    return backend


@pytest.fixture
def service(backend: ScriptedBackend) -> Service:
    return service_of(backend, **KEYS)


def call(service: Service, method: str, path: str, **kwargs: Any) -> httpx.Response:
    return send(service, method, f"/admin/adapters{path}", headers=ADMIN, **kwargs)


def ids(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    return [adapter["adapter_id"] for adapter in response.json()["adapters"]]


def records(backend: ScriptedBackend) -> Sequence[AdapterRecord]:
    return backend.records.snapshot().records


# --- keys


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer sesame", "open", "Bearer op\xe9n"])
def test_without_the_admin_key_nothing_is_answered(
    service: Service, backend: ScriptedBackend, method: str, path: str, header: str | None
) -> None:
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    response = send(service, method, path, headers=headers)
    assert (response.status_code, response.json()["error_type"]) == (401, "unauthorized")
    assert "admin" in response.json()["error"] and not backend.changes


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("keys", [{}, {"inference": "sesame"}])
def test_a_server_without_an_admin_key_says_how_to_set_one(method: str, path: str, keys: dict[str, str]) -> None:
    for header in ("Bearer sesame", "Bearer None", "Bearer "):
        response = send(service_of(saying("x"), api_keys=keys), method, path, headers={"Authorization": header})
        assert (response.status_code, response.json()["error_type"]) == (403, "forbidden")
        assert "api_keys.admin" in response.json()["error"]


def test_the_admin_key_does_not_open_inference(service: Service) -> None:
    assert send(service, "POST", "/generate", json={"inputs": "x"}, headers=ADMIN).status_code == 401
    assert send(service, "GET", "/administrator", headers=ADMIN).status_code == 401
    assert send(service, "GET", "/v1/models", headers=ADMIN).status_code == 401


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_the_admin_key_is_no_token_for_an_adapters_source(backend: ScriptedBackend, path: str) -> None:
    """Where inference needs no key a header holds a token; whoever has just been an admin sends his key."""
    service = service_of(backend, api_keys={"admin": "hf_open"})
    adapter = {"adapter_id": "org/mine", "adapter_source": "hub"}
    body = {"inputs": "x", "parameters": adapter} if path == "/generate" else {"model": "org/mine", "prompt": "x", "adapter_source": "hub"}
    for key, token in (("hf_open", ""), ("hf_mine", "hf_mine")):
        assert send(service, "POST", path, json=body, headers={"Authorization": f"Bearer {key}"}).status_code == 200
        asked = backend.requests[-1].adapter
        assert asked and asked.api_token == token


def test_without_an_inference_key_the_admin_key_is_still_needed(backend: ScriptedBackend) -> None:
    service = service_of(backend, api_keys={"admin": "open"})
    assert send(service, "GET", "/v1/models").status_code == 200
    assert send(service, "GET", "/admin/adapters").status_code == 401


@pytest.mark.parametrize(
    ("root", "path", "expected"),
    [
        ("", "/admin", "/admin"),
        ("/app", "/app/admin/x", "/admin/x"),
        ("/a", "/admin/x", "/admin/x"),
        ("/admin", "/admin/generate", "/generate"),
        ("/app", "/app", ""),
    ],
)
def test_a_path_counts_without_the_prefix_it_is_served_under(root: str, path: str, expected: str) -> None:
    assert routed_path({"path": path, "root_path": root}) == expected


# --- list


def test_the_list_puts_replicas_together_and_shows_private_adapters(service: Service) -> None:
    response = call(service, "GET", "")
    assert ids(response) == ["org/poet", "pirate"]
    assert response.json()["adapters"][1] == {
        "adapter_id": "pirate",
        "source": "local",
        "revision": "",
        "version": "1f2e3d4c5b6a",
        "state": "gpu",
        "rank": 8,
        "is_pinned": False,
        "is_private": False,
        "is_merge": False,
        "gpu_bytes": 0,
        "host_bytes": 1 << 20,
        "disk_bytes": 0,
        "num_running": 0,
        "num_served": 5,
        "num_failed": 0,
        "last_used": 0.0,
        "gpu_use": {"num_loads": 0, "load_seconds": 0.0, "num_evictions": 0},
        "host_use": {"num_loads": 0, "load_seconds": 0.0, "num_evictions": 0},
        "disk_use": {"num_loads": 0, "load_seconds": 0.0, "num_evictions": 0},
        "error": "",
        "last_failure": "",
    }


def test_the_list_can_be_of_one_state(service: Service) -> None:
    assert ids(call(service, "GET", "?state=host")) == ["org/poet"]
    assert ids(call(service, "GET", "?state=failed")) == []
    response = call(service, "GET", "?state=asleep")
    assert response.status_code == 422 and "loading" in response.json()["error"]


@pytest.mark.parametrize("path", ["/org/poet", "/org%2Fpoet"])
def test_one_adapter_is_found_by_its_id(service: Service, path: str) -> None:
    assert ids(call(service, "GET", path)) == ["org/poet"]


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/nobody"), ("DELETE", "/nobody"), ("POST", "/nobody/pin"), ("POST", "/nobody/reload")]
)
def test_an_adapter_nobody_knows_is_not_found(service: Service, backend: ScriptedBackend, method: str, path: str) -> None:
    response = call(service, method, path)
    assert (response.status_code, response.json()["error_type"]) == (404, "not_found")
    assert "nobody" in response.json()["error"] and not backend.changes


# --- changes


def test_an_adapter_is_found_however_its_url_is_written(service: Service, backend: ScriptedBackend) -> None:
    name = "http://host/mine"
    backend.statuses = {"replica": [status_of(name, "gpu")]}
    assert ids(call(service, "GET", "/http://HOST/mine/")) == [name]
    call(service, "DELETE", "/http://Host/mine")
    assert backend.changes[-1].ref.adapter_id == name
    backend.statuses = {"replica": [status_of("s3://bucket/mine", "gpu", source="s3")]}
    assert ids(call(service, "GET", "/bucket/mine")) == ["s3://bucket/mine"]


def test_an_adapter_that_was_loaded_and_evicted_again_counts_as_loaded(service: Service, backend: ScriptedBackend) -> None:
    backend.statuses["one"].append(status_of("x", "gpu"))
    backend.loads = {"x": [status_of("x", state) for state in ("loading", "known", "known")]}
    assert call(service, "POST", "", json={"adapter_id": "./x"}).status_code == 200
    assert records(backend)[-1].ref.adapter_id == "x", "as statuses name it"


def test_load_answers_when_the_adapter_is_in_host_memory_of_every_replica(service: Service, backend: ScriptedBackend) -> None:
    place = {"source": "hub", "revision": "v1"}
    backend.statuses["one"].append(status_of("org/x", "gpu", **place))
    states = ["loading", "loading", "loading", "host", "host"]
    backend.loads = {"org/x": [status_of("org/x", state, **place) for state in states]}
    response = call(service, "POST", "", json={"adapter_id": "org/x", **place, "pin": True, "api_token": "secret"})
    assert ids(response) == ["org/x"] and "secret" not in response.text
    assert backend.loads == {"org/x": []}, "it looked until all had it"
    (record,) = records(backend)
    assert (record.ref.source, record.ref.revision, record.ref.api_token, record.is_pinned) == ("hub", "v1", "secret", True)


OF_SOURCES = ({"source": "local"}, {"source": "hub"})
OF_REVISIONS = ({"source": "hub", "revision": "main"}, {"source": "hub", "revision": "nope"})


@pytest.mark.parametrize("action", ["load", "pin", "reload"])
@pytest.mark.parametrize("state", ["failed", "loading"])
@pytest.mark.parametrize(("good", "bad"), [OF_SOURCES, OF_REVISIONS])
def test_one_by_the_same_name_that_fails_or_is_slow_keeps_no_action_from_the_good_one(
    service: Service, backend: ScriptedBackend, action: str, state: str, good: dict[str, str], bad: dict[str, str]
) -> None:
    other = status_of("poet", state, version="", error="the hub can't be reached", **bad)
    backend.statuses = {"replica": [other, status_of("poet", "gpu", **good)]}
    body = {"adapter_id": "poet", **good} if good["source"] == "hub" else {"adapter_id": "./poet"}  # which is local by default
    response = call(service, "POST", "", json=body) if action == "load" else call(service, "POST", f"/poet/{action}")
    assert response.status_code == 200, response.text
    (record,) = records(backend)
    assert (record.ref.source, record.ref.revision) == (good["source"], good.get("revision", ""))


@pytest.mark.parametrize(("good", "bad"), [OF_SOURCES, OF_REVISIONS])
def test_a_good_one_by_the_same_name_does_not_hide_a_failure(
    service: Service, backend: ScriptedBackend, good: dict[str, str], bad: dict[str, str]
) -> None:
    failed = status_of("poet", "failed", version="", error="the hub can't be reached", **bad)
    backend.statuses = {"replica": [status_of("poet", "gpu", **good), failed]}
    response = call(service, "POST", "", json={"adapter_id": "poet", **bad})
    assert response.status_code == 424 and "can't be reached" in response.json()["error"] and records(backend) == []


def test_a_load_whose_adapter_another_admin_changed_meanwhile_is_told_so(
    service: Service, backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though a request has made one replica of several know it since."""
    monkeypatch.setattr(admin, "GONE_S", 0.0)
    other = [status_of("poet", "gpu", source="hub")]
    backend.statuses = {"replica": [], "other": other}
    backend.loads = {"poet": [status_of("poet", "loading", source="hub"), status_of("poet", "gpu", source="local")]}
    response = call(service, "POST", "", json={"adapter_id": "poet", "source": "hub"})
    assert response.status_code == 424 and "changed again meanwhile" in response.json()["error"]
    assert backend.loads == {"poet": []}, "while it was being loaded it was waited for"


@pytest.mark.parametrize("state", ["loading", "known", "gpu"])
def test_a_load_that_another_admin_unloads_meanwhile_is_told_so(
    service: Service, backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """Whatever is there then, perhaps for requests."""
    look = backend.adapter_statuses

    async def unloaded_meanwhile() -> dict[str, list[AdapterStatus]]:
        if backend.changes:
            backend.records.change(AdapterChange(action="unload", ref=AdapterRef(adapter_id="poet", source="local")))
        return await look()

    backend.statuses = {"replica": []}
    monkeypatch.setattr(backend, "adapter_statuses", unloaded_meanwhile)
    backend.loads = {"poet": [status_of("poet", state)]}
    response = call(service, "POST", "", json={"adapter_id": "./poet", "pin": True})
    assert response.status_code == 424 and "changed again meanwhile" in response.json()["error"]
    assert not any(record.is_loaded for record in records(backend))


def test_a_load_that_fails_says_why_and_leaves_no_record(service: Service, backend: ScriptedBackend) -> None:
    backend.loads = {"bad": [status_of("bad", "loading"), status_of("bad", "failed", error="no adapter_config.json")]}
    response = call(service, "POST", "", json={"adapter_id": "bad"})
    assert (response.status_code, response.json()["error"]) == (424, "adapter 'bad': no adapter_config.json")
    assert records(backend) == []


@pytest.mark.parametrize("is_asked_to_change", [True, False])
def test_a_load_whose_client_leaves_leaves_no_record(service: Service, backend: ScriptedBackend, is_asked_to_change: bool) -> None:
    async def scenario() -> None:
        has_come, door = asyncio.Event(), asyncio.Event()
        change_adapter, adapter_statuses = backend.change_adapter, backend.adapter_statuses

        async def held_change(change: AdapterChange) -> Changed:
            changed = await change_adapter(change)
            if is_asked_to_change:
                has_come.set()
                await door.wait()
            return changed

        async def held_statuses() -> dict[str, list[AdapterStatus]]:
            has_come.set()
            return await adapter_statuses()

        backend.statuses = {"replica": [status_of("slow", "loading")]}
        backend.change_adapter, backend.adapter_statuses = held_change, held_statuses  # type: ignore[method-assign]
        api = AdapterAdmin(service)
        load = asyncio.create_task(api.load({"adapter_id": "slow"}))
        await has_come.wait()
        assert len(records(backend)) == 1
        for _ in range(2):  # the second time while it is being undone
            load.cancel()
            await asyncio.sleep(0)
        door.set()
        with pytest.raises(asyncio.CancelledError):
            await load
        await asyncio.gather(*api._undoing)
        assert records(backend) == []

    run(scenario())


def test_a_load_whose_replica_is_lost_before_the_answer_leaves_no_record(service: Service, backend: ScriptedBackend) -> None:
    adapter_statuses, num_asked = backend.adapter_statuses, 0

    async def lost_statuses() -> dict[str, list[AdapterStatus]]:
        nonlocal num_asked
        num_asked += 1
        if num_asked > 1:
            raise Unhealthy("no driver replica is there yet; try again")
        return await adapter_statuses()

    backend.statuses = {"replica": [status_of("pirate", "host")]}
    backend.adapter_statuses = lost_statuses  # type: ignore[method-assign]
    assert call(service, "POST", "", json={"adapter_id": "pirate"}).status_code == 503 and records(backend) == []


def test_a_load_that_takes_too_long_leaves_no_record(service: Service, backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "LOAD_S", 0.0)
    backend.statuses = {"replica": [status_of("slow", "loading")]}
    assert call(service, "POST", "", json={"adapter_id": "slow"}).status_code == 503 and records(backend) == []


def test_unpinning_what_is_not_pinned_answers_what_is_there_and_leaves_no_record(service: Service, backend: ScriptedBackend) -> None:
    assert ids(call(service, "POST", "/pirate/unpin")) == ["pirate"] and records(backend) == []


def test_a_reload_that_fails_keeps_the_record_that_was_there(service: Service, backend: ScriptedBackend) -> None:
    backend.loads = {"pirate": [status_of("pirate", "host")] * 2}
    call(service, "POST", "", json={"adapter_id": "pirate", "pin": True})
    (before,) = records(backend)
    backend.loads = {"pirate": [status_of("pirate"), status_of("pirate", "gpu", error="adapter 'pirate' is torn")]}
    assert call(service, "POST", "/pirate/reload").json()["error"] == "adapter 'pirate' is torn"
    (after,) = records(backend)
    assert (after.ref, after.generation, after.is_pinned) == (before.ref, before.generation, True)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "adapter_id"),
        ({"adapter_id": ""}, "adapter_id"),
        ({"adapter_id": "x", "source": "ftp"}, "source: 'ftp' is not supported, only local, hub"),
        ({"adapter_id": "x", "pinned": True}, "pinned: unknown field"),
        ({"adapter_id": "x", "pin": "yes"}, "pin"),
        ({"adapter_id": "x", "revision": "v1"}, "the source local has no revisions"),
        ({"adapter_id": "x", "api_token": "two words"}, "the token has characters"),
    ],
)
def test_a_wrong_body_is_refused_by_field(service: Service, backend: ScriptedBackend, body: dict[str, Any], says: str) -> None:
    response = call(service, "POST", "", json=body)
    assert response.status_code == 422 and says in response.json()["error"] and not backend.changes


@pytest.mark.parametrize("action", ["pin", "unpin", "reload"])
def test_an_action_takes_the_source_the_adapter_came_from(service: Service, backend: ScriptedBackend, action: str) -> None:
    old = status_of("org/poet", "unloading", version="0", source="hub", revision="before")
    backend.statuses = {"replica": [old, status_of("org/poet", "gpu", source="hub", revision="main")]}
    assert ids(call(service, "POST", f"/org/poet/{action}")) == ["org/poet", "org/poet"]
    (change,) = backend.changes
    assert (change.action, change.ref.adapter_id, change.ref.source, change.ref.revision) == (action, "org/poet", "hub", "main")


def test_an_error_of_a_version_that_leaves_is_not_that_of_the_load(service: Service, backend: ScriptedBackend) -> None:
    leaving = status_of("poet", "unloading", version="0", source="local", error="torn")
    backend.statuses = {"replica": [leaving, status_of("poet", "host", source="local")]}
    assert ids(call(service, "POST", "", json={"adapter_id": "poet"})) == ["poet", "poet"]


@pytest.mark.parametrize("action", ["pin", "reload"])
def test_an_action_is_for_the_one_that_is_loaded_rather_than_for_a_download_left_on_disk(
    service: Service, backend: ScriptedBackend, action: str
) -> None:
    left = status_of("poet", "known", version="0", source="hub", host_bytes=0, disk_bytes=1)
    backend.statuses = {"replica": [left, status_of("poet", "gpu", source="local")]}
    call(service, "POST", f"/poet/{action}")
    (change,) = backend.changes
    assert change.ref.source == "local"


@pytest.mark.parametrize("action", ["pin", "reload"])
def test_what_requests_have_merged_is_neither_pinned_nor_reloaded(service: Service, backend: ScriptedBackend, action: str) -> None:
    backend.statuses = {"replica": [status_of("merge of a, b", "host", source="", is_merge=True)]}
    response = call(service, "POST", f"/merge of a, b/{action}")
    assert (
        response.status_code == 422
        and f"'merge of a, b' is a merge, made by requests; {action} the" in response.json()["error"]
        and not backend.changes
    )
    assert call(service, "DELETE", "/merge of a, b").status_code == 200
    assert [change.action for change in backend.changes] == ["unload"]


@pytest.mark.parametrize("action", ["pin", "reload"])
def test_an_adapter_that_is_called_like_a_merge_is_meant_rather_than_it(service: Service, backend: ScriptedBackend, action: str) -> None:
    merge = status_of("merge of a", "gpu", version="0", source="", is_merge=True)
    backend.statuses = {"replica": [merge, status_of("merge of a", "host", source="local")]}
    assert call(service, "POST", f"/merge of a/{action}").status_code == 200
    assert [change.ref.source for change in backend.changes] == ["local"]


def test_unpin_is_for_the_one_that_is_pinned(service: Service, backend: ScriptedBackend) -> None:
    pinned = status_of("poet", "host", source="local", is_pinned=True)
    backend.statuses = {"replica": [status_of("poet", "gpu", source="hub"), pinned]}
    call(service, "POST", "/poet/unpin")
    (change,) = backend.changes
    assert change.ref.source == "local"


@pytest.mark.parametrize(("better", "worse"), [("host", "loading"), ("loading", "known"), ("known", "failed"), ("failed", "unloading")])
def test_an_action_is_for_the_one_that_stands_better(service: Service, backend: ScriptedBackend, better: str, worse: str) -> None:
    backend.statuses = {"replica": [status_of("poet", worse, source="hub"), status_of("poet", better, source="local")]}
    call(service, "DELETE", "/poet")
    (change,) = backend.changes
    assert change.ref.source == "local"


def test_unload_answers_with_what_is_left(service: Service, backend: ScriptedBackend) -> None:
    backend.statuses = {"replica": [status_of("org/poet"), status_of("pirate")]}
    assert ids(call(service, "DELETE", "/org/poet")) == []
    assert [record.is_loaded for record in records(backend)] == [False]
    assert ids(call(service, "GET", "")) == ["pirate"]


def test_a_handle_takes_the_same_body_and_raises_the_same_errors(service: Service, backend: ScriptedBackend) -> None:
    async def scenario() -> None:
        api = AdapterAdmin(service)
        backend.statuses = {"replica": [status_of("pirate")]}
        assert await api.load({"adapter_id": "pirate"}) == await api.get("pirate") == await api.listing("host")
        with pytest.raises(InvalidRequest, match="adapter_id"):
            await api.load({})
        for odd in (1, {}, ["pirate"], b"pirate", None):
            with pytest.raises(InvalidRequest, match=f"adapter_id: a string is needed, not {type(odd).__name__}"):
                await api.get(odd)  # type: ignore[arg-type]
            with pytest.raises(InvalidRequest, match="a string is needed"):
                await api.change("pin", odd)  # type: ignore[arg-type]

    run(scenario())
