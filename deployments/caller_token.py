"""The token that a caller sends as `Authorization: Bearer`, for adapters that not everybody may read. Checks no keys."""

import hmac
from collections.abc import Awaitable, Callable

from starlette.requests import Request

from loray.deployments.config import ApiKeyArgs


def caller_token(keys: ApiKeyArgs) -> Callable[[Request], Awaitable[str]]:
    """A dependency of routes. A key of this server is for this server: no source of adapters may see it.

    Async, though it awaits nothing: FastAPI would run it in a thread."""

    async def token(request: Request) -> str:
        scheme, _, value = request.headers.get("authorization", "").partition(" ")
        is_key = keys.inference is not None or hmac.compare_digest(value.strip().encode(), (keys.admin or "").encode())
        return value.strip() if scheme.lower() == "bearer" and not is_key else ""

    return token
