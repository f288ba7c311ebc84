"""What happens around every HTTP request: its id, the API key, the limits, and at the end a count, a line in the log and a span.
Knows no bodies."""

import hmac
import logging
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loray.deployments import request_log, trace_context
from loray.deployments.config import ApiKeyArgs
from loray.deployments.error_shapes import response
from loray.deployments.errors import Forbidden, Incomplete, LorayError, Overloaded, TooLarge, Unauthorized
from loray.deployments.metrics import Metrics
from loray.deployments.request_spans import RequestSpans

logger = logging.getLogger(__name__)

HEALTH_CHECKS = {"/", "/health", "/ping", "/startup"}  # GET and HEAD only: POST / generates
LOOKING = ("GET", "HEAD")
UNCOUNTED = HEALTH_CHECKS | {"/metrics"}  # must be answered just when the server is full
CLIENT_GONE = "499"
ADMIN = "/admin"
REQUEST_ID = "x-request-id"


class KeyCheck:
    """Before routing, so that without the key nothing is learnt. Neither kind of key opens the other's doors."""

    def __init__(self, app: ASGIApp, keys: ApiKeyArgs) -> None:
        self._app = app
        self._inference = keys.named
        self._admin = {} if keys.admin is None else {"admin": keys.admin}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(Request(scope)) if scope["type"] == "http" else None
        if error:
            await response(Request(scope), error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, request: Request) -> LorayError | None:
        path = routed_path(request.scope)
        is_admin = path == ADMIN or path.startswith(f"{ADMIN}/")
        keys = self._admin if is_admin else self._inference
        if is_admin and not keys:
            return Forbidden("this server has no admin key: set api_keys.admin in its config to use /admin")
        if not keys or (request.method in LOOKING and path in HEALTH_CHECKS):
            return None
        name = _key_name(request, keys)
        if name is None:
            needed = "admin key (api_keys.admin)" if is_admin else "API key"
            return Unauthorized(f"the Authorization header must be 'Bearer <key>' with this server's {needed}")
        note = request_log.current()
        if note:
            note.key_name = name
        return None


def _key_name(request: Request, keys: dict[str, str]) -> str | None:
    """Compares with every key, so that the time it takes tells nothing."""
    scheme, _, sent = request.headers.get("authorization", "").partition(" ")
    found = None
    for name, key in keys.items():
        if hmac.compare_digest(sent.strip().encode(), key.encode()) and scheme.lower() == "bearer":
            found = name
    return found


def routed_path(scope: Scope) -> str:
    """The path as the routes see it: without the prefix that the application is mounted at."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path.removeprefix(root) if f"{path}/".startswith(f"{root}/") else path


class Limits:
    """Refuses a body that is too large before it is read whole, and more requests than this replica may hold."""

    def __init__(self, app: ASGIApp, max_body_bytes: int, max_concurrent_requests: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._max_requests = max_concurrent_requests
        self._num_requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (scope["method"] in LOOKING and routed_path(scope) in UNCOUNTED):
            await self._app(scope, receive, send)
            return
        error = self._refusal(Headers(scope=scope))
        if error:
            await response(Request(scope), error)(scope, receive, send)
            return
        self._num_requests += 1
        try:
            await self._app(scope, self._counted(receive), send)
        finally:
            self._num_requests -= 1

    def _refusal(self, headers: Headers) -> LorayError | None:
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_body_bytes:
            return self._too_large()
        if self._num_requests >= self._max_requests:
            return Overloaded(f"{self._num_requests} requests are under way already (limits.max_concurrent_requests); try again")
        return None

    def _counted(self, receive: Receive) -> Receive:
        num_bytes = 0

        async def receive_and_count() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                error = self._too_large()
                raise HTTPException(error.status, error.message)  # the one kind that FastAPI lets through while it reads
            return message

        return receive_and_count

    def _too_large(self) -> TooLarge:
        return TooLarge(f"the body has more than {self._max_body_bytes} bytes (limits.max_body_bytes)")


class RequestRecord:
    """Outermost: refusals and bugs are recorded too. An answer that has not begun when a bug comes up is a plain 500."""

    def __init__(self, app: ASGIApp, metrics: Metrics, spans: RequestSpans | None, answers_id: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._spans = spans
        self._answers_id = answers_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        headers = Headers(scope=scope)
        trace = trace_context.received(headers.getlist("traceparent"), headers.getlist("tracestate"))
        note = request_log.begin(headers.get(REQUEST_ID, ""), trace)
        span = self._spans.begin(note) if self._spans else None
        status = CLIENT_GONE

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
                if self._answers_id:
                    MutableHeaders(scope=message)[REQUEST_ID] = note.request_id
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except Exception:
            logger.exception("request %s: %s %s failed", note.request_id, scope["method"], scope["path"])
            if status != CLIENT_GONE:
                raise
            await response(Request(scope), Incomplete("internal error"))(scope, receive, send_and_note)
        finally:
            route = getattr(scope.get("route"), "path", "unknown")  # unknown paths share one label, or a scanner could fill the memory
            self._metrics.observe_request(note, route, status)
            request_log.tell(note, route, status, time.monotonic() - started)
            if self._spans and span:
                self._spans.end(span, note, route, status)
