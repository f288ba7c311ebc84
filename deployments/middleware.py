"""What happens around every HTTP request: the API key is checked, the outcome is counted. Knows no bodies."""

import hmac

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loray.deployments.config import ApiKeyArgs
from loray.deployments.error_shapes import response
from loray.deployments.errors import Forbidden, LorayError, Unauthorized
from loray.deployments.metrics import Metrics

HEALTH_CHECKS = {"/", "/health", "/ping", "/startup"}  # GET only: POST / generates
CLIENT_GONE = "499"
ADMIN = "/admin"


class KeyCheck:
    """Before routing, so that without the key nothing is learnt. Neither key opens the other's doors."""

    def __init__(self, app: ASGIApp, keys: ApiKeyArgs) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(Request(scope)) if scope["type"] == "http" else None
        if error:
            await response(Request(scope), error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, request: Request) -> LorayError | None:
        path = routed_path(request.scope)
        is_admin = path == ADMIN or path.startswith(f"{ADMIN}/")
        key = self._keys.admin if is_admin else self._keys.inference
        if is_admin and key is None:
            return Forbidden("this server has no admin key: set api_keys.admin in its config to use /admin")
        if key is None or (request.method == "GET" and path in HEALTH_CHECKS) or _has_key(request, key):
            return None
        name = "admin key (api_keys.admin)" if is_admin else "API key"
        return Unauthorized(f"the Authorization header must be 'Bearer <key>' with this server's {name}")


def _has_key(request: Request, key: str) -> bool:
    return hmac.compare_digest(request.headers.get("authorization", "").encode(), f"Bearer {key}".encode())


def routed_path(scope: Scope) -> str:
    """The path as the routes see it: without the prefix that the application is mounted at."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path.removeprefix(root) if f"{path}/".startswith(f"{root}/") else path


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
