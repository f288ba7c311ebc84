"""The functions of native*.c for tensors, compiled for this CPU once. Without a compiler there are none: the twins do the work."""

import ctypes
import hashlib
import logging
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from loray.kernels.attention import Scoring
from loray.kernels.choice import IS_INTERPRETED
from loray.kernels.paged_kv import PagedKV

logger = logging.getLogger("loray.native")

IS_ARM = platform.machine() == "aarch64"
SOURCES = [Path(__file__).with_name(name) for name in ("native.c", *(["native_linear.c"] if IS_ARM else []))]
OPENMP_RUNTIMES = "libgomp", "libiomp5", "libomp"
COMPILE_S = 120.0
PAGE_RANK = 8  # as in native.c
_library: ctypes.CDLL | None = None


def prepare(folder: Path) -> None:
    """Compiles them into this folder, unless they are there, and uses them from now on. Where that fails, a line in the log says why."""
    global _library
    if _library is None and not IS_INTERPRETED:
        try:
            _library = _load(_compiled(folder))
        except (OSError, subprocess.SubprocessError) as error:
            reason = getattr(error, "stderr", None) or error  # what the compiler said, if it did
            logger.warning("steps are slower than they could be: native.c can't be compiled here (%s)", reason)


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    return _library is not None and device.type == "cpu" and dtype == torch.float32


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None, added: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """As norm.py has it; with `added`, x += scale * added in place before. x [num_tokens, size]."""
    assert _library is not None
    out = torch.empty(x.shape) if out is None else out
    assert x.stride(1) == 1 and out.stride(1) == 1 and weight.is_contiguous(), "rows are contiguous"
    more = (None, 0) if added is None else (added.data_ptr(), added.stride(0))
    _library.rms_norm(x.data_ptr(), x.stride(0), *more, scale, weight.data_ptr(), eps, out.data_ptr(), out.stride(0), *x.shape)
    return out


def silu_gate(gate_up: Tensor) -> Tensor:
    assert _library is not None and gate_up.stride(1) == 1
    num_tokens, size = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty(num_tokens, size)
    _library.silu_gate(gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), num_tokens, size)
    return out


