"""Waits until an adapter is in the host memory of every rank. Knows neither where its files come from nor who wants it."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from loray.deployments.adapters import Adapter
from loray.deployments.engine import Engine
from loray.deployments.errors import AdapterFailed, LorayError

logger = logging.getLogger("ray.serve.loray")

ARRIVAL_POLL_S = 0.02


async def arrival(engine: Engine, adapter: Adapter) -> None:
    """adapter: the tiers' own object. Raises AdapterFailed."""
    while not adapter.is_ready and not adapter.page_ids:
        places = await asyncio.wrap_future(engine.call(lambda tiers: tiers.places([adapter.version])))
        place = places.get(adapter.version)
        if place and place.is_loading:
            await asyncio.sleep(ARRIVAL_POLL_S)
        elif not adapter.is_ready and not adapter.page_ids:
            raise AdapterFailed(adapter.error or f"adapter {adapter.adapter_id!r}: there is no room for it in host memory now")


async def logged_load(load: Coroutine[Any, Any, None], adapter_id: str) -> bool:
    """Whether it succeeded; if not, the log says why."""
    try:
        await load
    except LorayError as error:
        logger.warning("adapter %s can't be loaded: %s", adapter_id, error.message)
        return False
    logger.info("adapter %s is loaded", adapter_id)
    return True
