"""What the description says of the OpenAI API's errors is what it answers."""

from typing import Any

from loray.deployments.error_shapes import OPENAI_SCHEMA
from tests.deployments.scripted_backend import saying, send, service_of


def errors_of(path: str, description: dict[str, Any]) -> dict[str, Any]:
    """By status, of all its methods."""
    responses = [operation["responses"] for operation in description["paths"][path].values()]
    return {status: told for one in responses for status, told in one.items() if status != "200"}


def test_a_bad_parameter_is_400_under_v1_and_no_422_is_told_of() -> None:
    service = service_of(saying("x"))
    description = send(service, "GET", "/openapi.json").json()
    paths = [path for path in description["paths"] if path.startswith("/v1/")]
    assert len(paths) >= 5
    assert [path for path in paths if "422" in errors_of(path, description)] == []
    assert "422" in errors_of("/generate", description)
    assert send(service, "POST", "/v1/completions", json={"model": "", "prompt": "x", "max_tokens": "many"}).status_code == 400


def test_all_errors_under_v1_have_the_one_shape_of_openai() -> None:
    description = send(service_of(saying("x")), "GET", "/openapi.json").json()
    errors = [told for path in description["paths"] if path.startswith("/v1/") for told in errors_of(path, description).values()]
    assert len(errors) > 20
    assert all(told["content"]["application/json"]["schema"] == OPENAI_SCHEMA for told in errors)
