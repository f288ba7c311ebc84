"""Keys of an adapter's config take the ends of modules' names as PEFT's regular expressions do, however many there are."""

import random
import re

import pytest

from loray.models.bounded_patterns import PatternBudget, PatternError
from loray.models.end_patterns import EndPatterns

BEFORE, AFTER = r"(.*\.)?(", ")$"
PARTS = [
    "layers",
    "1",
    "11",
    "q_proj",
    "k_proj",
    "q-proj",
    "mlp",
    "q.proj",
    "q_pro.",
    r"q\.proj",
    "(q|k)_proj",
    r"\d+",
    ".*",
    "proj",
    "_proj",
]


def end_patterns(patterns: list[str], seconds: float = 5.0) -> EndPatterns:
    budget = PatternBudget(seconds)
    return EndPatterns(patterns, lambda pattern: budget.compile(pattern, BEFORE, AFTER), budget)


def test_the_first_that_matches_is_that_of_python() -> None:
    draw = random.Random(0)
    names = [".".join(draw.choices(PARTS[:7], k=draw.randint(1, 4))) for _ in range(60)]
    num_found = 0
    for _ in range(300):
        patterns = list(dict.fromkeys(".".join(draw.choices(PARTS, k=draw.randint(1, 3))) for _ in range(draw.randint(1, 6))))
        found = end_patterns(patterns)
        for name in names:
            expected = next((n for n, pattern in enumerate(patterns) if re.match(f"{BEFORE}{pattern}{AFTER}", name)), None)
            assert found.first(name) == expected, (patterns, name)
            num_found += expected is not None
    assert num_found > 1000


def test_a_name_for_every_module_of_a_large_model_takes_hardly_any_time() -> None:
    names = [
        f"model.layers.{layer}.self_attn.{linear}_proj" for layer in range(126) for linear in ("q", "k", "v", "o", "gate", "up", "down")
    ]
    found = end_patterns(names, seconds=0.2)  # as regular expressions they took some seconds
    assert [found.first(name) for name in names] == list(range(len(names)))


def test_names_made_to_take_long_use_the_budget_up() -> None:
    names = ["a" * (1 + number % 64) + "." + "b" * (1 + number // 64) for number in range(4096)]
    found = end_patterns(names, seconds=0.05)
    with pytest.raises(PatternError, match="too long"):
        for _ in range(1000):
            found.first(f"x.{'a' * 64}.{'b' * 64}")
