"""More downloads at once than each storage's library has connections for by itself, all of them standing still."""

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import adlfs  # noqa: F401  here, and not within the seconds that a source has for its answer
import gcsfs  # noqa: F401
import pytest
import s3fs  # noqa: F401
from huggingface_hub import constants, get_session
from huggingface_hub.utils._http import default_client_factory

from loray.deployments.adapter_sources import Place, Source
from loray.deployments.connection_pools import NUM_PARTS
from loray.deployments.hub_source import HubSource
from loray.deployments.url_source import UrlSource
from tests.deployments.file_server import FileServer, Handler, HubServer
from tests.deployments.peft_folder import save_folder
from tests.deployments.test_cloud_sources import BlobServer, az_options, gs_options

pytestmark = pytest.mark.slow  # servers of its own

WEIGHTS = "adapter_model.safetensors"
WAIT_S = 60


class Crowd:
    """A rule: downloads stop when they have come until all are let go."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self._come = threading.Semaphore(0)

    def __call__(self, handler: Handler) -> bool:
        if handler.command == "GET":
            self._come.release()
            self.released.wait(WAIT_S)
        return False

    def has_come(self, num_downloads: int) -> bool:
        return all(self._come.acquire(timeout=WAIT_S / 4) for _ in range(num_downloads))


class DatedServer(FileServer):
    """As far as reading goes, S3: it says when a file was changed."""

    def answer(self, handler: Handler) -> None:
        file = self.root / handler.path.lstrip("/")
        if not file.is_file():
            return handler.reply(404)
        body = file.read_bytes()
        tag = f'"{hashlib.md5(body).hexdigest()}"'
        handler.reply(200, body, ETag=tag, Last_Modified="Mon, 16 Nov 2026 13:00:00 GMT")


class GcsServer(FileServer):
    """root/bucket/object; the emulator answers one call at a time."""

    def answer(self, handler: Handler) -> None:
        url = urlsplit(handler.path)
        name = unquote(url.path.partition("/o/")[2])
        file = self.root / "bucket" / name
        if not file.is_file():
            return handler.reply(404, b"{}")
        body = file.read_bytes()
        digest = base64.b64encode(hashlib.md5(body).digest()).decode()
        about = {"bucket": "bucket", "name": name, "size": str(len(body)), "etag": digest, "md5Hash": digest}
        handler.reply(200, body if "alt=media" in url.query else json.dumps(about).encode())


@contextmanager
def standing_downloads(source: Source, place: Place, server: FileServer, path: str, num_downloads: int, folder: Path) -> Iterator[None]:
    """Of the weights, at `path`. They go on, and are whole, at the end."""
    server.socket.listen(num_downloads)
    server.rules[path] = crowd = Crowd()
    offer = source.describe(place, "")

    def fetch(number: int) -> int:
        (folder / str(number)).mkdir(parents=True)
        source.fetch(place, offer, [WEIGHTS], "", folder / str(number))
        return (folder / str(number) / WEIGHTS).stat().st_size

    with ThreadPoolExecutor(num_downloads) as threads:
        try:
            sizes = threads.map(fetch, range(num_downloads))
            assert crowd.has_come(num_downloads), "some wait for a connection"
            yield
        finally:
            crowd.released.set()
        assert set(sizes) == {offer.files[WEIGHTS]}


def s3_options(url: str) -> dict[str, Any]:
    return {"endpoint_url": url, "config_kwargs": {"read_timeout": WAIT_S}}


STORAGES: dict[str, tuple[type[FileServer], Callable[[str], dict[str, Any]], str, int]] = {
    # scheme -> server, options, path of the weights, one more than its library's pool has by itself
    "s3": (DatedServer, s3_options, f"/bucket/small/{WEIGHTS}", 11),
    "gs": (GcsServer, gs_options, f"/download/storage/v1/b/bucket/o/{quote(f'small/{WEIGHTS}', safe='')}?alt=media", 101),
    "az": (BlobServer, az_options, f"/account/bucket/small/{WEIGHTS}", 101),
}


@pytest.mark.parametrize("scheme", STORAGES)
def test_downloads_that_stand_still_keep_no_question_to_their_storage_waiting(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    server_kind, options, path, num_downloads = STORAGES[scheme]
    save_folder(tmp_path / "bucket" / "small", rank=4)
    with closing(server_kind(tmp_path)) as server:
        source, place = UrlSource([f"{scheme}://bucket"], {scheme: options(server.url)}), Place(scheme, f"{scheme}://bucket/small")
        with standing_downloads(source, place, server, path, num_downloads, tmp_path / "out"):
            assert WEIGHTS in source.describe(place, "").files


def test_downloads_that_stand_still_keep_no_question_to_their_server_waiting(tmp_path: Path) -> None:
    save_folder(tmp_path / "small", rank=4)
    with closing(FileServer(tmp_path)) as server:
        source, place = UrlSource([server.url], {}), Place("http", f"{server.url}/small")
        with standing_downloads(source, place, server, f"/small/{WEIGHTS}", 101, tmp_path / "out"):
            assert WEIGHTS in source.describe(place, "").files


def test_downloads_that_stand_still_keep_no_question_to_the_hub_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", WAIT_S)
    save_folder(tmp_path / "hub" / "org" / "small", rank=4)
    with closing(HubServer(tmp_path / "hub")) as server:
        server.stand_in(monkeypatch, tmp_path / "home")
        source, place = HubSource(), Place("hub", "org/small")
        path = f"/org/small/resolve/{server.commit('org/small')}/{WEIGHTS}"
        with standing_downloads(source, place, server, path, 101, tmp_path / "out"):
            assert WEIGHTS in source.describe(place, "").files
            assert source.may_read(place, "")


def test_a_limit_that_the_configuration_sets_stays() -> None:
    az = az_options("http://127.0.0.1:1")
    source = UrlSource([], {"s3": {"config_kwargs": {"max_pool_connections": 3}}, "az": {**az, "max_concurrency": 2}})
    assert source._system("s3").config_kwargs == {"max_pool_connections": 3}
    assert source._system("az").max_concurrency == 2
    assert UrlSource([], {"az": az})._system("az").max_concurrency == NUM_PARTS


def test_the_hubs_client_is_huggingface_hubs_own_but_for_its_connections() -> None:
    HubSource()
    with default_client_factory() as usual:
        for name in ("event_hooks", "follow_redirects", "timeout", "headers", "cookies", "params", "auth", "trust_env", "max_redirects"):
            assert getattr(get_session(), name) == getattr(usual, name), name
