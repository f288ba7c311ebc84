"""What the API's own description says of keys, headers and answers is what the server does."""

import functools
from typing import Any

import jsonschema
import pytest
from starlette.testclient import TestClient

from loray.deployments.errors import Overloaded, Unhealthy
from loray.deployments.http_app import make_app
from tests.deployments.scripted_backend import BASE, FACTS, ScriptedBackend, saying, send, service_of, status_of

KEYS = {"api_keys": {"inference": {"team-a": "sesame"}, "admin": "root"}}


@functools.cache
def description_of(has_keys: bool = False) -> dict[str, Any]:
    service = service_of(saying("x"), **(KEYS if has_keys else {}))
    described: dict[str, Any] = send(service, "GET", "/openapi.json", headers={"Authorization": "Bearer sesame"}).json()
    return described


def test_a_route_is_described_with_the_key_that_it_needs() -> None:
    description = description_of(has_keys=True)
    schemes = description["components"]["securitySchemes"]
    assert {(scheme["type"], scheme["scheme"]) for scheme in schemes.values()} == {("http", "bearer")}
    keys = {"inference_key": "sesame", "admin_key": "root"}
    assert schemes.keys() == keys.keys()
    with TestClient(make_app(service_of(saying("x"), **KEYS))) as client:
        for path, operations in description["paths"].items():
            for method, operation in operations.items():
                needed = [name for one in operation.get("security", []) for name in one]
                assert (client.request(method, path).status_code == 401) == bool(needed), f"{method} {path}"
                for name in needed:
                    opened = client.request(method, path, headers={"Authorization": f"Bearer {keys[name]}"})
                    assert opened.status_code != 401, f"{method} {path}"


def test_without_inference_keys_only_admins_are_said_to_need_one() -> None:
    description = description_of()
    assert description["components"]["securitySchemes"].keys() == {"admin_key"}
    secured = {path for path, methods in description["paths"].items() for method in methods.values() if "security" in method}
    assert secured == {path for path in description["paths"] if path.startswith("/admin/")}


def test_the_headers_of_a_native_answer_are_described_and_no_others() -> None:
    described = description_of()["paths"]
    body = {"inputs": "hello", "parameters": {"adapter_id": "pirate"}}
    whole = send(service_of(saying(" world")), "POST", "/generate", json=body).headers
    for path in ("/generate", "/", "/invocations", "/generate_stream"):
        names = {name.lower() for name in described[path]["post"]["responses"]["200"]["headers"]}
        assert names == {name for name in whole if name.startswith("x-")}, path
    embedded = send(service_of(saying("")), "POST", "/embed", json=body).headers
    names = {name.lower() for name in described["/embed"]["post"]["responses"]["200"]["headers"]}
    assert {name for name in embedded if name.startswith("x-")} <= names


@pytest.mark.parametrize("error", [Overloaded("full"), Unhealthy("no replica")])
@pytest.mark.parametrize(("path", "body"), [("/generate", {"inputs": "x"}), ("/v1/completions", {"model": BASE, "prompt": "x"})])
def test_the_headers_of_an_error_are_described(error: Exception, path: str, body: dict[str, Any]) -> None:
    response = send(service_of(ScriptedBackend([error])), "POST", path, json=body)
    described = description_of()["paths"][path]["post"]["responses"][str(response.status_code)]["headers"]
    assert {"X-Request-Id", "Retry-After"} <= described.keys() and "x-request-id" in response.headers
    assert int(response.headers["retry-after"]) >= 1, "0 would be: at once"


def assert_as_described(path: str, answer: Any) -> None:
    description = description_of()
    schema = description["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    jsonschema.validate(answer, {**schema, "components": description["components"]})


def test_info_and_the_list_of_adapters_have_the_shapes_that_are_described() -> None:
    backend = saying("x")
    backend.statuses = {"replica": [status_of("pirate", "gpu", last_used=1.5)]}
    service = service_of(backend, **KEYS)
    info = send(service, "GET", "/info", headers={"Authorization": "Bearer sesame"}).json()
    assert_as_described("/info", info)
    assert FACTS.items() <= info.items()
    listed = send(service, "GET", "/admin/adapters", headers={"Authorization": "Bearer root"}).json()
    assert_as_described("/admin/adapters", listed)
    with pytest.raises(jsonschema.ValidationError):
        assert_as_described("/info", {**info, "max_total_tokens": "many"})
    del listed["adapters"][0]["rank"]
    with pytest.raises(jsonschema.ValidationError):
        assert_as_described("/admin/adapters", listed)
