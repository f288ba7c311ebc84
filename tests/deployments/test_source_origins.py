"""One id, two storages: what was fetched from the one is never served for the other."""

from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from loray.deployments.adapter_sources import Places
from loray.deployments.adapter_store import AdapterStore
from loray.deployments.config import AdapterArgs
from loray.deployments.request import AdapterRef
from loray.deployments.source_origins import source_origins
from tests.deployments.file_server import HubServer
from tests.deployments.peft_folder import SHAPES, save_folder

WEIGHTS = "adapter_model.safetensors"
VARIABLES = (
    *("HF_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST"),
    *("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_CONNECTION_STRING"),
)


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    save_folder(tmp_path / "mine", rank=4)
    client = boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1")
    client.create_bucket(Bucket="shelf")
    for file in (tmp_path / "mine").iterdir():
        client.upload_file(str(file), "shelf", f"mine/{file.name}")
    yield f"http://{host}:{port}"
    moto.stop()


@pytest.mark.slow
def test_an_s3_url_means_what_its_endpoint_has(s3: str, tmp_path: Path) -> None:
    ref, found = AdapterRef(adapter_id="s3://shelf/mine"), []
    for endpoint in (s3, s3.replace("127.0.0.1", "localhost"), s3):  # two names of one server, as if they were two
        options = {"s3": {"endpoint_url": endpoint}}
        store = AdapterStore(AdapterArgs(allowed_urls=["s3://shelf"], storage_options=options), SHAPES, tmp_path / "cache")
        found.append(store.find(ref))
        assert [left for left, _ in store.left_on_disk(set())] == [store.named(ref)], "those of the other are nobody's here"
    assert found[0].path == found[2].path != found[1].path


@pytest.mark.slow
def test_an_id_on_the_hub_means_what_its_endpoint_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in (1, 2, 1):
        root = tmp_path / f"hub{seed}"
        save_folder(root / "org" / "small", rank=4, seed=seed)
        hub = HubServer(root)
        hub.stand_in(monkeypatch, tmp_path / "home")
        found = AdapterStore(AdapterArgs(default_source="hub"), SHAPES, tmp_path / "cache").find(AdapterRef(adapter_id="org/small"))
        assert (Path(found.path) / WEIGHTS).read_bytes() == (root / "org" / "small" / WEIGHTS).read_bytes()
        hub.close()


def test_where_nothing_says_otherwise_keys_are_as_they_always_were() -> None:
    assert source_origins({"s3": {"key": "k", "secret": "s"}, "az": {"account_key": "k"}}) == {}
    assert "origin" not in Places("hub", {}).of(AdapterRef(adapter_id="org/small")).key


@pytest.mark.parametrize(
    ("source", "variable", "value", "option"),
    [
        ("hub", "HF_ENDPOINT", "https://mirror.example", None),
        ("s3", "AWS_ENDPOINT_URL_S3", "http://minio:9000", {"endpoint_url": "http://minio:9000"}),
        ("s3", "AWS_ENDPOINT_URL", "http://minio:9000", {"client_kwargs": {"endpoint_url": "http://minio:9000"}}),
        ("gs", "STORAGE_EMULATOR_HOST", "http://fake:1", {"endpoint_url": "http://fake:1"}),
        ("az", "AZURE_STORAGE_ACCOUNT_NAME", "mine", {"account_name": "mine"}),
        (
            "az",
            "AZURE_STORAGE_CONNECTION_STRING",
            "AccountName=mine;AccountKey=k==",
            {"connection_string": "AccountKey=x==;AccountName=mine"},
        ),
    ],
)
def test_endpoints_and_accounts_tell_storages_apart_and_keys_do_not(
    source: str, variable: str, value: str, option: dict[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = AdapterRef(adapter_id="org/small" if source == "hub" else f"{source}://shelf/small", source=source)

    def key() -> str:
        return Places("local", source_origins({})).of(ref).key

    usual = key()
    monkeypatch.setenv(variable, value)
    other = source_origins({})
    assert key() != usual and set(other) == {source}
    monkeypatch.delenv(variable)
    if option:
        assert source_origins({source: option}) == other


def test_an_option_counts_before_the_clients_as_the_library_has_it() -> None:
    both = {"endpoint_url": "http://minio:9000", "client_kwargs": {"endpoint_url": "http://other:9000"}}
    assert source_origins({"s3": both}) == {"s3": "http://minio:9000"}
    assert source_origins({"s3": {"client_kwargs": None}}) == {}


def test_the_hubs_own_address_is_no_other_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://huggingface.co/")
    assert source_origins({}) == {}
