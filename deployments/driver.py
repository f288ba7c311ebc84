"""The deployment that batches: one replica owns one tensor-parallel group of ranks and the engine that feeds it.

Knows ids only, never text or tensors. When a rank or the engine fails the replica exits at once and Serve builds a new one;
ingress continues the open streams there.
"""

import asyncio
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from ray import serve
from ray.util import get_current_placement_group

from loray.cluster.channel import Address
from loray.cluster.group import RankGroup
from loray.cluster.merge_task import merge_elsewhere
from loray.cluster.rank import RankSpec
from loray.deployments.adapter_accounts import account_weights
from loray.deployments.adapter_room import AdapterRoom
from loray.deployments.adapter_service import AdapterService
from loray.deployments.adapter_store import AdapterStore
from loray.deployments.adapter_tiers import AdapterTiers
from loray.deployments.adapters import Adapter, AdapterTable
from loray.deployments.block_pool import BlockPool
from loray.deployments.config import BLOCK_SIZE, ServerArgs
from loray.deployments.deadlines import in_time, seconds_left
from loray.deployments.driver_log import DriverLog
from loray.deployments.engine import ABORTED, Engine
from loray.deployments.errors import Incomplete, LorayError, TemplateOutdated
from loray.deployments.host_tier import HostTier
from loray.deployments.log_line import log_line
from loray.deployments.model_check import check_model
from loray.deployments.pools import fitting_tokens, size_pools
from loray.deployments.queue_limits import QueueLimits
from loray.deployments.registry_actor import RegistryLink
from loray.deployments.registry_follower import RegistryFollower
from loray.deployments.request import AdapterRef, AdapterTemplate, GenerationRequest
from loray.deployments.scheduler import Scheduler
from loray.deployments.sequence import Ending
from loray.deployments.tracing import Tracing, make_tracing
from loray.models.checkpoint import eos_token_ids, model_limits, read_config, resolve_model
from loray.models.converted import cache_folder
from loray.models.runner_sizes import RunnerSizes
from loray.models.step import LoadReport

logger = logging.getLogger("ray.serve.loray")

REPORT_S = 10.0
STALL_S = 120.0  # a step that takes longer will never end


