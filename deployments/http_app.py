"""Puts the doors together: routes, health, metrics, and one error handler that speaks each API's shape. Knows nothing of Ray."""

import asyncio
import http
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route

from loray.deployments import admin, error_shapes, native, openai, request_log
from loray.deployments.api_docs import Info, complete_docs
from loray.deployments.config import ServerArgs
from loray.deployments.error_docs import HEALTH
from loray.deployments.errors import InvalidRequest, LorayError, TooLarge, TooSlow
from loray.deployments.health import Health
from loray.deployments.middleware import CLIENT_GONE, KeyCheck, LastResort, Limits, PrefixIsRoot, RequestRecord
from loray.deployments.request_spans import RequestSpans
from loray.deployments.service import Service
from loray.deployments.tracing import make_tracing

JSON_TYPE = re.compile(r"application/([^/]+\+)?json", re.IGNORECASE)  # what FastAPI reads as JSON
METRICS: dict[str, Any] = {"content": {"text/plain": {"schema": {"type": "string"}}, "application/json": {"schema": {"type": "array"}}}}


def make_app(service: Service, answers_request_id: bool = True) -> FastAPI:
    """`answers_request_id`: unless whoever stands in front writes X-Request-Id into the answers."""
    tracing = make_tracing(service.args.tracing)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        if tracing:
            await asyncio.to_thread(tracing.close)

    app = FastAPI(
        title="loray",
        description="One base model, thousands of LoRA adapters.",
        version=str(service.info()["version"]),
        lifespan=lifespan,
        redirect_slashes=False,  # a path with one more is another, and unknown
    )
    _add_error_handlers(app)
    routers = [native.make_router(service), openai.make_router(service), admin.make_router(service)]
    for router in routers:
        app.include_router(router)
    complete_docs(app, service.args.api_keys)
    _add_health(app, Health(service))
    _add_descriptions(app, service)
    _add_guards(app, service.args)
    spans = RequestSpans(tracing) if tracing else None
    routes = [route for router in [app.router, *routers] for route in router.routes if isinstance(route, Route)]
    app.add_middleware(RequestRecord, metrics=service.metrics, spans=spans, answers_id=answers_request_id, routes=routes)
    app.add_middleware(PrefixIsRoot)
    return app


def _add_guards(app: FastAPI, args: ServerArgs) -> None:
    """The last is the outermost."""
    app.add_middleware(Limits, args.limits)
    app.add_middleware(KeyCheck, keys=args.api_keys)
    app.add_middleware(LastResort)
    if args.cors.allow_origins:  # outside of the keys: a browser asks for permission without one
        app.add_middleware(
            CORSMiddleware,
            allow_origins=args.cors.allow_origins,
            allow_methods=args.cors.allow_methods,
            allow_headers=args.cors.allow_headers,
            expose_headers=args.cors.expose_headers,
            allow_credentials=args.cors.allow_credentials,
            max_age=args.cors.max_age_s,
        )


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(LorayError)
    async def on_loray_error(request: Request, error: LorayError) -> Response:
        return error_shapes.response(request, error)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> Response:
        return error_shapes.response(request, _invalid_body(request, error))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        if isinstance(error.__cause__, ClientDisconnect):
            return Response(status_code=int(CLIENT_GONE))  # for the record; nobody is there to read it
        if error.status_code == 400:  # FastAPI could not read the body as JSON text at all
            return error_shapes.response(request, InvalidRequest(f"the body is not valid JSON: {error.detail}"))
        if error.status_code == TooLarge.status:
            return error_shapes.response(request, TooLarge(error.detail))
        if error.status_code == TooSlow.status:
            return error_shapes.response(request, TooSlow(error.detail))
        return _routing_error(request, error)


def _invalid_body(request: Request, error: RequestValidationError) -> InvalidRequest:
    told = error.errors()[: error_shapes.MAX_ERRORS]
    errors = [{**one, "loc": tuple(one["loc"])[1:]} for one in told]  # the first part is "body", "path" or "query"
    first = errors[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {first['ctx']['error']} at character {first['loc'][0]}")
    media_type = request.headers.get("content-type", "")
    if not first["loc"] and not JSON_TYPE.fullmatch(media_type.partition(";")[0].strip()):
        return InvalidRequest(f"the body must be JSON, sent with Content-Type: application/json, not {media_type!r}")
    return error_shapes.invalid_request(errors)


def _routing_error(request: Request, error: HTTPException) -> Response:
    """An unknown path or method."""
    phrase = http.HTTPStatus(error.status_code).phrase
    message = f"{request.method} {request.url.path}: {phrase.lower()}"
    error_type = phrase.lower().replace(" ", "_")
    request_log.add_failure(error_type)
    body: dict[str, Any] = {"error": message, "error_type": error_type}
    if error_shapes.is_openai(request):
        body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}
    headers = {"Allow": ", ".join(_allowed_methods(request))} if error.status_code == http.HTTPStatus.METHOD_NOT_ALLOWED else error.headers
    return JSONResponse(body, error.status_code, headers)


def _allowed_methods(request: Request) -> list[str]:
    """All that the path knows. The router itself names those of the first of its routes alone."""
    scopes = {method.value: {**request.scope, "method": method.value} for method in http.HTTPMethod}
    return [name for name, scope in scopes.items() if any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)]


def _add_health(app: FastAPI, checks: Health) -> None:
    @app.get("/", tags=["health"], response_class=Response, responses=HEALTH)  # the class: OpenAPI shows an empty body
    @app.head("/", include_in_schema=False)
    @app.get("/health", tags=["health"], response_class=Response, responses=HEALTH)
    @app.head("/health", include_in_schema=False)
    @app.get("/ping", tags=["health"], response_class=Response, responses=HEALTH)
    @app.head("/ping", include_in_schema=False)
    async def health() -> Response:
        """200 when tokens can be made, else 503."""
        await checks.check()
        return Response()

    @app.get("/startup", tags=["health"], response_class=Response, responses=HEALTH)
    async def startup() -> Response:
        """200 once a real generation has worked."""
        await checks.check_started()
        return Response()


def _add_descriptions(app: FastAPI, service: Service) -> None:
    @app.get("/info", tags=["description"], response_model=None, responses={200: {"model": Info}})
    async def info() -> dict[str, Any]:
        """The model and the limits."""
        return service.info()

    @app.get("/metrics", tags=["description"], response_class=Response, responses={200: METRICS})
    async def metrics(request: Request) -> Response:
        """Prometheus text, or JSON if asked for. One ingress replica answers, for itself and for all drivers."""
        stats, _ = await asyncio.gather(service.driver_stats(), service.measure_adapters())
        if "application/json" in request.headers.get("accept", ""):
            return JSONResponse(service.metrics.families(stats))
        return Response(service.metrics.text(stats), media_type=CONTENT_TYPE_LATEST)
