"""Every error a caller can see. One handler in the ingress maps them to HTTP.

LorayError
├── InvalidRequest       422 validation             the caller's mistake; says which field and why (400 on /v1)
│   ├── TemplateError    422 template_error         the chat template can't write these messages
│   │   └── MissingTemplateVariable  422 missing_template_variable  it names a variable that the request doesn't have
│   ├── GrammarFailed    422 validation             the grammar leads nowhere or takes too long; ingress says which field asked for it
│   └── ToolError        422 tool_error             the tools, or the choice among them, can't be used
├── Unauthorized         401 unauthorized           the API key is missing or wrong
├── Forbidden            403 forbidden              this server has no admin key, so nobody is an admin
├── AdapterFailed        424 generation             the adapter can't be used; says which and why
│   ├── AdapterChanged   424 generation             its files were replaced again and again while they were read
│   ├── TemplateOutdated 424 generation             it was replaced, again and again, since its chat template was read
│   ├── SourceFailed     424 generation             its source does not answer, whoever asks
│   └── AdapterNotFound  424 generation             (404 model_not_found on /v1)
│       └── UnknownAdapter  404 not_found           an admin asks for an adapter that this server does not know
├── TooLarge             413 too_large              the body has more bytes than limits.max_body_bytes
├── TooSlow              408 too_slow               the body was not whole within limits.body_timeout_s
├── Overloaded           429 overloaded             the queue, or the disk for adapters, is full; try again after `retry_after` seconds
├── Incomplete           500 incomplete_generation  accepted, but could not be finished
├── DeadlineExceeded     500 incomplete_generation  accepted, but not finished in limits.request_timeout_s
├── EmbeddingFailed      500 embedding_failure      the same of an embedding
└── Unhealthy            503 healthcheck            no tokens can be made now; try again after `retry_after` seconds
"""

from typing import ClassVar


class LorayError(Exception):
    status: ClassVar[int] = 500
    error_type: ClassVar[str] = "incomplete_generation"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequest(LorayError):
    status = 422
    error_type = "validation"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param  # the field


class TemplateError(InvalidRequest):
    error_type = "template_error"


class MissingTemplateVariable(TemplateError):
    error_type = "missing_template_variable"


class GrammarFailed(InvalidRequest):
    """Met by a rank, among the tokens of an answer."""


class ToolError(InvalidRequest):
    error_type = "tool_error"


class Unauthorized(LorayError):
    status = 401
    error_type = "unauthorized"


class Forbidden(LorayError):
    status = 403
    error_type = "forbidden"


class AdapterFailed(LorayError):
    status = 424
    error_type = "generation"


class AdapterNotFound(AdapterFailed):
    pass


class SourceFailed(AdapterFailed):
    """Says nothing of the adapter, not even whether it is there."""


class AdapterChanged(AdapterFailed):
    """While its files were read. Who has no token yet is served in the version that is there now."""


class TemplateOutdated(AdapterFailed):
    """The prompt is of another version's template than the version that is served now. Ingress writes it anew."""


class UnknownAdapter(AdapterNotFound):
    status = 404
    error_type = "not_found"


class TooLarge(LorayError):
    status = 413
    error_type = "too_large"


class TooSlow(LorayError):
    status = 408
    error_type = "too_slow"


class Overloaded(LorayError):
    status = 429
    error_type = "overloaded"
    retry_after: ClassVar[int] = 1  # seconds


class Incomplete(LorayError):
    pass


class DeadlineExceeded(LorayError):
    """Says how far it was; ingress says of which limit."""


class EmbeddingFailed(LorayError):
    error_type = "embedding_failure"


class Unhealthy(LorayError):
    status = 503
    error_type = "healthcheck"
    retry_after: ClassVar[int] = 5  # seconds; a lost replica is built anew in more


_ADAPTER_ERRORS = AdapterFailed, AdapterNotFound, AdapterChanged, TemplateOutdated, SourceFailed
_OVER_THE_WIRE = InvalidRequest, GrammarFailed, *_ADAPTER_ERRORS, Overloaded, Incomplete, DeadlineExceeded, Unhealthy
_BY_NAME: dict[str, type[LorayError]] = {kind.__name__: kind for kind in _OVER_THE_WIRE}


def from_wire(name: str, message: str) -> LorayError:
    """The error that crossed a process as (class name, message)."""
    return _BY_NAME.get(name, Incomplete)(message)
