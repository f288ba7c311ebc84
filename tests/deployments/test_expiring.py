from loray.deployments.expiring import Expiring


def test_an_entry_ends_after_its_lifetime() -> None:
    now = [0.0]
    memory: Expiring[str, int] = Expiring(lifetime_s=10, max_entries=100, clock=lambda: now[0])
    memory.put("a", 1)
    now[0] = 9.9
    assert memory.get("a") == 1
    now[0] = 10.0
    assert memory.get("a") is None


def test_the_oldest_go_when_there_are_too_many_and_ended_ones_go_with_the_next() -> None:
    now = [0.0]
    memory: Expiring[int, int] = Expiring(lifetime_s=10, max_entries=100, clock=lambda: now[0])
    for i in range(10_000):
        memory.put(i, i)
    assert len(memory) == 100 and memory.get(9_900) == 9_900 and memory.get(9_899) is None
    now[0] = 20.0
    memory.put(0, 0)
    assert len(memory) == 1


def test_entries_can_be_dropped() -> None:
    memory: Expiring[str, int] = Expiring(lifetime_s=10, max_entries=100)
    memory.put("a", 1)
    memory.put("b", 2)
    memory.drop(lambda key: key == "a")
    assert memory.get("a") is None and memory.get("b") == 2
