import re

import pytest

from loray.deployments.adapter_sources import Place, named, normal_url, place_of
from loray.deployments.errors import InvalidRequest
from loray.deployments.request import AdapterRef


def place(adapter_id: str, **fields: str) -> Place:
    return place_of(AdapterRef(adapter_id=adapter_id, **fields), "local")


def test_the_source_is_what_the_request_says_else_the_ids_scheme_else_the_default() -> None:
    assert place("small") == Place("local", "small")
    assert place("org/name", source="hub") == Place("hub", "org/name")
    assert place("s3://bucket/a") == place("bucket/a", source="s3") == place("s3://bucket/a/", source="s3") == Place("s3", "s3://bucket/a")
    assert place("HTTPS".lower() + "://Example.com/Path") == Place("https", "https://example.com/Path")
    assert place_of(AdapterRef(adapter_id="org/name"), "hub").source == "hub"


def test_a_revision_stands_in_the_id_or_beside_it() -> None:
    assert place("org/name@v1", source="hub") == place("org/name", source="hub", revision="v1") == Place("hub", "org/name", "v1")
    assert place("org/name@v1", source="hub").name == "org/name@v1"
    with pytest.raises(InvalidRequest, match="v2"):
        place("org/name@v1", source="hub", revision="v2")
    with pytest.raises(InvalidRequest, match="no revisions"):
        place("small", revision="v1")


@pytest.mark.parametrize(
    "adapter_id",
    [
        "s3://bucket/../other/a",
        "s3://bucket/./a",
        "s3://bucket/x//a",
        "https://host/%2e%2e/a",
        "https://host/a?x=1",
        "https://host/a#x",
        "https://host\\@other/a",
        "https://user@host/a",
        "https:///a",
        "https://host/a\nb",
        "https://host/a\u2028b",
        "file:///etc",
        "ftp://host/a",
        "",
        "x" * 2000,
    ],
)
def test_a_url_that_could_be_read_in_two_ways_is_refused(adapter_id: str) -> None:
    with pytest.raises(InvalidRequest):
        place(adapter_id)


@pytest.mark.parametrize("adapter_id", ["http://Host:80/a/b", "http://HOST:80/a/b/", "http://host:80/a/b"])
def test_a_url_has_one_name_however_it_is_written(adapter_id: str) -> None:
    assert named(AdapterRef(adapter_id=adapter_id, api_token="t"), "local") == AdapterRef(adapter_id="http://host:80/a/b", source="http")


def test_a_password_in_a_url_is_not_repeated() -> None:
    with pytest.raises(InvalidRequest) as raised:
        place("https://user:secret@host/a")
    assert "secret" not in raised.value.message


@pytest.mark.parametrize("adapter_id", ["../x", "a/b/c", "org/..", "org/name@../x", "org/name@a b", "https://host/a"])
def test_what_cannot_be_an_id_on_the_hub_is_refused_before_the_hub_is_asked(adapter_id: str) -> None:
    with pytest.raises(InvalidRequest):
        place(adapter_id, source="hub")


def test_an_id_of_another_source_than_the_named_one_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="s3"):
        place("https://host/a", source="s3")
    assert place("http://host/a", source="https").source == "http"


def test_a_token_that_would_break_a_header_is_refused_and_not_repeated() -> None:
    with pytest.raises(InvalidRequest) as raised:
        place("org/name", source="hub", api_token="secret\nHost: x")
    assert "secret" not in raised.value.message


def test_a_token_may_be_long_and_has_no_blanks() -> None:
    assert place("org/name", source="hub", api_token="!~" * 1500) == Place("hub", "org/name")
    with pytest.raises(InvalidRequest, match="token"):
        place("org/name", source="hub", api_token="two words")


def test_keys_are_file_names_and_differ_for_different_places() -> None:
    ids = ["s3://bucket/a", "s3://bucket/b", "https://bucket/a", "s3://bucket-a", "s3://" + "long/" * 100 + "a", "s3://b/ü"]
    keys = [place(adapter_id).key for adapter_id in ids]
    assert len(set(keys)) == len(ids)
    assert all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]{1,120}", key) for key in keys)


def test_normal_urls_stay_as_they_are() -> None:
    for url in ("s3://bucket/a b/ü", "https://example.com:8443/x", "gs://bucket"):
        assert normal_url(url) == url
