"""What OpenAPI says of the routes beside their shapes: keys, headers, and what FastAPI gets wrong. Documentation: enforces nothing."""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict

from loray.deployments.admin import STATUS_SCHEMAS
from loray.deployments.config import ApiKeyArgs
from loray.deployments.error_docs import native_errors, openai_errors
from loray.deployments.middleware import ADMIN, HEALTH_CHECKS, LOOKING, PROBES

INFERENCE_KEY, ADMIN_KEY = "inference_key", "admin_key"
SCHEMES: dict[str, dict[str, str]] = {
    INFERENCE_KEY: {"type": "http", "scheme": "bearer", "description": "one of api_keys.inference"},
    ADMIN_KEY: {"type": "http", "scheme": "bearer", "description": "api_keys.admin"},
}
REQUEST_ID = {"X-Request-Id": {"description": "as it was sent, or made", "schema": {"type": "string"}}}
RETRY_AFTER = {"Retry-After": {"description": "seconds to wait before the next try", "schema": {"type": "integer"}}}
ERROR_HEADERS: dict[str, dict[str, Any]] = {  # by status
    "401": {"WWW-Authenticate": {"description": "Bearer", "schema": {"type": "string"}}},
    "429": RETRY_AFTER,
    "500": {"x-should-retry": {"description": "false where the time ran out", "schema": {"type": "string"}}},
    "503": RETRY_AFTER,
}
FASTAPI_ERRORS = ("HTTPValidationError", "ValidationError")


class Info(BaseModel):
    """The model and the limits, and more about how it runs."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model_id: str
    model_sha: str | None
    model_dtype: str
    model_device_type: str
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_length: int
    max_total_tokens: int
    max_batch_total_tokens: int
    pooling: str
    tensor_parallel_size: int
    adapter_roots: int
    version: str


def complete_docs(app: FastAPI, keys: ApiKeyArgs) -> None:
    describe = app.openapi
    schemes = {name: scheme for name, scheme in SCHEMES.items() if name == ADMIN_KEY or keys.named}

    def openapi() -> dict[str, Any]:
        description = describe()
        components = description["components"]
        components["securitySchemes"] = schemes
        components["schemas"] |= STATUS_SCHEMAS
        for name in FASTAPI_ERRORS:
            components["schemas"].pop(name, None)
        for path, operations in description["paths"].items():
            for method, operation in operations.items():
                key = _key_of(method, path)
                if key in schemes:
                    operation["security"] = [{key: []}]
                has_key = keys.admin is not None if key == ADMIN_KEY else key in schemes
                _complete(operation, path, _guard_statuses(method, path, "requestBody" in operation, has_key))
        return description

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to change the description


def _key_of(method: str, path: str) -> str:
    """As KeyCheck asks for it; "" = none."""
    if path.startswith(ADMIN):
        return ADMIN_KEY
    return "" if method.upper() in LOOKING and path in HEALTH_CHECKS else INFERENCE_KEY


def _guard_statuses(method: str, path: str, has_body: bool, has_key: bool) -> list[int]:
    """What KeyCheck and Limits may answer before the route is reached, or while it reads."""
    statuses = [401] if has_key else [403] if path.startswith(ADMIN) else []
    if method.upper() not in LOOKING or path not in PROBES:
        statuses += [413] if path.startswith(ADMIN) else [413, 429]
    return [*statuses, 408] if has_body else statuses


def _complete(operation: dict[str, Any], path: str, guard_statuses: list[int]) -> None:
    told = {status: response for status, response in operation["responses"].items() if not _is_fastapis(response)}
    guards = (openai_errors if path.startswith("/v1/") else native_errors)(*guard_statuses)
    operation["responses"] = responses = dict(sorted(({str(status): doc for status, doc in guards.items()} | told).items()))
    for status, response in responses.items():
        response["headers"] = {**response.get("headers", {}), **REQUEST_ID, **ERROR_HEADERS.get(status, {})}


def _is_fastapis(response: dict[str, Any]) -> bool:
    """It tells of a 422 in a shape of its own wherever a route has parameters, though any text may be a path, and /v1 answers 400."""
    schema = response.get("content", {}).get("application/json", {}).get("schema", {})
    return schema.get("$ref", "").rpartition("/")[2] in FASTAPI_ERRORS
