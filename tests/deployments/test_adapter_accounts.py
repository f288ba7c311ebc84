"""An adapter has one account and one weight, whatever a request calls it. Over a real store, finder and queue."""

import asyncio
from contextlib import nullcontext
from pathlib import Path

import pytest

from loray.cluster.channel import Address
from loray.deployments.adapter_accounts import account_of, account_weights
from loray.deployments.adapter_finder import AdapterFinder
from loray.deployments.adapter_store import AdapterStore
from loray.deployments.config import AdapterArgs
from loray.deployments.fair_queue import FairQueue, adapter_name
from loray.deployments.request import AdapterRef, GenerationRequest, MergeRecipe
from loray.deployments.sequence import Sequence
from loray.models.step import Sampling
from tests.deployments.file_server import FileServer
from tests.deployments.merging_here import merge_here
from tests.deployments.peft_folder import SHAPES, save_folder


class Door:
    """Where requests come in: their adapters are found, and they wait in the queue."""

    def __init__(self, args: AdapterArgs, cache: Path) -> None:
        self._store = AdapterStore(args, SHAPES, cache)
        self._store.merge = merge_here
        self.queue = FairQueue(account_weights(args))

    def arrive(self, adapter_id: str, source: str = "", merge: MergeRecipe | None = None) -> Sequence:
        async def found() -> Sequence:
            finder = AdapterFinder(self._store, max_waiting=10, needed=lambda adapter: nullcontext())
            ref = AdapterRef(adapter_id=adapter_id, source=source, merge=merge)
            request = GenerationRequest(request_id="", prompt_ids=[1], max_new_tokens=1, sampling=Sampling())
            return Sequence(request, await finder.find(ref), Address("", b""), 0)

        sequence = asyncio.run(found())
        self.queue.add(sequence)
        return sequence


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save_folder(tmp_path / "root" / "v1", rank=4)
    (tmp_path / "root" / "current").symlink_to("v1")
    (tmp_path / "link").symlink_to("root")
    return tmp_path / "root"


@pytest.mark.parametrize("weighted", ["v1", "current", "./v1", "{root}/v1"])
@pytest.mark.parametrize("root_name", ["root", "link"])
def test_a_folder_has_the_weight_of_its_name_however_it_is_called(root: Path, tmp_path: Path, weighted: str, root_name: str) -> None:
    weights = {weighted.format(root=root): 3.0, "": 0.5}
    door = Door(AdapterArgs(local_roots=[tmp_path / root_name], default_source="local", weights=weights), tmp_path / "cache")
    names = [f"{tmp_path}/link/current", str(root / "v1"), "v1", "current", f"{root}/../root/v1"]
    arrived = [door.arrive(name) for name in names]
    assert [door.queue.weight_of(sequence) for sequence in arrived] == [3.0] * len(names)
    assert door.queue.num_waiting_of(adapter_name(arrived[0].adapter)) == len(names), "they share one account"


def test_a_name_of_a_local_adapter_has_its_weight_on_a_server_of_hub_adapters(root: Path, tmp_path: Path) -> None:
    door = Door(AdapterArgs(local_roots=[root], default_source="hub", weights={"v1": 3.0}), tmp_path / "cache")
    assert [door.queue.weight_of(door.arrive(name, "local")) for name in (str(root / "v1"), "v1")] == [3.0, 3.0]


def test_a_link_that_leads_elsewhere_later_on_keeps_the_weight_of_its_name(root: Path, tmp_path: Path) -> None:
    door = Door(AdapterArgs(local_roots=[root], default_source="local", weights={"current": 3.0}), tmp_path / "cache")
    save_folder(root / "v2", rank=4, seed=1)
    (root / "current").unlink()
    (root / "current").symlink_to("v2")
    assert door.queue.weight_of(door.arrive("current")) == 3.0


def test_other_adapters_keep_their_own_accounts(root: Path, tmp_path: Path) -> None:
    save_folder(root / "other", rank=4)  # with the same files
    door = Door(AdapterArgs(local_roots=[root], default_source="local", weights={"v1": 3.0}), tmp_path / "cache")
    assert [door.queue.weight_of(door.arrive(name)) for name in ("other", "v1", str(root / "other"))] == [1.0, 3.0, 1.0]


def test_a_url_has_one_weight_in_all_its_spellings(root: Path, tmp_path: Path) -> None:
    web = FileServer(root)
    try:
        url = f"{web.url}/v1"
        door = Door(AdapterArgs(allowed_urls=[web.url], weights={f"{url}/": 3.0}), tmp_path / "cache")
        arrived = [door.arrive(name) for name in (url, f"{url}/")]
        assert [door.queue.weight_of(sequence) for sequence in arrived] == [3.0, 3.0]
        assert door.queue.num_waiting_of(adapter_name(arrived[0].adapter)) == 2
    finally:
        web.close()


def test_a_weight_counts_for_the_name_at_whatever_source_requests_name() -> None:
    weights = account_weights(AdapterArgs(weights={"bucket/x": 3.0}))
    assert weights[account_of(AdapterRef(adapter_id="s3://bucket/x", source="s3"), "/cache/x")] == 3.0


def test_all_revisions_of_a_repository_have_one_account_and_its_weight() -> None:
    refs = [AdapterRef(adapter_id=name, source="hub") for name in ("org/a", "org/a@main", "org/a@0123abc")]
    accounts = {account_of(ref, f"/cache/{number}") for number, ref in enumerate(refs)}
    assert accounts == {account_of(AdapterRef(adapter_id="org/a", source="hub", revision="v2"), "/cache/v2")}
    assert account_of(AdapterRef(adapter_id="org/b", source="hub"), "/cache/b") not in accounts
    assert account_weights(AdapterArgs(default_source="hub", weights={"org/a@main": 3.0}))[accounts.pop()] == 3.0


def test_a_merge_has_one_account_in_whatever_order_and_by_whatever_names(root: Path, tmp_path: Path) -> None:
    save_folder(root / "other", rank=4, seed=1)
    door = Door(AdapterArgs(local_roots=[root], default_source="local", weights={"mix": 3.0}), tmp_path / "cache")
    recipes = [(("v1", "other"), (1.0, 0.5)), (("other", "current"), (1.0, 1.0)), (("v1", "other", "v1"), (0.1, 0.2, 0.3))]
    arrived = [door.arrive("mix", merge=MergeRecipe(adapter_ids=ids, weights=weights)) for ids, weights in recipes]
    assert len({adapter_name(sequence.adapter) for sequence in arrived}) == 1
    assert {door.queue.weight_of(sequence) for sequence in arrived} == {3.0}
    assert adapter_name(door.arrive("v1").adapter) != adapter_name(arrived[0].adapter)
