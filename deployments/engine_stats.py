"""The engine's numbers for people and autoscalers. Reads its parts without a lock; changes none."""

from dataclasses import dataclass

from loray.deployments.adapter_tiers import AdapterTiers
from loray.deployments.scheduler import Scheduler


@dataclass(slots=True)
class EngineCounts:
    """What has happened since the start."""

    num_steps: int = 0
    num_tokens: int = 0
    num_embeddings: int = 0
    num_host_loads: int = 0
    host_load_seconds: float = 0.0
    num_pool_loads: int = 0
    pool_load_seconds: float = 0.0


def engine_stats(scheduler: Scheduler, tiers: AdapterTiers, counts: EngineCounts) -> dict[str, float]:
    """Names that end in _total count since the start, all others are of this moment."""
    return {
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "kv_blocks_used": scheduler.blocks.num_used,
        "kv_blocks": scheduler.blocks.num_blocks,
        "kv_blocks_cached": scheduler.blocks.num_cached,
        "adapter_references": scheduler.adapters.num_references,
        "adapters_resident": scheduler.adapters.num_resident,
        "adapter_pages_used": scheduler.adapters.num_used_pages,
        "adapter_pages": scheduler.adapters.num_pages,
        "adapter_evictions_gpu_total": scheduler.adapters.num_evictions,
        "adapter_host_bytes_used": tiers.host.num_bytes,
        "adapter_host_bytes": tiers.host.max_bytes,
        "adapters_in_host": tiers.host.num_adapters,
        "adapter_evictions_host_total": tiers.host.num_evictions,
        "adapter_loads_host_total": counts.num_host_loads,
        "adapter_load_host_seconds_total": counts.host_load_seconds,
        "adapter_loads_gpu_total": counts.num_pool_loads,
        "adapter_load_gpu_seconds_total": counts.pool_load_seconds,
        "preemptions_total": scheduler.num_preemptions,
        "prompt_tokens_total": scheduler.num_started_tokens,
        "prefix_cached_tokens_total": scheduler.num_cached_tokens,
        "prefix_hit_rate": scheduler.num_cached_tokens / max(scheduler.num_started_tokens, 1),
        "steps_total": counts.num_steps,
        "generated_tokens_total": counts.num_tokens,
        "embeddings_total": counts.num_embeddings,
    }
