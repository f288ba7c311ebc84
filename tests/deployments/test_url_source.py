import gzip
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from email.utils import formatdate
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.core import DEFAULT_ACCOUNT_ID as ACCOUNT_ID
from moto.s3.models import s3_backends
from moto.server import ThreadedMotoServer

from loray.deployments import url_source
from loray.deployments.adapter_sources import Place
from loray.deployments.errors import AdapterFailed, AdapterNotFound
from loray.deployments.url_source import UrlSource
from tests.deployments.file_server import CutOnce, FileServer, Handler, Hold, Spoil
from tests.deployments.peft_folder import save_folder

pytestmark = pytest.mark.slow  # servers of its own

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FileServer]:
    save_folder(tmp_path / "served" / "good" / "small", rank=4)
    served = FileServer(tmp_path / "served")
    yield served
    served.close()


@pytest.fixture(scope="module")
def s3_url() -> Iterator[str]:
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    yield f"http://{host}:{port}"
    moto.stop()


@pytest.fixture
def bucket(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    client = boto3.client("s3", endpoint_url=s3_url, region_name="us-east-1")
    client.create_bucket(Bucket="bucket")
    return "bucket"


def upload(s3_url: str, folder: Path, prefix: str, **extra: str) -> None:
    client = boto3.client("s3", endpoint_url=s3_url, region_name="us-east-1")
    for file in folder.iterdir():
        client.upload_file(str(file), "bucket", f"{prefix}/{file.name}", ExtraArgs=extra)


def at(url: str) -> Place:
    return Place(url.partition(":")[0], url)


def fetched(source: UrlSource, place: Place, folder: Path) -> dict[str, bytes]:
    folder.mkdir()
    offer = source.describe(place, "")
    source.fetch(place, offer, offer.files, "", folder)
    source.check_unchanged(place, offer, "")
    return contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_an_adapter_is_read_from_an_s3_server_with_an_endpoint_of_its_own(tmp_path: Path, s3_url: str, bucket: str) -> None:
    save_folder(tmp_path / "small", rank=4)
    upload(s3_url, tmp_path / "small", "adapters/small")
    source = UrlSource(["s3://bucket/adapters"], {"s3": {"endpoint_url": s3_url}})
    place = at("s3://bucket/adapters/small")
    offer = source.describe(place, "")
    assert offer.files == {file.name: file.stat().st_size for file in (tmp_path / "small").iterdir()} and not offer.is_private
    assert fetched(source, place, tmp_path / "out") == contents(tmp_path / "small")
    save_folder(tmp_path / "small", rank=4, seed=1)
    upload(s3_url, tmp_path / "small", "adapters/small")
    assert source.describe(place, "").stamp != offer.stamp


def test_what_s3_does_not_have_is_not_found_and_a_pickle_is_refused(tmp_path: Path, s3_url: str, bucket: str) -> None:
    source = UrlSource(["s3://bucket", "s3://absent"], {"s3": {"endpoint_url": s3_url}})
    for url in ("s3://bucket/none", "s3://absent/none"):
        with pytest.raises(AdapterNotFound, match="none"):
            source.describe(at(url), "")
    save_folder(tmp_path / "pickled", rank=4)
    (tmp_path / "pickled" / WEIGHTS).rename(tmp_path / "pickled" / "adapter_model.bin")
    upload(s3_url, tmp_path / "pickled", "pickled")
    with pytest.raises(AdapterFailed, match=r"pickled.*pickle.*save_file"):
        source.describe(at("s3://bucket/pickled"), "")


def test_an_adapter_is_read_over_http_where_the_list_says_http(tmp_path: Path, server: FileServer) -> None:
    source = UrlSource([f"{server.url}/good/"], {})
    place = at(f"{server.url}/good/small")
    assert fetched(source, place, tmp_path / "out") == contents(tmp_path / "served" / "good" / "small")


@pytest.mark.parametrize(
    "url", ["s3://bucket-2/a", "s3://bucket/adapters-2/a", "s3://bucket/a", "https://example.com.evil.org/a", "gs://bucket/adapters/a"]
)
def test_a_url_off_the_list_is_refused_unread(url: str) -> None:
    source = UrlSource(["s3://bucket/adapters", "https://example.com"], {})
    with pytest.raises(AdapterFailed, match="allowed_urls"):
        source.describe(at(url), "")


def test_with_no_list_no_url_is_read() -> None:
    with pytest.raises(AdapterFailed, match="allowed_urls"):
        UrlSource([], {}).describe(at("https://example.com/a"), "")


@pytest.mark.parametrize("url", ["https://", "https://user@host/", "example.com"])
def test_a_list_that_says_no_place_is_refused_at_start(url: str) -> None:
    with pytest.raises(ValueError, match="allowed_urls"):
        UrlSource([url], {})


def test_a_redirect_is_followed_on_the_list_only(tmp_path: Path, server: FileServer) -> None:
    secret = FileServer(tmp_path / "served")
    try:
        source = UrlSource([f"{server.url}/good"], {})
        for name in ("adapter_config.json", WEIGHTS):
            server.rules[f"/good/away/{name}"] = redirect(f"{secret.url}/good/small/{name}")
            server.rules[f"/good/up/{name}"] = redirect(f"{server.url}/bad/../bad/{name}")
            server.rules[f"/good/coded/{name}"] = redirect(f"{server.url}/good/%2e%2e/bad/{name}")
            server.rules[f"/good/moved/{name}"] = redirect(f"/good/small/{name}")
        for path in ("away", "up", "coded"):
            with pytest.raises(AdapterFailed, match="does not list"):
                source.describe(at(f"{server.url}/good/{path}"), "")
        assert not secret.requests and not server.num_gets("/bad/adapter_config.json")
        assert fetched(source, at(f"{server.url}/good/moved"), tmp_path / "out") == contents(tmp_path / "served" / "good" / "small")
    finally:
        secret.close()


def redirect(target: str) -> Callable[[Handler], bool]:
    def rule(handler: Handler) -> bool:
        handler.reply(302, Location=target)
        return True

    return rule


def test_a_download_that_is_cut_short_is_done_again(tmp_path: Path, server: FileServer) -> None:
    body = (tmp_path / "served" / "good" / "small" / WEIGHTS).read_bytes()
    server.rules[f"/good/small/{WEIGHTS}"] = cut = CutOnce(body)
    assert fetched(UrlSource([server.url], {}), at(f"{server.url}/good/small"), tmp_path / "out")[WEIGHTS] == body
    assert cut.has_cut and server.num_gets(WEIGHTS) == 2


@pytest.mark.slow
def test_a_download_that_is_always_cut_short_fails(tmp_path: Path, server: FileServer) -> None:
    body = (tmp_path / "served" / "good" / "small" / WEIGHTS).read_bytes()

    def cut(handler: Handler) -> bool:
        if handler.command == "GET":
            handler.cut_short(body)
        return handler.command == "GET"

    server.rules[f"/good/small/{WEIGHTS}"] = cut
    with pytest.raises(AdapterFailed, match="small"):
        fetched(UrlSource([server.url], {}), at(f"{server.url}/good/small"), tmp_path / "out")


def test_a_download_with_another_digest_than_its_source_tells_is_done_again(
    tmp_path: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(url_source, "PAUSE_S", 0)
    server.tells_digests = True
    body = (tmp_path / "served" / "good" / "small" / WEIGHTS).read_bytes()
    server.rules[f"/good/small/{WEIGHTS}"] = Spoil(body, num_times=1)
    place = at(f"{server.url}/good/small")
    assert fetched(UrlSource([server.url], {}), place, tmp_path / "out")[WEIGHTS] == body
    assert server.num_gets(WEIGHTS) == 2
    server.rules[f"/good/small/{WEIGHTS}"] = Spoil(body, num_times=100)
    with pytest.raises(AdapterFailed, match=rf"small.*{WEIGHTS} came with the md5 .* its source says {hashlib.md5(body).hexdigest()}"):
        fetched(UrlSource([server.url], {}), place, tmp_path / "again")
    assert server.num_gets(WEIGHTS) == 2 + url_source.NUM_ATTEMPTS


@pytest.mark.parametrize("encryption", ["", "AES256", "aws:kms"])
def test_the_digest_of_s3_is_compared_where_it_is_one(
    tmp_path: Path, s3_url: str, bucket: str, encryption: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(url_source, "PAUSE_S", 0)
    save_folder(tmp_path / "small", rank=4)
    upload(s3_url, tmp_path / "small", "digests", **({"ServerSideEncryption": encryption} if encryption else {}))
    source, place = UrlSource(["s3://bucket"], {"s3": {"endpoint_url": s3_url}}), at("s3://bucket/digests")
    expected = {file.name: ("md5", hashlib.md5(file.read_bytes()).hexdigest()) for file in (tmp_path / "small").iterdir()}
    assert source.describe(place, "").digests == expected
    assert fetched(source, place, tmp_path / "out") == contents(tmp_path / "small")
    stored = s3_backends[ACCOUNT_ID]["aws"].buckets["bucket"].keys[f"digests/{WEIGHTS}"]
    stored._etag = "0" * 32  # as if other bytes had been uploaded, or S3 had made it of the encrypted ones
    if encryption == "aws:kms":
        assert fetched(source, place, tmp_path / "again") == contents(tmp_path / "small")
    else:
        with pytest.raises(AdapterFailed, match=f"digests.*its source says {'0' * 32}"):
            fetched(source, place, tmp_path / "again")


def test_more_bytes_than_announced_are_not_read(tmp_path: Path, server: FileServer) -> None:
    def grow(handler: Handler) -> bool:
        if handler.command == "GET":
            handler.reply(200, b"x" * 1_000_000)
        return handler.command == "GET"

    server.rules[f"/good/small/{WEIGHTS}"] = grow
    with pytest.raises(AdapterFailed, match="more than"):
        fetched(UrlSource([server.url], {}), at(f"{server.url}/good/small"), tmp_path / "out")
    assert (tmp_path / "out" / WEIGHTS).exists() is False or (tmp_path / "out" / WEIGHTS).stat().st_size == 0


def test_files_that_change_between_two_reads_are_not_mixed(tmp_path: Path, server: FileServer) -> None:
    folder = tmp_path / "served" / "good" / "small"

    def change(handler: Handler) -> bool:
        if handler.command == "GET":
            config = folder / "adapter_config.json"
            config.write_text(config.read_text().replace('"lora_alpha": 4', '"lora_alpha": 8'))
        return False

    server.rules[f"/good/small/{WEIGHTS}"] = change
    with pytest.raises(AdapterFailed, match="changed while"):
        fetched(UrlSource([server.url], {}), at(f"{server.url}/good/small"), tmp_path / "out")


def test_a_server_without_etags_is_asked_when_its_files_were_changed(tmp_path: Path) -> None:
    """As `python -m http.server` is."""

    class Plain(FileServer):
        def answer(self, handler: Handler) -> None:
            file = self.root / handler.path.lstrip("/")
            if not file.is_file():
                return handler.reply(404)
            handler.reply(200, file.read_bytes(), Last_Modified=formatdate(file.stat().st_mtime, usegmt=True))

    folder = tmp_path / "served" / "small"
    save_folder(folder, rank=4)
    for file in folder.iterdir():
        os.utime(file, (1e9, 1e9))

    def retrain(handler: Handler) -> bool:
        if handler.command == "GET":
            save_folder(folder, rank=4, seed=1)  # of the same size
        return False

    with closing(Plain(tmp_path / "served")) as server:
        source = UrlSource([server.url], {})
        assert source.describe(at(f"{server.url}/small"), "").stamp == "", "a second is too coarse"
        fetched(source, at(f"{server.url}/small"), tmp_path / "whole")
        server.rules[f"/small/{WEIGHTS}"] = retrain
        with pytest.raises(AdapterFailed, match="changed while"):
            fetched(source, at(f"{server.url}/small"), tmp_path / "out")


def test_where_a_server_tells_etags_it_may_say_what_it_likes_of_when_a_file_was_changed(tmp_path: Path) -> None:
    """Several behind one address seldom agree."""

    class Balanced(FileServer):
        def answer(self, handler: Handler) -> None:
            file = self.root / handler.path.lstrip("/")
            if not file.is_file():
                return handler.reply(404)
            body = file.read_bytes()
            handler.reply(200, body, ETag=f'"{hashlib.md5(body).hexdigest()}"', Last_Modified=formatdate(len(self.requests), usegmt=True))

    save_folder(tmp_path / "served" / "small", rank=4)
    with closing(Balanced(tmp_path / "served")) as server:
        assert fetched(UrlSource([server.url], {}), at(f"{server.url}/small"), tmp_path / "whole")


@pytest.mark.parametrize("status", [401, 403, 500])
def test_a_server_that_refuses_is_quoted_with_its_status(server: FileServer, status: int) -> None:
    def refuse(handler: Handler) -> bool:
        handler.reply(status)
        return True

    server.rules["/good/small/adapter_config.json"] = refuse
    with pytest.raises(AdapterFailed, match=f"small.*{status}"):
        UrlSource([server.url], {}).describe(at(f"{server.url}/good/small"), "")


def answering(status: int) -> Callable[[Handler], bool]:
    def rule(handler: Handler) -> bool:
        handler.reply(status)
        return True

    return rule


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 410])
def test_an_extra_file_that_a_server_denies_is_not_there(tmp_path: Path, server: FileServer, status: int) -> None:
    (tmp_path / "served" / "good" / "small" / "chat_template.jinja").write_text("mine")
    server.rules["/good/small/chat_template.jinja"] = answering(status)
    assert "chat_template.jinja" not in UrlSource([server.url], {}).describe(at(f"{server.url}/good/small"), "").files


@pytest.mark.parametrize("status", [408, 429, 503])
def test_an_adapter_is_not_served_without_the_template_that_its_server_could_not_send(
    tmp_path: Path, server: FileServer, status: int
) -> None:
    (tmp_path / "served" / "good" / "small" / "chat_template.jinja").write_text("mine")
    server.rules["/good/small/chat_template.jinja"] = answering(status)
    source, place = UrlSource([server.url], {}), at(f"{server.url}/good/small")
    with pytest.raises(AdapterFailed, match=f"small.*{status}"):
        source.describe(place, "")
    server.rules.clear()
    assert "chat_template.jinja" in source.describe(place, "").files


def test_an_extra_file_for_which_a_server_sends_its_readers_off_the_list_is_not_there(tmp_path: Path, server: FileServer) -> None:
    """As to where people log in."""

    def away(handler: Handler) -> bool:
        handler.reply(302, Location=f"{server.url}/login")
        return True

    server.rules["/good/small/chat_template.jinja"] = away
    offer = UrlSource([f"{server.url}/good"], {}).describe(at(f"{server.url}/good/small"), "")
    assert set(offer.files) == {"adapter_config.json", WEIGHTS}


def test_an_extra_file_that_does_not_come_or_has_no_size_is_an_error(
    tmp_path: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "served" / "good" / "small" / "chat_template.jinja"
    template.write_text("mine")

    def in_pieces(handler: Handler) -> bool:
        handler.send_response(200)
        handler.send_header("Connection", "close")
        handler.end_headers()
        if handler.command == "GET":
            handler.wfile.write(template.read_bytes())
        handler.close_connection = True
        return True

    source, place = UrlSource([server.url], {}), at(f"{server.url}/good/small")
    server.rules["/good/small/chat_template.jinja"] = in_pieces
    with pytest.raises(AdapterFailed, match="does not say how large chat_template.jinja is"):
        source.describe(place, "")
    monkeypatch.setattr(url_source, "ANSWER_S", 0.5)
    spoken = threading.Event()
    server.rules["/good/small/chat_template.jinja"] = lambda handler: not spoken.wait(10)
    with pytest.raises(AdapterFailed, match="small.*can't be read"):
        source.describe(place, "")
    spoken.set()


@pytest.mark.parametrize("error", [PermissionError("Forbidden"), OSError("Forbidden: bucket/name\n…")], ids=["s3", "gs"])
def test_a_storage_may_forbid_what_is_not_there(server: FileServer, monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    source, place = UrlSource([server.url], {}), at(f"{server.url}/good/small")
    system = source._system("http")
    info = system.info

    def forbidding(path: str, **options: Any) -> Any:
        if path.endswith(("chat_template.jinja", "tokenizer_config.json")):
            raise error
        return info(path, **options)

    monkeypatch.setattr(system, "info", forbidding)
    assert set(source.describe(place, "").files) == {"adapter_config.json", WEIGHTS}


def test_a_server_that_sends_its_readers_round_in_circles_is_told_of(server: FileServer) -> None:
    def on_and_on(handler: Handler) -> bool:
        handler.reply(302, Location=f"{server.url}/good/small/adapter_config.json")
        return True

    server.rules["/good/small/adapter_config.json"] = on_and_on
    with pytest.raises(AdapterFailed, match="sends the reader on again and again"):
        UrlSource([server.url], {}).describe(at(f"{server.url}/good/small"), "")


def test_a_missing_adapter_and_a_dead_server_are_told_apart(tmp_path: Path, server: FileServer) -> None:
    with pytest.raises(AdapterNotFound, match="none"):
        UrlSource([server.url], {}).describe(at(f"{server.url}/none"), "")
    dead = FileServer(tmp_path)
    dead.close()
    with pytest.raises(AdapterFailed, match="can't be read"):
        UrlSource([dead.url], {}).describe(at(f"{dead.url}/none"), "")


def test_a_size_that_is_not_said_is_refused(server: FileServer) -> None:
    def hide(handler: Handler) -> bool:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        if handler.command == "GET":
            handler.wfile.write(b"1\r\nx\r\n0\r\n\r\n")
        return True

    server.rules["/good/small/adapter_config.json"] = hide
    with pytest.raises(AdapterFailed, match="how large"):
        UrlSource([server.url], {}).describe(at(f"{server.url}/good/small"), "")


def test_a_source_whose_library_is_not_installed_says_which_extra_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs.core", None)
    with pytest.raises(AdapterFailed, match=r"loray\[gcs\]"):
        UrlSource(["gs://bucket"], {}).describe(at("gs://bucket/a"), "")


def test_a_file_system_that_could_not_be_made_is_tried_again_at_the_next_call(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    source, place = UrlSource([server.url], {}), at(f"{server.url}/good/small")
    make, failures = source._make, [OSError("no credentials yet")]

    def fail_once(scheme: str, kind: Any) -> Any:
        if failures:
            raise failures.pop()
        return make(scheme, kind)

    monkeypatch.setattr(source, "_make", fail_once)
    with pytest.raises(AdapterFailed, match="no credentials yet"):
        source.describe(place, "")
    assert WEIGHTS in source.describe(place, "").files


def test_a_server_that_compresses_what_it_may_is_asked_for_the_files_as_they_are(tmp_path: Path, server: FileServer) -> None:
    """Compressed, they have another size than was announced."""
    expected = contents(tmp_path / "served" / "good" / "small")

    def compress(handler: Handler) -> bool:
        if handler.command == "GET" and "gzip" in handler.headers.get("Accept-Encoding", ""):
            packed = gzip.compress(expected[Path(handler.path).name], compresslevel=0)
            handler.reply(200, packed, Content_Encoding="gzip")
            return True
        return False

    for name in expected:
        server.rules[f"/good/small/{name}"] = compress
    assert fetched(UrlSource([server.url], {}), at(f"{server.url}/good/small"), tmp_path / "out") == expected


def test_a_slow_download_does_not_delay_another(tmp_path: Path, server: FileServer) -> None:
    save_folder(tmp_path / "served" / "good" / "slow", rank=4)
    source = UrlSource([server.url], {})
    server.rules[f"/good/slow/{WEIGHTS}"] = hold = Hold()
    slow = threading.Thread(target=fetched, args=(source, at(f"{server.url}/good/slow"), tmp_path / "slow"))
    slow.start()
    assert hold.held.wait(60)
    fetched(source, at(f"{server.url}/good/small"), tmp_path / "out")
    assert not (tmp_path / "slow" / WEIGHTS).exists() or (tmp_path / "slow" / WEIGHTS).stat().st_size == 0
    hold.released.set()
    slow.join(60)
    assert contents(tmp_path / "slow") == contents(tmp_path / "served" / "good" / "slow")
