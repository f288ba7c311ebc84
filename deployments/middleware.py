"""What happens around every HTTP request: the API key is checked, the outcome is counted. Knows no bodies."""

import hmac

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loray.deployments.error_shapes import response
from loray.deployments.errors import Unauthorized
from loray.deployments.metrics import Metrics

HEALTH_CHECKS = {"/", "/health", "/ping", "/startup"}  # GET only: POST / generates
CLIENT_GONE = "499"


class KeyCheck:
    """Before routing, so that without the key nothing is learnt."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app = app
        self._expected = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_allowed(Request(scope)):
            await self._app(scope, receive, send)
            return
        error = Unauthorized("the Authorization header must be 'Bearer <key>' with this server's API key")
        await response(Request(scope), error)(scope, receive, send)

    def _is_allowed(self, request: Request) -> bool:
        path = request.url.path.removeprefix(request.scope.get("root_path", ""))
        if self._expected is None or (request.method == "GET" and path in HEALTH_CHECKS):
            return True
        return hmac.compare_digest(request.headers.get("authorization", "").encode(), self._expected)


class RequestCounter:
    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_GONE

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            route = scope.get("route")  # unknown paths share one label, or a scanner could fill the memory
            self._metrics.observe_request(getattr(route, "path", "unknown"), status)
