"""The deployment that batches: one replica owns one tensor-parallel group of ranks and the engine that feeds it.

Knows ids only, never text or tensors. When a rank or the engine fails the replica exits at once and Serve builds a new one;
ingress continues the open streams there.
"""

import asyncio
import logging
import os
import time
from pathlib import Path
from typing import Any

import msgspec
from ray.util import get_current_placement_group

from loray.cluster.channel import Address
from loray.cluster.group import RankGroup
from loray.cluster.rank import RankSpec
from loray.deployments.adapter_files import AdapterFiles
from loray.deployments.adapters import AdapterTable
from loray.deployments.block_pool import BlockPool
from loray.deployments.config import BLOCK_SIZE, ServerArgs
from loray.deployments.engine import Engine
from loray.deployments.errors import LorayError
from loray.deployments.model_check import check_model
from loray.deployments.pools import size_pools
from loray.deployments.request import GenerationRequest
from loray.deployments.scheduler import Scheduler
from loray.models.checkpoint import eos_token_ids, model_limits, read_config, resolve_model

logger = logging.getLogger("ray.serve.loray")

REPORT_S = 10.0
STALL_S = 120.0  # a step that takes longer will never end


class Driver:
    """`args.device` is "cpu" or "cuda", `args.adapters.local_roots` are absolute: the builder has settled them."""

    async def __init__(self, args: ServerArgs) -> None:  # type: ignore[misc]  # Serve awaits it
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._start, args)
        self._reporting = asyncio.create_task(self._report())

    def _start(self, args: ServerArgs) -> None:
        started = time.monotonic()
        folder = resolve_model(args.model.id, args.model.revision)
        spec = rank_spec(args, folder)
        placement = get_current_placement_group()
        assert placement is not None, "a driver replica has a placement group of its own"
        self._group = RankGroup(spec, placement, self._fail)
        reports = self._group.load()
        num_blocks, num_pages = size_pools(args, reports)
        self._group.start(num_blocks, num_pages)
        blocks = BlockPool(num_blocks, BLOCK_SIZE, has_cache=reports[0].has_blocks)
        scheduler = Scheduler(blocks, AdapterTable(num_pages), args.scheduler.max_batch_tokens, args.scheduler.max_running)
        self._files = AdapterFiles(args.adapters.local_roots, reports[0].lora_shapes)
        steps = self._group.steps
        self._engine = Engine(scheduler, steps, steps.waker.wake, eos_token_ids(folder), args.scheduler.max_waiting)
        self._engine.start(self._fail)
        self._info = {
            "model_dtype": reports[0].dtype,
            "model_device_type": args.device,
            "device_name": reports[0].device,
            "attention": reports[0].attention,
            "implementation": spec.implementation,
            "tensor_parallel_size": args.tensor_parallel_size,
            "kv_blocks": num_blocks,
            "adapter_pages": num_pages,
            "max_total_tokens": spec.max_total_tokens,
            "vocab_size": model_limits(read_config(folder)).vocab_size,
        }
        logger.info("ready in %.1f s: %s", time.monotonic() - started, self._info)

    async def submit(self, request: bytes, endpoint: str, public_key: bytes) -> None:
        """Run one request to its end; its tokens go to the address. Cancelling this call aborts it."""
        generation = msgspec.msgpack.decode(request, type=GenerationRequest)
        reply = Address(endpoint, public_key)
        ended = asyncio.Event()
        adapter = None
        if generation.adapter:
            try:
                adapter = await asyncio.to_thread(self._files.find, generation.adapter.adapter_id)
            except LorayError as error:
                return self._engine.refuse(generation.request_id, error, reply)
        self._engine.submit(generation, adapter, reply, lambda: self._end(ended))
        try:
            await ended.wait()
        except asyncio.CancelledError:
            self._engine.abort(generation.request_id)
            raise

    def _end(self, ended: asyncio.Event) -> None:
        self._loop.call_soon_threadsafe(ended.set)

    async def stats(self) -> dict[str, float]:
        return self._engine.stats()

    async def info(self) -> dict[str, Any]:
        return self._info

    async def pids(self) -> dict[str, list[int]]:
        """Who runs where, for people who look for a process."""
        return {"driver": [os.getpid()], "ranks": self._group.pids}

    async def healthy(self) -> bool:
        return self._engine.seconds_stalled() <= STALL_S

    async def adapters(self) -> list[str]:
        return await asyncio.to_thread(self._files.names)

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

    def _fail(self, reason: str) -> None:
        """Serve acts on a dead replica at once, on a failing health check only after several."""
        logger.error("giving this replica up: %s", reason)
        logging.shutdown()
        os._exit(1)


def rank_spec(args: ServerArgs, folder: Path) -> RankSpec:
    limits = model_limits(read_config(folder))
    return RankSpec(
        model_path=str(folder),
        device="cuda" if args.device == "cuda" else "cpu",
        dtype=args.model.dtype if args.model.dtype != "auto" else ("bfloat16" if args.device == "cuda" else "float32"),
        world_size=args.tensor_parallel_size,
        max_running=args.scheduler.max_running,
        max_total_tokens=min(args.model.max_total_tokens, limits.max_position_embeddings or args.model.max_total_tokens),
        block_size=BLOCK_SIZE,
        memory_fraction=args.kv_cache.memory_fraction,
        implementation=check_model(args),
        trust_remote_code=args.model.trust_remote_code,
        quantization=args.model.quantization,
    )
