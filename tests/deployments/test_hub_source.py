import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from loray.deployments.adapter_sources import Place
from loray.deployments.errors import AdapterFailed, AdapterNotFound, SourceFailed
from loray.deployments.hub_source import HubSource
from tests.deployments.file_server import CutOnce, Handler, HubServer, Spoil
from tests.deployments.peft_folder import save_folder

pytestmark = pytest.mark.slow  # a server of its own

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    save_folder(tmp_path / "hub" / "org" / "small", rank=4)
    served = HubServer(tmp_path / "hub")
    monkeypatch.setenv("HF_ENDPOINT", served.url)
    yield served
    served.close()


def fetched(source: HubSource, place: Place, folder: Path, token: str = "") -> dict[str, bytes]:
    folder.mkdir()
    offer = source.describe(place, token)
    source.fetch(place, offer, offer.files, token, folder)
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def fail(handler: Handler, status: int = 503) -> bool:
    handler.reply(status)
    return True


def test_only_the_adapters_own_files_are_fetched(tmp_path: Path, hub: HubServer) -> None:
    (hub.root / "org" / "small" / "optimizer.pt").write_bytes(b"x" * 1000)
    files = fetched(HubSource(), Place("hub", "org/small"), tmp_path / "out")
    expected = {name: (hub.root / "org" / "small" / name).read_bytes() for name in ("adapter_config.json", WEIGHTS)}
    assert files == expected
    assert not any("optimizer" in path for _, path in hub.requests)


def test_the_stamp_is_the_commit_and_a_commit_is_a_revision(tmp_path: Path, hub: HubServer) -> None:
    offer = HubSource().describe(Place("hub", "org/small"), "")
    assert offer.stamp == hub.commit("org/small") and not offer.is_private
    assert fetched(HubSource(), Place("hub", "org/small", offer.stamp), tmp_path / "out")
    with pytest.raises(AdapterNotFound, match="v9.*revision"):
        HubSource().describe(Place("hub", "org/small", "v9"), "")


def test_a_private_repository_is_private_and_unknown_to_others(tmp_path: Path, hub: HubServer) -> None:
    hub.readers["org/small"] = {"hf_good"}
    source, place = HubSource(), Place("hub", "org/small")
    assert source.describe(place, "hf_good").is_private
    assert fetched(source, place, tmp_path / "out", "hf_good")
    assert source.may_read(place, "hf_good") and not source.may_read(place, "hf_bad") and not source.may_read(place, "")
    messages = set()
    for name, token in (("org/small", "hf_bad"), ("org/small", ""), ("org/gone", "hf_bad")):
        with pytest.raises(AdapterNotFound) as raised:
            source.describe(Place("hub", name), token)
        messages.add(raised.value.message.replace(name, "NAME"))
    assert len(messages) == 1 and "hf_" not in messages.pop()


def test_a_gated_repository_is_private_and_unknown_to_those_without_access(hub: HubServer) -> None:
    hub.readers["org/small"] = {"hf_good"}
    hub.gated.add("org/small")
    assert HubSource().describe(Place("hub", "org/small"), "hf_good").is_private
    for token in ("hf_bad", ""):
        with pytest.raises(AdapterNotFound, match="not on the hub"):
            HubSource().describe(Place("hub", "org/small"), token)


