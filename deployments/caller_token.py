"""The token that a caller sends as `Authorization: Bearer`, for adapters that not everybody may read. Checks no keys."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request

from loray.deployments.config import ApiKeyArgs


def caller_token(keys: ApiKeyArgs) -> Callable[[Request], Awaitable[str]]:
    """A dependency of routes. Where inference needs a key that header is the key, which no source of adapters may see.

    Async, though it awaits nothing: FastAPI would run it in a thread."""

    async def token(request: Request) -> str:
        if keys.inference is not None:
            return ""
        scheme, _, value = request.headers.get("authorization", "").partition(" ")
        return value.strip() if scheme.lower() == "bearer" else ""

    return token
