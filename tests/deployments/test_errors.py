from loray.deployments.errors import AdapterFailed, from_wire


def test_what_is_wrong_with_an_adapter_is_the_same_on_the_other_side_of_a_process() -> None:
    ours = [kind for kind in AdapterFailed.__subclasses__() if kind.__module__ == AdapterFailed.__module__]  # Ray makes more as it runs
    for kind in (AdapterFailed, *ours):
        assert type(from_wire(kind.__name__, "why")) is kind
