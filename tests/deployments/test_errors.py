from loray.deployments.errors import AdapterFailed, from_wire


def test_what_is_wrong_with_an_adapter_is_the_same_on_the_other_side_of_a_process() -> None:
    for kind in (AdapterFailed, *AdapterFailed.__subclasses__()):
        assert type(from_wire(kind.__name__, "why")) is kind
