"""How errors look on the wire: the native shape, and OpenAI's under /v1. Raises nothing, decides no outcome but the status."""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse

from loray.deployments import request_log
from loray.deployments.errors import (
    AdapterNotFound,
    DeadlineExceeded,
    InvalidRequest,
    LorayError,
    Overloaded,
    TemplateError,
    TooLarge,
    ToolError,
    TooSlow,
    Unauthorized,
    Unhealthy,
)

UNION_TAGS = {"str", "int", "float", "bool", "list", "dict"}  # how pydantic names the branches of a union in a location
PARAMETERS = "parameters"  # of native requests: LoRAX names its fields without it; of an unknown one it says where it stands
MAX_ERRORS = 10  # of one request, that are told
MAX_NAME_CHARS = 200  # a field's name may be the caller's own, and so may be part of a reason
MAX_REASON_CHARS = 1000


class NativeError(BaseModel):
    error: str
    error_type: str


OPENAI_FIELDS = {"message": {"type": "string"}, "type": {"type": "string"}, "param": {"type": ["string", "null"]}}
OPENAI_FIELDS |= {"code": {"type": ["string", "null"]}}
OPENAI_SCHEMA = {
    "type": "object",
    "properties": {"error": {"type": "object", "properties": OPENAI_FIELDS, "required": [*OPENAI_FIELDS]}},
    "required": ["error"],
}


def native_body(error: LorayError) -> dict[str, Any]:
    return {"error": error.message, "error_type": error.error_type}


def openai_body(error: LorayError) -> dict[str, Any]:
    kind, code, param = "server_error", None, None
    if isinstance(error, InvalidRequest):
        kind, param = "invalid_request_error", error.param
        code = error.error_type if isinstance(error, TemplateError | ToolError) else None
    elif isinstance(error, AdapterNotFound):
        kind, code, param = "invalid_request_error", "model_not_found", "model"
    elif isinstance(error, Unauthorized):
        kind, code = "invalid_request_error", "invalid_api_key"
    elif isinstance(error, Overloaded):
        kind, code = "overloaded", "rate_limit_exceeded"
    elif isinstance(error, TooLarge | TooSlow):
        kind = "invalid_request_error"
    elif error.status < 500:
        kind, param = error.error_type, "model"
    return {"error": {"message": error.message, "type": kind, "param": param, "code": code}}


def openai_status(error: LorayError) -> int:
    if isinstance(error, InvalidRequest):
        return 400
    return 404 if isinstance(error, AdapterNotFound) else error.status


def is_openai(request: Request) -> bool:
    return request.url.path.removeprefix(request.scope.get("root_path", "")).startswith("/v1/")


def response(request: Request, error: LorayError) -> JSONResponse:
    request_log.add_failure(error.error_type)
    if is_openai(request):
        return JSONResponse(openai_body(error), openai_status(error), _headers(error))
    return JSONResponse(native_body(error), error.status, _headers(error))


def _headers(error: LorayError) -> dict[str, str]:
    if isinstance(error, Overloaded | Unhealthy):
        return {"Retry-After": str(error.retry_after)}
    if isinstance(error, TooLarge | TooSlow):
        return {"Connection": "close"}  # what is left of the body is no next request
    if isinstance(error, DeadlineExceeded) or isinstance(error.__cause__, DeadlineExceeded):
        return {"x-should-retry": "false"}  # OpenAI's client would start it twice more, only to run out of time again
    return {"WWW-Authenticate": "Bearer"} if isinstance(error, Unauthorized) else {}


def invalid_request(errors: Iterable[Mapping[str, Any]]) -> InvalidRequest:
    """Of pydantic's errors: the first fields that are wrong, and why. The first is the `param`."""
    reasons: dict[str, str] = {}
    for error in _of_best_branches(list(islice(errors, MAX_ERRORS))):
        reasons.setdefault(_field(error), _reason(error))
    message = "; ".join(f"{name}: {reason}" if name else reason for name, reason in reasons.items())
    return InvalidRequest(message, param=next(iter(reasons)) or None)


def _of_best_branches(errors: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of a value that fits no branch of its union: what one branch says. That is one that finds more wrong than a type, or else the one
    that went furthest into the value."""
    places = [_branch(error) for error in errors]
    best: dict[tuple[Any, ...], tuple[bool, tuple[int, ...]]] = {}
    chosen: dict[tuple[Any, ...], str] = {}
    for error, (union, branch, way) in zip(errors, places, strict=True):
        merit = not error["type"].endswith("_type"), way
        if union not in best or merit > best[union]:
            best[union], chosen[union] = merit, branch
    return [error for error, (union, branch, _) in zip(errors, places, strict=True) if branch == chosen[union]]


def _branch(error: Mapping[str, Any]) -> tuple[tuple[Any, ...], str, tuple[int, ...]]:
    """The place of the union that it is of, the branch, "" for none, and the places in lists from there on."""
    path = error["loc"][:-1] if error["type"] == "extra_forbidden" else error["loc"]
    for place, part in enumerate(path):
        if _is_union_tag(str(part)):
            return path[:place], str(part), tuple(step if isinstance(step, int) else 0 for step in path[place + 1 :])
    return path, "", ()


def _field(error: Mapping[str, Any]) -> str:
    *path, last = [str(part) for part in error["loc"]] or [""]
    parts = [part for part in path if not _is_union_tag(part)]
    if error["type"] == "extra_forbidden" or not _is_union_tag(last):
        parts.append(last)
    if parts[0] == PARAMETERS and len(parts) > (2 if error["type"] == "extra_forbidden" else 1):
        parts = parts[1:]
    return _shortened(".".join(parts), MAX_NAME_CHARS).encode("utf-8", "backslashreplace").decode()  # an unknown one may be anything


def _is_union_tag(part: str) -> bool:
    return part in UNION_TAGS or "[" in part


def _reason(error: Mapping[str, Any]) -> str:
    if error["type"] == "extra_forbidden":
        return "unknown field"
    if error["type"] == "value_error":
        return _shortened(str(error["ctx"]["error"]), MAX_REASON_CHARS)
    return _shortened(error["msg"][0].lower() + error["msg"][1:], MAX_REASON_CHARS)


def _shortened(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else text[:max_chars] + "…"
