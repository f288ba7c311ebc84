"""Large bodies: read without the collector of cycles, and refused before all of them is looked at."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from loray.deployments.json_route import LARGE_BYTES, read_json
from loray.deployments.native_request import MAX_SCHEMA_PARTS
from loray.deployments.openai_messages import MAX_PARTS
from tests.deployments.scripted_backend import BASE, post, saying

LARGE = b"[" + b"[]," * LARGE_BYTES + b"[]]"


@pytest.fixture
def collections() -> Iterator[list[str]]:
    """Every time that the collector begins or ends its work."""
    phases: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        phases.append(phase)

    gc.callbacks.append(note)
    yield phases
    gc.callbacks.remove(note)


def test_the_collector_rests_while_a_large_body_is_read_and_works_again(collections: list[str]) -> None:
    gc.collect()
    collections.clear()
    assert len(read_json(LARGE)) == LARGE_BYTES + 1
    during = list(collections)
    assert gc.isenabled() and not during
    with pytest.raises(ValueError, match="delimiter"):
        read_json(LARGE[:-1])
    assert gc.isenabled()


def test_a_process_without_a_collector_stays_so() -> None:
    gc.disable()
    try:
        read_json(LARGE)
        assert not gc.isenabled()
    finally:
        gc.enable()


def chat(**fields: Any) -> Any:
    return post(saying("x"), "/v1/chat/completions", {"model": BASE, **fields})


def test_a_message_has_a_limit_of_parts() -> None:
    part = {"type": "text", "text": "a"}
    answers = [chat(messages=[{"role": "user", "content": [part] * count}]) for count in (20, MAX_PARTS + 1)]
    assert [answer.status_code for answer in answers] == [200, 400]
    assert f"more than {MAX_PARTS}" in answers[1].json()["error"]["message"]


@pytest.mark.parametrize("shape", ["wide", "of many levels"])
def test_a_schema_has_a_limit_of_values_at_all_depths(shape: str) -> None:
    wide = {str(i): [] for i in range(MAX_SCHEMA_PARTS + 1)}
    levels = {str(i): {str(j): 0 for j in range(300)} for i in range(MAX_SCHEMA_PARTS // 300 + 1)}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": wide if shape == "wide" else levels}}
    answer = chat(messages=[{"role": "user", "content": "a"}], response_format=wanted)
    assert answer.status_code == 400 and f"more than {MAX_SCHEMA_PARTS} values" in answer.json()["error"]["message"]
