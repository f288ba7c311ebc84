"""One application for all tests of the HTTP contract, and what transformers says about it. It lives as long as this folder's tests run."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import App
from tests.e2e.oracle import Oracle
from tests.otlp_collector import Collector, collecting


@pytest.fixture(scope="package")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="package")
def app(start_app: Callable[..., Any], tiny_model: Path, tiny_adapters: Path, collector: Collector) -> Iterator[App]:
    settings = {"grammars": {"compile_timeout_s": 3}, "tracing": {"otlp_endpoint": collector.endpoint}}
    with start_app("contract", model={"id": str(tiny_model)}, adapters={"local_roots": [tiny_adapters]}, **settings) as app:
        yield app


@pytest.fixture(scope="package")
def oracle(tiny_model: Path, tiny_adapters: Path) -> Oracle:
    return Oracle(tiny_model, {name: tiny_adapters / name for name in ("a4", "a8")})