def rotate_and_store(qkv: Tensor, rope: tuple[Tensor, Tensor] | None, kv_cache: Tensor, slots: Tensor, num_heads: int) -> None:
    assert _library is not None and qkv.stride(1) == 1 and kv_cache.is_contiguous() and slots.is_contiguous()
    cos, sin = rope or (qkv, qkv)
    assert cos.stride(0) == sin.stride(0) and cos.stride(-1) == 1 and sin.stride(-1) == 1, "a token's angles lie side by side"
    _library.rotate_and_store(
        *(qkv.data_ptr(), qkv.stride(0), cos.data_ptr(), sin.data_ptr(), cos.stride(0), cos.shape[-1] if rope else 0),
        *(kv_cache.data_ptr(), slots.data_ptr(), len(qkv), num_heads, kv_cache.shape[2] // 2, kv_cache.shape[3]),
    )


def paged_attention(q: Tensor, kv: PagedKV, scoring: Scoring) -> Tensor:
    assert _library is not None
    num_seqs, num_heads, head_dim = q.shape
    _, block_size, twice_kv_heads, _ = kv.cache.shape
    assert q.stride(1) == head_dim and q.stride(2) == 1 and kv.cache.is_contiguous(), "heads lie together"
    assert kv.block_table.stride(1) == 1 and kv.context_lens.is_contiguous(), "a sequence's blocks lie together"
    out = torch.empty(num_seqs, num_heads, head_dim)
    has_failed = _library.paged_attention(
        *(q.data_ptr(), q.stride(0), kv.cache.data_ptr(), kv.block_table.data_ptr(), kv.block_table.stride(0), kv.context_lens.data_ptr()),
        *(out.data_ptr(), num_seqs, num_heads, twice_kv_heads // 2, head_dim, block_size, scoring.scale, scoring.cap, scoring.window),
    )
    if has_failed:
        raise MemoryError("not enough memory: there is no room for the scores of a step's attention")
    return out


def add_lora(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, widths: Sequence[int], blocks: Tensor, page_ids: Tensor, page_rank: int, max_pages: int
) -> None:
    """As add_lora_segments has it. a [projections, pool_ranks, in], b [pool_ranks, sum(widths)]; blocks and page_ids of LoraSegments."""
    assert _library is not None and x.stride(1) == 1 and y.stride(1) == 1 and a.is_contiguous() and b.is_contiguous()
    assert page_rank == PAGE_RANK, "native.c knows pages of one size"
    shrunk = torch.empty(len(x) * len(widths) * max_pages * page_rank)
    _library.add_lora(
        *(y.data_ptr(), y.stride(0), x.data_ptr(), x.stride(0), a.data_ptr(), a.shape[1], a.shape[2], b.data_ptr(), b.shape[1]),
        *((ctypes.c_int64 * len(widths))(*widths), len(widths), blocks.data_ptr(), len(blocks), page_ids.data_ptr(), max_pages),
        shrunk.data_ptr(),
    )


def has_linear() -> bool:
    return _library is not None and IS_ARM


def linear(x: Tensor, groups: Tensor, outputs: int) -> Tensor:
    """x W^T. groups: as native_linear.py lays them out."""
    assert _library is not None and x.stride(1) == 1
    num_tokens, inputs = x.shape
    y, room = torch.empty(num_tokens, outputs), torch.empty((num_tokens + 3) * inputs)
    _library.linear(x.data_ptr(), x.stride(0), groups.data_ptr(), inputs, outputs, y.data_ptr(), outputs, num_tokens, room.data_ptr())
    return y


def linear_of_one(x: Tensor, groups: Tensor, half: Tensor | None, outputs: int) -> Tensor:
    assert _library is not None and x.stride(1) == 1
    y, room = torch.empty(1, outputs), torch.empty(x.shape[1])
    bits = None if half is None else half.data_ptr()
    _library.linear_of_one(x.data_ptr(), groups.data_ptr(), bits, x.shape[1], outputs, y.data_ptr(), room.data_ptr())
    return y


def _compiled(folder: Path) -> Path:
    """For this source, compiler and CPU: another of them leaves what is there alone."""
    compiler = os.environ.get("CC", "cc")
    native = "-mcpu=native" if IS_ARM else "-march=native"
    version, features = _run(compiler, "--version"), _run(compiler, native, "-dM", "-E", "-x", "c", os.devnull)
    made = folder / f"{hashlib.sha256((_source() + version + features).encode()).hexdigest()[:16]}.so"
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as staging:
            objects, linked = [f"{staging}/{source.stem}.o" for source in SOURCES], f"{staging}/native.so"
            for source, compiled in zip(SOURCES, objects, strict=True):
                _run(compiler, native, "-O3", "-fopenmp", "-fPIC", "-std=gnu11", "-c", str(source), "-o", compiled)
            _run(compiler, "-shared", *objects, "-o", linked, "-lm")  # without an OpenMP runtime of its own: two would fight for the cores
            Path(linked).replace(made)
    return made


def _source() -> str:
    return "".join(source.read_text() for source in SOURCES)


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMPILE_S).stdout


def _load(path: Path) -> ctypes.CDLL:
    ctypes.CDLL(_openmp_runtime(), mode=ctypes.RTLD_GLOBAL)  # it is loaded already; now its names can be found
    library = ctypes.CDLL(str(path))
    for kind, name, parameters in re.findall(r"^(void|int) (\w+)\((.*?)\) {", _source(), re.DOTALL | re.MULTILINE):
        function = getattr(library, name)
        function.restype = None if kind == "void" else ctypes.c_int
        function.argtypes = [_type(parameter) for parameter in parameters.split(",")]
    return library


def _type(parameter: str) -> type:
    return ctypes.c_void_p if "*" in parameter else ctypes.c_float if "float" in parameter else ctypes.c_int64


def _openmp_runtime() -> str:
    """The one that torch has brought into this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[1] + line.partition("/")[2]
        if Path(path).name.startswith(OPENMP_RUNTIMES):
            return path
    raise OSError("torch has no OpenMP runtime")