class Driver:
    """`args.device` is "cpu" or "cuda", `args.adapters.local_roots` are absolute: the builder has settled them."""

    _tracing: Tracing | None = None  # of the class too: __del__ comes also after a start that failed

    async def __init__(self, args: ServerArgs) -> None:  # type: ignore[misc]  # Serve awaits it
        self._loop = asyncio.get_running_loop()
        self._tracing = make_tracing(args.tracing)
        self._log = DriverLog(self._tracing)
        await asyncio.to_thread(self._start, args)
        await self._adapters.preload(args.adapters.preload)
        context = serve.get_replica_context()
        self._replica_id = context.replica_id.unique_id
        follower = RegistryFollower(RegistryLink(context.app_name), self._replica_id, self._adapters.apply, self._adapters.statuses)
        self._following = asyncio.create_task(follower.run())
        self._reporting = asyncio.create_task(self._report())

    def _start(self, args: ServerArgs) -> None:
        started = time.monotonic()
        folder = resolve_model(args.model.id, args.model.revision)
        spec = rank_spec(args, folder)
        placement = get_current_placement_group()
        assert placement is not None, "a driver replica has a placement group of its own"
        self._group = RankGroup(spec, placement, self._fail)
        reports = self._group.load()
        self._engine = start_engine(args, self._group, reports, eos_token_ids(folder), self._fail)
        page_bytes = max(report.page_bytes for report in reports)
        room = AdapterRoom(int(self._engine.stats()["adapter_pages"]), page_bytes, args.adapters.host_bytes)
        store = AdapterStore(args.adapters, reports[0].lora_shapes, cache_folder() / "adapters", room)
        self._adapters = AdapterService(store, self._engine, args.adapters.max_waiting, page_bytes)
        store.merge = merge_elsewhere
        self._info = driver_info(args, spec, reports[0], self._engine.stats())
        logger.info("ready in %.1f s: %s", time.monotonic() - started, self._info)

    async def submit(self, request: bytes, endpoint: str, public_key: bytes) -> None:
        """Run one request to its end; its tokens go to the address. Cancelling this call aborts it."""
        received = time.monotonic()
        generation = msgspec.msgpack.decode(request, type=GenerationRequest)
        reply = Address(endpoint, public_key)
        tell = partial(self._log.tell, generation, received)
        if generation.adapter is None:
            await self._generate(generation, None, reply, tell)
            return
        with self._adapters.asked(generation.adapter, generation.began_ms):
            await self._submit_with(generation.adapter, generation, received, reply, tell)

    async def _submit_with(
        self, ref: AdapterRef, generation: GenerationRequest, received: float, reply: Address, tell: Callable[[Ending], None]
    ) -> None:
        try:
            acknowledge = partial(self._engine.acknowledge, generation.request_id, reply)
            async with in_time(generation.deadline_s, "its adapter was still being fetched"):
                adapter = await self._adapters.find_patiently(ref, acknowledge)
                if generation.template and generation.template.version != adapter.template_version:
                    check_template(generation, await self._adapters.template_of(ref, adapter))
            check_version(generation, adapter)
        except LorayError as error:
            self._engine.refuse(generation.request_id, error, reply)
            return tell(Ending(type(error).__name__, reason=error.message))
        except asyncio.CancelledError:
            tell(Ending(ABORTED))
            raise
        rest = msgspec.structs.replace(generation, deadline_s=seconds_left(generation.deadline_s, received))
        with self._adapters.counted(ref, adapter) as (read, ended):
            ending = await self._generate(rest, adapter, reply, tell, on_read=read)
            ended(ending.error, ending.reason)

    async def _generate(
        self,
        generation: GenerationRequest,
        adapter: Adapter | None,
        reply: Address,
        tell: Callable[[Ending], None],
        on_read: Callable[[], None] = lambda: None,
    ) -> Ending:
        """`tell` hears of its end also when this call is cancelled before; `on_read`: see Engine.submit."""
        ended: asyncio.Future[Ending] = self._loop.create_future()

        def end(ending: Ending) -> None:
            if not ended.done():  # else the call was cancelled meanwhile
                ended.set_result(ending)
            tell(ending)

        call = self._loop.call_soon_threadsafe
        self._engine.submit(generation, adapter, reply, lambda ending: call(end, ending), lambda: call(on_read))
        try:
            return await ended
        except asyncio.CancelledError:
            self._engine.abort(generation.request_id)
            raise

    async def chat_template(self, adapter: bytes) -> AdapterTemplate | LorayError:
        """An error is returned: one that is raised Serve would log as a failure of its own, with its traceback."""
        ref = msgspec.msgpack.decode(adapter, type=AdapterRef)
        try:
            return await self._adapters.chat_template(ref)
        except LorayError as error:
            fields = {"adapter": ref.adapter_id, "outcome": type(error).__name__, "reason": error.message}
            logger.info("%s", log_line("chat_template", fields))
            return error

    async def stats(self) -> dict[str, float]:
        disk = self._adapters.disk_use()
        return self._engine.stats() | {
            "adapter_loads_disk_total": disk.num_loads,
            "adapter_load_disk_seconds_total": disk.load_seconds,
            "adapter_evictions_disk_total": disk.num_evictions,
        }

    async def replica_stats(self) -> tuple[str, dict[str, float]]:
        """With this replica's id, for those who ask all replicas at once."""
        return self._replica_id, await self.stats()

    async def info(self) -> dict[str, Any]:
        return self._info

    async def pids(self) -> dict[str, list[int]]:
        """Who runs where, for people who look for a process."""
        return {"driver": [os.getpid()], "ranks": self._group.pids}

    async def healthy(self) -> bool:
        return self._engine.seconds_stalled() <= STALL_S

    async def adapters(self) -> list[str]:
        return await self._adapters.names()

    async def _report(self) -> None:
        """A line in the log every now and then, while there is something to tell."""
        last = self._engine.stats()
        while True:
            await asyncio.sleep(REPORT_S)
            now = self._engine.stats()
            if now["steps_total"] > last["steps_total"]:
                rate = (now["generated_tokens_total"] - last["generated_tokens_total"]) / REPORT_S
                logger.info("%.1f tokens/s; %s", rate, ", ".join(f"{name} {value:.0f}" for name, value in now.items()))
            last = now

    def check_health(self) -> None:
        """Health means progress: steps come back."""
        if self._engine.seconds_stalled() > STALL_S:
            self._fail(f"no step has finished for {STALL_S:.0f} s")

    def __del__(self) -> None:
        """Serve calls it when the replica's time has come."""
        if self._tracing:
            self._tracing.close()

    def _fail(self, reason: str) -> None:
        """Serve acts on a dead replica at once, on a failing health check only after several."""
        logger.error("giving this replica up: %s", reason)
        logging.shutdown()
        os._exit(1)


