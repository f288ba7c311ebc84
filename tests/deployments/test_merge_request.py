"""merged_adapters at the native doors: what reaches the backend, and what is refused. Its numbers are in tests/models/test_merging.py."""

import json
from typing import Any

import pytest

from loray.deployments.errors import InvalidRequest
from loray.deployments.native import NativeApi
from loray.deployments.request import AdapterRef, MergeRecipe
from tests.deployments.scripted_backend import post, run, saying, send, service_of

DOORS = ["/generate", "/generate_stream", "/", "/invocations", "/embed"]
TWO = {"ids": ["pirate", "org/poet"], "weights": [0.25, -1]}


def adapter_of(merged: dict[str, Any], door: str = "/generate", **parameters: Any) -> AdapterRef | None:
    backend = saying("x")
    response = post(backend, door, {"inputs": "hello", "parameters": {"merged_adapters": merged, **parameters}})
    assert response.status_code == 200, response.text
    return backend.requests[0].adapter


def recipe_of(merged: dict[str, Any]) -> MergeRecipe:
    adapter = adapter_of(merged)
    assert adapter is not None and adapter.merge is not None
    return adapter.merge


@pytest.mark.parametrize("door", DOORS)
def test_a_merge_reaches_the_backend_through_every_door(door: str) -> None:
    merged = {**TWO, "merge_strategy": "dare_ties", "density": 0.5, "majority_sign_method": "frequency"}
    recipe = MergeRecipe(
        adapter_ids=("pirate", "org/poet"), weights=(0.25, -1.0), strategy="dare_ties", density=0.5, majority_sign="frequency"
    )
    adapter = adapter_of(merged, door, adapter_source="local", api_token="t")
    assert adapter == AdapterRef(adapter_id="merge of pirate, org/poet", source="local", api_token="t", merge=recipe)


def test_what_lorax_clients_send_is_understood() -> None:
    """They always send every field; density too, which linear does not use."""
    nulls = {"merge_strategy": None, "majority_sign_method": None}
    assert recipe_of({**TWO, **nulls, "density": 0.0}) == MergeRecipe(adapter_ids=("pirate", "org/poet"), weights=(0.25, -1.0))
    adapter = adapter_of({**TWO, **nulls, "density": 0.5}, adapter_id=None, adapter_source=None, api_token=None)
    assert adapter is not None and (adapter.source, adapter.api_token) == ("", "")


def test_without_weights_each_adapter_counts_whole() -> None:
    assert recipe_of({"ids": ["a", "b", "c"]}).weights == (1.0, 1.0, 1.0)
    assert recipe_of({"ids": ["a"], "weights": None}).weights == (1.0,)


def test_an_empty_adapter_id_is_no_second_adapter() -> None:
    assert adapter_of(TWO, adapter_id="") is not None


def test_equal_merges_are_equal_recipes() -> None:
    assert recipe_of({**TWO, "density": 0.3, "majority_sign_method": "frequency"}) == recipe_of({**TWO, "merge_strategy": "linear"})
    pruned = {**TWO, "merge_strategy": "dare_linear", "density": 0.3}
    assert recipe_of({**pruned, "majority_sign_method": "frequency"}) == recipe_of(pruned)


def test_the_headers_name_every_adapter() -> None:
    response = post(saying("x"), "/generate", {"inputs": "hello", "parameters": {"merged_adapters": TWO, "adapter_source": "local"}})
    assert (response.headers["x-adapter-id"], response.headers["x-adapter-source"]) == ("pirate,org/poet", "local")


@pytest.mark.parametrize("door", DOORS)
def test_an_adapter_and_a_merge_exclude_each_other(door: str) -> None:
    backend = saying("x")
    response = post(backend, door, {"inputs": "hello", "parameters": {"merged_adapters": TWO, "adapter_id": "pirate"}})
    assert (response.status_code, response.json()["error_type"], backend.requests) == (422, "validation", [])
    assert "adapter_id" in response.json()["error"] and "merged_adapters" in response.json()["error"]


@pytest.mark.parametrize(
    ("field", "merged"),
    [
        ("ids", {}),
        ("ids", {"ids": [], "weights": []}),
        ("ids", {"ids": "pirate", "weights": [1]}),
        ("ids.1", {"ids": ["a", ""], "weights": [1, 1]}),
        ("ids.0", {"ids": ["\ud800"], "weights": [1]}),
        ("ids.0", {"ids": [None], "weights": [1]}),
        ("ids", {"ids": ["a"] * 17, "weights": [1] * 17}),
        ("weights", {"ids": ["a", "b"], "weights": [1]}),
        ("weights", {"ids": ["a"], "weights": []}),
        ("weights.0", {"ids": ["a"], "weights": ["1"]}),
        ("weights.0", {"ids": ["a"], "weights": [True]}),
        ("weights.1", {"ids": ["a", "b"], "weights": [1, float("nan")]}),
        ("weights.0", {"ids": ["a"], "weights": [float("-inf")]}),
        ("merge_strategy", {**TWO, "merge_strategy": "slerp"}),
        ("density", {**TWO, "merge_strategy": "ties"}),
        ("density", {**TWO, "merge_strategy": "dare_linear", "density": None}),
        ("density", {**TWO, "merge_strategy": "dare_ties", "density": 0}),
        ("density", {**TWO, "density": 1.1}),
        ("density", {**TWO, "merge_strategy": "ties", "density": -0.1}),
        ("majority_sign_method", {**TWO, "majority_sign_method": "count"}),
        ("wieghts", {"ids": ["a"], "wieghts": [1]}),
    ],
)
def test_a_wrong_merge_is_refused_by_field(field: str, merged: dict[str, Any]) -> None:
    backend = saying("x")
    body = {"inputs": "hello", "parameters": {"merged_adapters": merged}}
    for door in ("/generate", "/embed"):
        headers = {"Content-Type": "application/json"}
        response = send(service_of(backend), "POST", door, content=json.dumps(body), headers=headers)
        assert (response.status_code, response.json()["error_type"], backend.requests) == (422, "validation", [])
        assert f"merged_adapters.{field}:" in response.json()["error"]
    with pytest.raises(InvalidRequest, match="^merged_adapters"):
        run(NativeApi(service_of(backend)).generate(body))


def test_a_merge_may_have_sixteen_adapters() -> None:
    assert len(recipe_of({"ids": [f"adapter-{i}" for i in range(16)]}).adapter_ids) == 16
