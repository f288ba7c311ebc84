"""The deployment that speaks HTTP and Python handles: text in, text out. All CPU work of a request scales here."""

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from loray.deployments.admin import AdapterAdmin
from loray.deployments.config import ServerArgs
from loray.deployments.driver_client import DriverClient
from loray.deployments.http_app import make_app
from loray.deployments.native import NativeApi
from loray.deployments.registry_actor import RegistryLink
from loray.deployments.service import Service
from loray.deployments.tokenizer import Tokenizer
from loray.models.checkpoint import resolve_model


@serve.ingress()
class Ingress:
    """The methods are for `serve.get_app_handle`; they take the bodies of POST /generate, /embed and /admin/adapters, and need no key."""

    async def __init__(self, driver: DeploymentHandle, args: ServerArgs) -> None:  # type: ignore[misc]  # Serve awaits it
        folder = await asyncio.to_thread(resolve_model, args.model.id, args.model.revision)
        tokenizer = await asyncio.to_thread(Tokenizer.load, folder, args.model.trust_remote_code)
        facts = await driver.info.remote()
        context = serve.get_replica_context()
        self._client = DriverClient(driver, RegistryLink(context.app_name))
        self._service = Service(args, tokenizer, self._client, facts["max_total_tokens"], facts, context.replica_id.unique_id)
        self._native = NativeApi(self._service)
        self._admin = AdapterAdmin(self._service)
        gc.collect()
        gc.freeze()  # what lives as long as this process: a full collection that looks at it stops every stream for 0.2 s

    def __serve_build_asgi_app__(self) -> FastAPI:
        return make_app(self._service, answers_request_id=False)  # Serve's proxy does, and two would be one too many

    async def check_health(self) -> None:
        """Serve asks, and builds a new replica in place of one that raises."""
        self._client.check_receiver()

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        return await self._native.generate(body)

    async def embed(self, body: dict[str, Any]) -> dict[str, Any]:
        return await self._native.embed(body)

    async def generate_stream(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async for event in self._native.generate_stream(body):
            yield event

    async def adapters_list(self, state: str | None = None) -> dict[str, Any]:
        return await self._admin.listing(state)

    async def adapters_load(self, body: dict[str, Any]) -> dict[str, Any]:
        return await self._admin.load(body)

    async def adapters_unload(self, adapter_id: str) -> dict[str, Any]:
        return await self._admin.change("unload", adapter_id)

    async def adapters_pin(self, adapter_id: str) -> dict[str, Any]:
        return await self._admin.change("pin", adapter_id)

    async def adapters_unpin(self, adapter_id: str) -> dict[str, Any]:
        return await self._admin.change("unpin", adapter_id)

    async def adapters_reload(self, adapter_id: str) -> dict[str, Any]:
        return await self._admin.change("reload", adapter_id)
