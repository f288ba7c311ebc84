from loray.deployments.adapter_records import AdapterRecord
from loray.deployments.adapter_sources import named, place_of
from loray.deployments.adapter_wishes import AdapterWishes
from loray.deployments.request import AdapterRef


def record(ref: AdapterRef, is_loaded: bool) -> AdapterRecord:
    return AdapterRecord(ref=ref, is_loaded=is_loaded, is_pinned=False, generation=0, number=1)


def test_a_download_is_wanted_as_long_as_one_of_its_ids_is() -> None:
    """A revision stands in the id or beside it."""
    inside, beside = AdapterRef(adapter_id="org/name@v1", source="hub"), AdapterRef(adapter_id="org/name", source="hub", revision="v1")
    wishes = AdapterWishes(lambda ref: named(ref, "local"), lambda ref: place_of(ref, "local").key)
    wishes.records = {"org/name@v1": record(inside, is_loaded=True)}
    assert wishes.is_place_wanted(beside) and not wishes.is_place_wanted(inside)
    assert not wishes.is_place_wanted(AdapterRef(adapter_id="org/name", source="hub", revision="v2"))
    wishes.records = {"org/name@v1": record(inside, is_loaded=False)}
    assert not wishes.is_place_wanted(beside)
