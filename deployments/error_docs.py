"""Which errors each kind of route may answer, as OpenAPI shows them. Documentation: the answers are made in error_shapes, and what the
guards in front of the routes answer is added in api_docs."""

from typing import Any

from loray.deployments.error_shapes import OPENAI_SCHEMA, NativeError

Docs = dict[int | str, dict[str, Any]]

TEXTS = {
    400: "the request is wrong; says which field and why",
    401: "the API key is missing or wrong",
    403: "this server has no admin key",
    404: "there is no such model or adapter",
    408: "the body did not come in time",
    413: "the body is too large",
    422: "the request is wrong; says which field and why",
    424: "the adapter can't be used; says which and why",
    429: "too many requests; try again after Retry-After seconds",
    500: "accepted, but could not be finished",
    503: "no tokens can be made now; try again after Retry-After seconds",
}
NATIVE_SCHEMA = NativeError.model_json_schema()


def native_errors(*statuses: int) -> Docs:
    return {status: error_doc(status, NATIVE_SCHEMA) for status in statuses}


def openai_errors(*statuses: int) -> Docs:
    return {status: error_doc(status, OPENAI_SCHEMA) for status in statuses}


def error_doc(status: int, schema: dict[str, Any]) -> dict[str, Any]:
    """With the schema itself: as a model it would cost a second at the start."""
    return {"description": TEXTS[status], "content": {"application/json": {"schema": schema}}}


# What the routes themselves answer.
HEALTH = native_errors(503)
NATIVE_MODEL = native_errors(422, 424, 429, 500, 503)  # of those that ask the model
NATIVE_TEXT = native_errors(422)  # of those that look at a text alone
OPENAI_MODEL = openai_errors(400, 404, 424, 429, 500, 503)
OPENAI_LIST = openai_errors(500, 503)
OPENAI_ENTRY = openai_errors(404, 500, 503)
ADMIN_LIST = native_errors(422, 500, 503)
ADMIN_LOAD = native_errors(422, 424, 500, 503)
ADMIN_ENTRY = native_errors(404, 500, 503)
ADMIN_CHANGE = native_errors(404, 424, 500, 503)  # of those that wait until an adapter is there
