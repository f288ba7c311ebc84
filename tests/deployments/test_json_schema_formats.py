"""Formats of strings: what Python itself reads as such, and nothing longer or shorter than the schema says."""

import datetime
import ipaddress
import json
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import xgrammar

from loray.deployments.json_schema_formats import FORMATS
from loray.deployments.json_schema_values import string
from tests.deployments.tiny_grammars import vocabulary

READERS: dict[str, Callable[[str], Any]] = {
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "date-time": datetime.datetime.fromisoformat,
    "ipv4": ipaddress.IPv4Address,
    "uuid": uuid.UUID,
}
TAKEN = {
    "date": ["2024-02-28", "1999-12-31", "2023-04-30", "1000-01-01"],
    "time": ["00:00:00Z", "23:59:59.123456+23:59", "12:30:00-05:00"],
    "date-time": ["2024-02-28T23:59:59Z", "2023-12-31T00:00:00.5+01:00"],
    "ipv4": ["0.0.0.0", "255.255.255.255", "10.20.30.199"],
    "uuid": ["123e4567-e89b-12d3-a456-426614174000"],
}
REFUSED = {
    "date": ["2023-02-30", "0000-01-01", "2023-04-31", "2023-13-01", "2023-1-1", "02023-01-01"],
    "time": ["24:00:00Z", "12:60:00Z", "12:00:60Z", "12:00:00", "12:00:00.Z"],
    "date-time": ["2023-02-29T00:00:00Z", "2023-01-01 00:00:00Z", "2023-01-01T00:00:60Z"],
    "ipv4": ["01.2.3.4", "256.1.1.1", "1.2.3", "1.2.3.4.5"],
    "uuid": ["123e4567"],
}


@pytest.fixture(scope="module")
def compiler() -> xgrammar.GrammarCompiler:
    return xgrammar.GrammarCompiler(vocabulary(), max_threads=1, cache_enabled=False)


def is_taken(compiler: xgrammar.GrammarCompiler, schema: dict[str, Any], text: str) -> bool:
    written = json.dumps(string(schema, "$"))
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(written, any_whitespace=False), terminate_without_stop_token=True)
    return bool(matcher.accept_string(json.dumps(text))) and matcher.is_terminated()


@pytest.mark.parametrize("name", TAKEN)
def test_what_a_format_takes_python_reads_and_what_it_would_not_is_refused(compiler: xgrammar.GrammarCompiler, name: str) -> None:
    schema = {"type": "string", "format": name}
    for text in TAKEN[name]:
        READERS[name](text)
        assert is_taken(compiler, schema, text), text
        most = FORMATS[name].most
        assert most is not None and FORMATS[name].least <= len(text) <= most
    assert not any(is_taken(compiler, schema, text) for text in REFUSED[name])


@pytest.mark.parametrize("lengths", [{"minLength": 1}, {"minLength": 10, "maxLength": 10}, {"maxLength": 64}])
def test_a_format_stays_beside_lengths_that_it_has_anyway(lengths: dict[str, int]) -> None:
    assert string({"type": "string", "format": "date", **lengths}, "$") == string({"type": "string", "format": "date"}, "$")
    assert string({"type": "string", "format": "uri", "minLength": 1}, "$") == {"type": "string", "format": "uri"}


@pytest.mark.parametrize(
    "schema", [{"format": "date", "maxLength": 9}, {"format": "uri", "maxLength": 30}, {"format": "time", "minLength": 12}]
)
def test_lengths_that_do_not_follow_from_the_format_take_its_place(schema: dict[str, Any]) -> None:
    lengths = {name: value for name, value in schema.items() if name != "format"}
    assert string({"type": "string", **schema}, "$") == string({"type": "string", **lengths}, "$")


@pytest.mark.parametrize("name", ["colour", 5, None, ["date"]])
def test_other_formats_are_remarks(name: Any) -> None:
    assert string({"type": "string", "format": name}, "$") == {"type": "string"}
