"""Memory that grows while the host tier fills is told apart from memory that leaks."""

import pytest

from benchmarks.memory_watch import full_after, growth

TIMES = [5.0 * i for i in range(41)]  # seconds: 200 of them
FILLING = [min(10 * at, 900.0) for at in TIMES]  # MiB: full after 90 s


def test_the_tier_is_full_when_it_holds_nearly_the_most_it_ever_does() -> None:
    swinging = [held - (30 if i % 2 and held == 900 else 0) for i, held in enumerate(FILLING)]  # one goes before another comes
    assert full_after(FILLING, TIMES) == full_after(swinging, TIMES) == 90
    assert full_after([500.0] * len(TIMES), TIMES) == 0


@pytest.mark.parametrize("leak", [0.0, 6.0])  # MiB a minute
def test_growth_counts_from_when_the_tier_is_full(leak: float) -> None:
    rank = [(at, 500 + held + leak * at / 60) for at, held in zip(TIMES, FILLING, strict=True)]
    found = growth(rank, full_after(FILLING, TIMES))
    assert found["mib_per_minute"] == pytest.approx(leak, abs=0.01)
    assert found["settled_mib"] == pytest.approx(1400 + leak * 1.5, abs=0.1)


def test_too_few_samples_make_no_slope() -> None:
    assert growth(list(zip(TIMES, FILLING, strict=True)), TIMES[-2])["mib_per_minute"] is None