def start_engine(
    args: ServerArgs, group: RankGroup, reports: list[LoadReport], eos_ids: Collection[int], on_failure: Callable[[str], None]
) -> Engine:
    """Makes the ranks' pools and sets them and the engine to work."""
    num_blocks, num_pages = size_pools(args, reports)
    num_blocks = group.start(num_blocks, num_pages)
    page_bytes = max(report.page_bytes for report in reports)
    tiers = AdapterTiers(AdapterTable(num_pages), HostTier(args.adapters.host_bytes, page_bytes))
    blocks = BlockPool(num_blocks, BLOCK_SIZE, has_cache=reports[0].has_blocks)
    sizes, weights = (args.scheduler.max_batch_tokens, args.scheduler.max_running), account_weights(args.adapters)
    scheduler = Scheduler(blocks, tiers.table, *sizes, weights, reports[0].captured)
    limits = QueueLimits(args.scheduler.max_waiting, args.adapters.max_waiting)
    engine = Engine(scheduler, tiers, group.steps, eos_ids, limits)
    group.host_reports.start(engine.prepared)
    engine.start(on_failure)
    return engine


def driver_info(args: ServerArgs, spec: RankSpec, report: LoadReport, stats: Mapping[str, float]) -> dict[str, Any]:
    """For ingress, which makes its limits of it, and /info."""
    folder = Path(spec.model_path)
    num_tokens = int(stats["kv_blocks"]) * BLOCK_SIZE
    return {
        "model_sha": folder.name if is_snapshot(folder) else args.model.revision,
        "model_dtype": report.dtype,
        "model_device_type": args.device,
        "device_name": report.device,
        "attention": report.attention,
        "implementation": spec.implementation,
        "tensor_parallel_size": args.tensor_parallel_size,
        "kv_blocks": stats["kv_blocks"],
        "adapter_pages": stats["adapter_pages"],
        "max_total_tokens": fitting_tokens(args, spec.sizes.max_total_tokens, num_tokens),
        "max_batch_total_tokens": num_tokens,  # of all that run
        "vocab_size": model_limits(read_config(folder)).vocab_size,
    }


def is_snapshot(folder: Path) -> bool:
    """Whether it comes from the hub, whose cache names the folders by their commits."""
    return folder.parent.name == "snapshots" and re.fullmatch("[0-9a-f]{40}", folder.name) is not None


def check_version(generation: GenerationRequest, adapter: Adapter) -> None:
    """An answer is of one version: what another replica has begun is not ended with other weights."""
    if generation.output_ids and generation.adapter_version != adapter.version:
        name = repr(generation.adapter_id)
        raise Incomplete(f"adapter {name} was replaced meanwhile: the version that the answer was begun with is gone with its replica")


def check_template(generation: GenerationRequest, own: AdapterTemplate) -> None:
    """Whether the prompt is what the adapter's own template would have written."""
    if generation.template and generation.template.digest != own.mark.digest:
        raise TemplateOutdated(f"adapter {generation.adapter_id!r} was replaced since its chat template was read; try again")


def rank_spec(args: ServerArgs, folder: Path) -> RankSpec:
    limits = model_limits(read_config(folder))
    max_total_tokens = min(args.model.max_total_tokens, limits.max_position_embeddings or args.model.max_total_tokens)
    return RankSpec(
        model_path=str(folder),
        device="cuda" if args.device == "cuda" else "cpu",
        dtype=args.model.dtype if args.model.dtype != "auto" else ("bfloat16" if args.device == "cuda" else "float32"),
        world_size=args.tensor_parallel_size,
        sizes=RunnerSizes(args.scheduler.max_running, max_total_tokens, BLOCK_SIZE, args.scheduler.max_batch_tokens),
        memory_fraction=args.kv_cache.memory_fraction,
        has_float8_cache=args.kv_cache.dtype == "fp8",
        implementation=check_model(args),
        trust_remote_code=args.model.trust_remote_code,
        quantization=args.model.quantization,
    )
