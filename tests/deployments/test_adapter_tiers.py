"""What is asked of adapters from outside, where reading them fails."""

import pytest

from loray.deployments.adapter_tiers import AdapterTiers
from loray.deployments.adapters import Adapter, AdapterTable
from loray.deployments.errors import AdapterFailed
from loray.deployments.host_tier import HostTier

PAGE = 10


def poet(signature: str) -> Adapter:
    return Adapter("poet", "version", "folder", num_pages=1, signature=signature)


@pytest.fixture
def tiers() -> AdapterTiers:
    """They have just failed to read it."""
    tiers = AdapterTiers(AdapterTable(4), HostTier(100, PAGE))
    failing = tiers.load(poet("before"))
    tiers.failed(failing.host_copy, "its files changed after they were checked")
    return tiers


def test_files_that_failed_a_moment_ago_are_not_read_again(tiers: AdapterTiers) -> None:
    with pytest.raises(AdapterFailed, match="changed after they were checked"):
        tiers.check(poet("before"))


def test_equal_files_that_were_written_again_are_read(tiers: AdapterTiers) -> None:
    tiers.check(poet("after"))
    assert tiers.load(poet("after")).host_copy.signature == "after"


def test_what_was_unloaded_is_read_again_at_once(tiers: AdapterTiers) -> None:
    tiers.unload("version")
    tiers.check(poet("before"))