def test_what_only_a_token_may_read_is_private_though_the_hub_does_not_say_so(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.readers["org/small"] = {"hf_good"}
    info = hub._info
    monkeypatch.setattr(hub, "_info", lambda repo: {**info(repo), "private": False})
    assert HubSource().describe(Place("hub", "org/small"), "hf_good").is_private


def test_an_id_in_other_letters_than_the_hubs_is_refused_with_the_hubs(hub: HubServer) -> None:
    """The hub takes both, and there would be two adapters of one repository here, with two versions after a reload."""
    (hub.root / "org").rename(hub.root / "moved")
    (hub.root / "Org").symlink_to(hub.root / "moved")
    (hub.root / "org").symlink_to(hub.root / "moved")
    info = hub._info
    hub._info = lambda repo: {**info(repo), "id": "Org/small"}  # type: ignore[method-assign]
    assert HubSource().describe(Place("hub", "Org/small"), "").files
    with pytest.raises(AdapterFailed, match="org/small.*'Org/small'"):
        HubSource().describe(Place("hub", "org/small"), "")


def test_a_public_repository_read_with_a_token_is_public(hub: HubServer) -> None:
    assert not HubSource().describe(Place("hub", "org/small"), "hf_any").is_private


def test_a_pickle_and_a_repository_without_an_adapter_are_refused(hub: HubServer) -> None:
    (hub.root / "org" / "small" / WEIGHTS).rename(hub.root / "org" / "small" / "adapter_model.bin")
    with pytest.raises(AdapterFailed, match=r"org/small.*pickle"):
        HubSource().describe(Place("hub", "org/small"), "")
    (hub.root / "org" / "small" / "adapter_config.json").unlink()
    with pytest.raises(AdapterFailed, match=r"adapter_config.json is missing"):
        HubSource().describe(Place("hub", "org/small"), "")


def test_a_download_that_is_cut_short_goes_on(tmp_path: Path, hub: HubServer) -> None:
    body = (hub.root / "org" / "small" / WEIGHTS).read_bytes()
    hub.rules[f"/org/small/resolve/{hub.commit('org/small')}/{WEIGHTS}"] = cut = CutOnce(body)
    assert fetched(HubSource(), Place("hub", "org/small"), tmp_path / "out")[WEIGHTS] == body
    assert cut.has_cut


def test_weights_with_another_digest_than_the_hub_tells_are_fetched_again_and_never_used(tmp_path: Path, hub: HubServer) -> None:
    body = (hub.root / "org" / "small" / WEIGHTS).read_bytes()
    path = f"/org/small/resolve/{hub.commit('org/small')}/{WEIGHTS}"
    hub.rules[path] = Spoil(body, num_times=1)
    assert HubSource().describe(Place("hub", "org/small"), "").digests == {WEIGHTS: ("sha256", hashlib.sha256(body).hexdigest())}
    assert fetched(HubSource(), Place("hub", "org/small"), tmp_path / "out")[WEIGHTS] == body
    assert hub.num_gets(WEIGHTS) == 2
    hub.rules[path] = Spoil(body, num_times=100)
    with pytest.raises(AdapterFailed, match=rf"org/small.*{WEIGHTS} came with the sha256 .* its source says"):
        fetched(HubSource(), Place("hub", "org/small"), tmp_path / "again")


def test_a_hub_that_fails_or_is_away_is_an_error_that_does_not_quote_the_token(
    tmp_path: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.rules["/api/models/org/small?blobs=True"] = hub.rules["/api/models/org/small?blobs=true"] = fail
    with pytest.raises(AdapterFailed, match="503") as raised:
        HubSource().describe(Place("hub", "org/small"), "hf_secret")
    assert "hf_secret" not in raised.value.message
    dead = HubServer(tmp_path)
    dead.close()
    monkeypatch.setenv("HF_ENDPOINT", dead.url)
    with pytest.raises(AdapterFailed, match="reached"):
        HubSource().describe(Place("hub", "org/small"), "hf_secret")


@pytest.mark.parametrize(("status", "error"), [(503, SourceFailed), (429, AdapterFailed), (403, AdapterNotFound)])
def test_a_hub_that_fails_after_it_told_of_an_adapter_says_so_and_who_may_not_read_it_spoils_it_for_nobody(
    tmp_path: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch, status: int, error: type[AdapterFailed]
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between the tries of the hub's own client
    hub.rules[f"/org/small/resolve/{hub.commit('org/small')}/{WEIGHTS}"] = lambda handler: fail(handler, status)
    words = "not for this token" if status == 403 else f"the hub answered {status}"
    with pytest.raises(AdapterFailed, match=f"'org/small'.* {words}$") as raised:
        fetched(HubSource(), Place("hub", "org/small"), tmp_path / "out")
    assert type(raised.value) is error and not (tmp_path / "out" / WEIGHTS).exists()
