"""How many KV blocks and rank pages the ranks make, from the bytes they may use, and what fits in. Every rank has the same numbers."""

import logging

from loray.deployments.config import GIB, ServerArgs
from loray.models.step import LoadReport

logger = logging.getLogger("ray.serve.loray")

AUTO_GPU_SHARE = 0.1  # of what is free after the weights
AUTO_CPU_BYTES = GIB


def size_pools(args: ServerArgs, reports: list[LoadReport]) -> tuple[int, int]:
    """(num_blocks, num_pages): what the rank with the least room can hold, since shards may be uneven."""
    sizes = [_rank_pools(args, report) for report in reports]
    num_blocks, num_pages = (min(column) for column in zip(*sizes, strict=True))
    if num_blocks < 1:
        raise ValueError(f"kv_cache: no room for a single KV block after the weights and adapters; raise {_cache_setting(args)}")
    return num_blocks, num_pages


def fitting_tokens(args: ServerArgs, max_total_tokens: int, num_cache_tokens: int) -> int:
    """Of max_total_tokens, what a request may have that has the whole KV cache to itself; the log tells of less."""
    if num_cache_tokens < max_total_tokens:
        logger.warning(
            "requests may have %d tokens, prompt included, instead of max_total_tokens, %d: the KV cache holds no more; raise %s",
            *(num_cache_tokens, max_total_tokens, _cache_setting(args)),
        )
    return min(max_total_tokens, num_cache_tokens)


def _rank_pools(args: ServerArgs, report: LoadReport) -> tuple[int, int]:
    is_gpu = args.device == "cuda"
    auto_bytes = int(report.free_bytes * AUTO_GPU_SHARE) if is_gpu else AUTO_CPU_BYTES
    page_bytes = auto_bytes if args.adapters.gpu_bytes == "auto" else int(args.adapters.gpu_bytes)
    block_bytes = report.free_bytes - page_bytes if is_gpu else int(args.kv_cache.cpu_bytes)
    if is_gpu and not report.has_blocks:  # padded batches hold up to twice what their blocks stand for
        block_bytes //= 2
    num_pages = page_bytes // report.page_bytes if report.page_bytes else 0  # a model without linears that can carry LoRA
    return block_bytes // report.block_bytes, num_pages


def _cache_setting(args: ServerArgs) -> str:
    """What makes room for more KV blocks."""
    return "kv_cache.memory_fraction, or lower adapters.gpu_bytes" if args.device == "cuda" else "kv_cache.cpu_bytes"
