"""What happens around every HTTP request: its id, the API key, the limits, and at the end a count, a line in the log and a span.
Knows no bodies."""

import asyncio
import hmac
import logging
import time
from collections.abc import Sequence
from operator import itemgetter

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loray.deployments import request_log, trace_context
from loray.deployments.config import ApiKeyArgs, LimitArgs
from loray.deployments.error_shapes import response
from loray.deployments.errors import Forbidden, Incomplete, LorayError, Overloaded, TooLarge, TooSlow, Unauthorized
from loray.deployments.log_line import log_line
from loray.deployments.metrics import Metrics
from loray.deployments.request_spans import RequestSpans

logger = logging.getLogger(__name__)

HEALTH_CHECKS = {"/", "/health", "/ping", "/startup"}  # GET and HEAD only: POST / generates
LOOKING = ("GET", "HEAD")
PROBES = HEALTH_CHECKS | {"/metrics"}  # asked all the time; must be answered just when the server is full
CLIENT_GONE = "499"
ADMIN = "/admin"
REQUEST_ID = "x-request-id"


class PrefixIsRoot:
    """The application's prefix without a slash at its end is its root too: there post clients that know no path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == scope.get("root_path", ""):
            scope = {**scope, "path": f"{scope['path']}/"}
        await self._app(scope, receive, send)


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
        path, is_admin = routed_path(request.scope), is_of_admin(request.scope)
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


def is_probe(scope: Scope) -> bool:
    return scope["method"] in LOOKING and routed_path(scope) in PROBES


def is_of_admin(scope: Scope) -> bool:
    return f"{routed_path(scope)}/".startswith(f"{ADMIN}/")


class Limits:
    """Refuses a body that is too large before it is read whole, one that does not come, and more requests than this replica may hold."""

    def __init__(self, app: ASGIApp, limits: LimitArgs) -> None:
        self._app = app
        self._max_body_bytes = int(limits.max_body_bytes)
        self._body_timeout_s = min(limits.body_timeout_s, limits.request_timeout_s or limits.body_timeout_s)
        self._max_requests = limits.max_concurrent_requests
        self._num_requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_probe(scope):
            await self._app(scope, receive, send)
            return
        error = self._refusal(scope)
        if error:
            await response(Request(scope), error)(scope, receive, send)
            return
        self._num_requests += 1
        try:
            await self._app(scope, self._bounded(receive), send)
        finally:
            self._num_requests -= 1

    def _refusal(self, scope: Scope) -> LorayError | None:
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_body_bytes:
            return self._too_large()
        if self._num_requests >= self._max_requests and not is_of_admin(scope):  # who has that key may end what fills the server
            return Overloaded(f"{self._num_requests} requests are under way already (limits.max_concurrent_requests); try again")
        return None

    def _bounded(self, receive: Receive) -> Receive:
        """Raises HTTPException, the one kind that FastAPI lets through while it reads."""
        num_bytes = 0
        until: float | None = asyncio.get_running_loop().time() + self._body_timeout_s  # None = the body is whole

        async def receive_in_bounds() -> Message:
            nonlocal num_bytes, until
            try:
                async with asyncio.timeout_at(until):
                    message = await receive()
            except TimeoutError as error:
                reason = f"the body was not whole after {self._body_timeout_s:g} s (limits.body_timeout_s, limits.request_timeout_s)"
                raise HTTPException(TooSlow.status, reason) from error
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise HTTPException(TooLarge.status, self._too_large().message)
            until = until if message.get("more_body") else None
            return message

        return receive_in_bounds

    def _too_large(self) -> TooLarge:
        return TooLarge(f"the body has more than {self._max_body_bytes} bytes (limits.max_body_bytes)")


class LastResort:
    """An answer that has not begun when a bug comes up is a plain 500. Within CORS, so that pages may read it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def send_and_note(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except Exception:
            if scope["type"] != "http":
                raise
            note = request_log.current()
            fields = {"id": note.request_id if note else "", "method": scope["method"], "path": scope["path"]}
            logger.exception("%s", log_line("failed", fields))
            if has_begun:
                raise
            await response(Request(scope), Incomplete("internal error"))(scope, receive, send)


class RequestRecord:
    """Outermost: refusals and bugs are recorded too. `routes`: all that the application has."""

    def __init__(self, app: ASGIApp, metrics: Metrics, spans: RequestSpans | None, answers_id: bool, routes: Sequence[Route]) -> None:
        self._app = app
        self._routes = routes
        self._metrics = metrics
        self._spans = spans
        self._answers_id = answers_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        trace = trace_context.received(headers.getlist("traceparent"), headers.getlist("tracestate"))
        note = request_log.begin(headers.get(REQUEST_ID, ""), trace)
        span = self._spans.begin(note) if self._spans and not is_probe(scope) else None
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
        finally:
            route = self._route(scope)
            self._metrics.observe_request(note, route, status)
            request_log.tell(note, route, status, time.monotonic() - note.received)
            if self._spans and span:
                self._spans.end(span, note, route, status)

    def _route(self, scope: Scope) -> str:
        """Also of what was refused on the way. Unknown paths share one label, or a scanner could fill the memory."""
        routed = scope.get("route")
        if routed:
            return str(routed.path)
        match, path = max(((route.matches(scope)[0].value, route.path) for route in self._routes), key=itemgetter(0))
        return path if match else "unknown"
