"""The order of the tests: those that need a Ray cluster come last, so that it does not take CPU from the others."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: "e2e" in item.path.parts)
