"""gs:// against an emulator of Google's storage, az:// against the few calls of Azure's that reading makes."""

import base64
import hashlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from http.server import HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from urllib.request import Request, urlopen

import adlfs  # noqa: F401  here, and not within the seconds that a source has for its answer
import gcsfs.core
import pytest
from gcp_storage_emulator.handlers.buckets import create_bucket
from gcp_storage_emulator.server import RequestHandler
from gcp_storage_emulator.storage import Storage

from loray.deployments import url_source
from loray.deployments.adapter_sources import Place
from loray.deployments.errors import AdapterFailed, AdapterNotFound
from loray.deployments.url_source import UrlSource
from tests.deployments.file_server import FileServer, Handler
from tests.deployments.peft_folder import save_folder

pytestmark = pytest.mark.slow  # servers of its own

WEIGHTS = "adapter_model.safetensors"
NO_BLOBS = b'<?xml version="1.0" encoding="utf-8"?><EnumerationResults><Blobs /><NextMarker /></EnumerationResults>'


class GcsServer(HTTPServer):
    def __init__(self) -> None:
        storage = Storage(use_memory_fs=True)
        create_bucket("bucket", storage)
        super().__init__(("127.0.0.1", 0), partial(RequestHandler, storage))
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def put(self, name: str, body: bytes) -> None:
        urlopen(Request(f"{self.url}/bucket/{name}", data=body, method="PUT"), timeout=30).close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no news."""

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class BlobServer(FileServer):
    """root/container/blob, for who signs with the key of the account `account`."""

    def put(self, name: str, body: bytes) -> None:
        file = self.root / "bucket" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(body)

    def answer(self, handler: Handler) -> None:
        url = urlsplit(handler.path)
        path = self.root / unquote(url.path).removeprefix("/account/")
        if not handler.headers.get("Authorization", "").startswith("SharedKey account:"):
            return handler.reply(403, x_ms_error_code="AuthenticationFailed")
        if parse_qs(url.query).get("comp") == ["list"] and path.is_dir():
            return handler.reply(200, NO_BLOBS, Content_Type="application/xml")
        if not path.is_file():
            return handler.reply(404, x_ms_error_code="BlobNotFound")
        body = path.read_bytes()
        digest = hashlib.md5(body)
        about = {"ETag": f'"{digest.hexdigest()}"', "Last_Modified": "Mon, 16 Nov 2026 13:00:00 GMT", "x_ms_blob_type": "BlockBlob"}
        wanted = handler.headers.get("x-ms-range")
        if handler.command == "HEAD" or not wanted:
            return handler.reply(200, body, Content_MD5=base64.b64encode(digest.digest()).decode(), **about)
        first, last = (int(end) for end in wanted.removeprefix("bytes=").split("-"))
        part = body[first : last + 1]
        return handler.reply(206, part, Content_Range=f"bytes {first}-{first + len(part) - 1}/{len(body)}", **about)


def gs_options(url: str) -> dict[str, Any]:
    return {"endpoint_url": url, "token": "anon"}


def az_options(url: str) -> dict[str, Any]:
    return {"connection_string": f"AccountName=account;AccountKey={base64.b64encode(b'key').decode()};BlobEndpoint={url}/account"}


OPTIONS = {"gs": gs_options, "az": az_options}


@dataclass
class Cloud:
    scheme: str
    put: Callable[[str, bytes], None]
    source: UrlSource

    def put_folder(self, folder: Path, name: str) -> Place:
        for file in folder.iterdir():
            self.put(f"{name}/{file.name}", file.read_bytes())
        return self.at(f"bucket/{name}")

    def at(self, path: str) -> Place:
        return Place(self.scheme, f"{self.scheme}://{path}")


@pytest.fixture(params=["gs", "az"])
def cloud(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    monkeypatch.setattr(url_source, "PAUSE_S", 0)
    server = GcsServer() if request.param == "gs" else BlobServer(tmp_path / "served")
    allowed = [f"{request.param}://bucket/adapters", f"{request.param}://absent"]
    yield Cloud(request.param, server.put, UrlSource(allowed, {request.param: OPTIONS[request.param](server.url)}))
    server.close()


@pytest.fixture
def small(tmp_path: Path) -> Path:
    save_folder(tmp_path / "small", rank=4)
    return tmp_path / "small"


def fetched(cloud: Cloud, place: Place, folder: Path) -> dict[str, bytes]:
    folder.mkdir()
    offer = cloud.source.describe(place, "")
    cloud.source.fetch(place, offer, offer.files, "", folder)
    cloud.source.check_unchanged(place, offer, "")
    return contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_an_adapter_is_read_with_its_digests(cloud: Cloud, small: Path, tmp_path: Path) -> None:
    place = cloud.put_folder(small, "adapters/small")
    offer = cloud.source.describe(place, "")
    assert offer.files == {name: len(body) for name, body in contents(small).items()}
    assert offer.digests == {name: ("md5", hashlib.md5(body).hexdigest()) for name, body in contents(small).items()}
    assert fetched(cloud, place, tmp_path / "out") == contents(small)
    save_folder(small, rank=4, seed=1)
    cloud.put_folder(small, "adapters/small")
    assert cloud.source.describe(place, "").stamp not in ("", offer.stamp)


def test_what_is_not_there_is_not_found_and_a_pickle_is_refused(cloud: Cloud, small: Path) -> None:
    for path in ("bucket/adapters/none", "absent/none"):
        with pytest.raises(AdapterNotFound, match="none"):
            cloud.source.describe(cloud.at(path), "")
    (small / WEIGHTS).rename(small / "adapter_model.bin")
    with pytest.raises(AdapterFailed, match=r"pickled.*pickle.*save_file"):
        cloud.source.describe(cloud.put_folder(small, "adapters/pickled"), "")


def test_what_is_off_the_list_is_refused(cloud: Cloud, small: Path) -> None:
    with pytest.raises(AdapterFailed, match="allowed_urls"):
        cloud.source.describe(cloud.put_folder(small, "adapters-2/small"), "")


def test_other_bytes_than_announced_are_refused(cloud: Cloud, small: Path, tmp_path: Path) -> None:
    place = cloud.put_folder(small, "adapters/small")
    offer = cloud.source.describe(place, "")
    body = (small / WEIGHTS).read_bytes()
    cloud.put(f"adapters/small/{WEIGHTS}", bytes(len(body)))
    with pytest.raises(AdapterFailed, match=f"its source says {hashlib.md5(body).hexdigest()}"):
        cloud.source.fetch(place, offer, offer.files, "", tmp_path)
    cloud.put(f"adapters/small/{WEIGHTS}", body + b"x")
    with pytest.raises(AdapterFailed, match="more than"):
        cloud.source.fetch(place, offer, offer.files, "", tmp_path)


def test_files_that_change_while_they_are_read_are_not_mixed(cloud: Cloud, small: Path, tmp_path: Path) -> None:
    place = cloud.put_folder(small, "adapters/small")
    offer = cloud.source.describe(place, "")
    cloud.put("adapters/small/chat_template.jinja", b"{{ messages }}")
    cloud.source.fetch(place, offer, offer.files, "", tmp_path)
    with pytest.raises(AdapterFailed, match="changed while"):
        cloud.source.check_unchanged(place, offer, "")


@pytest.mark.parametrize("scheme", OPTIONS)
def test_a_storage_that_does_not_answer_is_not_waited_for(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source = UrlSource([f"{scheme}://bucket"], {scheme: OPTIONS[scheme](f"http://127.0.0.1:{silent.getsockname()[1]}")})
        source._system(scheme)  # so that nothing but the answer is waited for
        monkeypatch.setattr(url_source, "ANSWER_S", 0.5)
        with pytest.raises(AdapterFailed, match=r"no answer within 0.5 s.*storage_options"):
            source.describe(Place(scheme, f"{scheme}://bucket/a"), "")
        silent.settimeout(10)
        silent.accept()[0].close()  # it was asked


def test_the_time_that_a_library_takes_to_import_is_not_the_storages(monkeypatch: pytest.MonkeyPatch) -> None:
    find = url_source.fsspec.get_filesystem_class

    def find_slowly(scheme: str) -> Any:
        time.sleep(1.2)
        return find(scheme)

    monkeypatch.setattr(url_source.fsspec, "get_filesystem_class", find_slowly)
    monkeypatch.setattr(url_source, "ANSWER_S", 1)
    source = UrlSource(["az://bucket"], {"az": OPTIONS["az"]("http://127.0.0.1:1")})
    assert source._system("az").protocol


def test_a_long_search_for_credentials_holds_up_no_other_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searching, found = threading.Event(), threading.Event()

    def search(*args: Any, **kwargs: Any) -> None:
        searching.set()
        found.wait(60)

    monkeypatch.setattr(gcsfs.core, "GoogleCredentials", search)
    server = FileServer(tmp_path)
    source = UrlSource(["gs://bucket", server.url], {})
    failures: list[str] = []

    def ask() -> None:
        try:
            source.describe(Place("gs", "gs://bucket/a"), "")
        except AdapterFailed as error:
            failures.append(error.message)

    asker = threading.Thread(target=ask)
    asker.start()
    try:
        assert searching.wait(30)
        with pytest.raises(AdapterNotFound):
            source.describe(Place("http", f"{server.url}/none"), "")
        assert not failures
        monkeypatch.setattr(url_source, "ANSWER_S", 0.1)
        with pytest.raises(AdapterFailed, match="no answer"):
            source.describe(Place("gs", "gs://bucket/a"), "")
    finally:
        found.set()
        asker.join(60)
        server.close()
    assert len(failures) == 1  # without credentials there is nothing to read with


def test_azure_without_an_account_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCOUNT_NAME", "CONNECTION_STRING"):
        monkeypatch.delenv(f"AZURE_STORAGE_{name}", raising=False)
    with pytest.raises(AdapterFailed, match=r"connection_string or account_name"):
        UrlSource(["az://bucket"], {}).describe(Place("az", "az://bucket/a"), "")


def test_a_storage_that_refuses_is_quoted(tmp_path: Path) -> None:
    server = BlobServer(tmp_path)
    options = {
        "gs": gs_options(server.url),
        "az": {"connection_string": az_options(server.url)["connection_string"].replace("=account;", "=other;")},
    }
    try:
        for scheme, words in (("gs", "Forbidden"), ("az", "AuthenticationFailed")):
            with pytest.raises(AdapterFailed, match=words):
                UrlSource([f"{scheme}://bucket"], options).describe(Place(scheme, f"{scheme}://bucket/a"), "")
    finally:
        server.close()


def test_a_token_of_the_configuration_is_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # gcsfs shows a bare token to Google, and quotes the URL when that fails
    with pytest.raises(AdapterFailed, match="tokeninfo") as failure:
        UrlSource(["gs://bucket"], {"gs": {"token": "hidden-token"}}).describe(Place("gs", "gs://bucket/a"), "")
    assert "hidden" not in failure.value.message
