"""native*.c, compiled for this machine's CPU once, and loaded. What its functions do, native.py says."""

import ctypes
import hashlib
import os
import platform
import re
import shlex
import signal
import subprocess
import tempfile
from pathlib import Path

import torch

IS_ARM = platform.machine() == "aarch64"
HAS_AVX2 = torch.backends.cpu.get_cpu_capability().startswith("AVX")
LINEAR = ["native_linear_arm.c"] if IS_ARM else ["native_linear_x86.c"] if HAS_AVX2 else []
SOURCES = [Path(__file__).with_name(name) for name in ("native.c", "native_attention.c", *LINEAR)]
OPENMP_RUNTIMES = "libgomp", "libiomp5", "libomp"
COMPILE_S, ASK_S = 120.0, 20.0
EXACT_FLAGS = "-fno-strict-aliasing", "-fno-math-errno", "-fno-trapping-math"  # no number changes; without them exp is no vector code
MAX_ARGUMENTS = 17
CALL_WORDS = 1 + MAX_ARGUMENTS
C_TYPES = {"pointer": ctypes.c_void_p, "float": ctypes.c_float, "int": ctypes.c_int64}


def _functions() -> dict[str, list[str]]:
    """Name -> "pointer", "float" or "int" for each parameter, of all functions that are not the C files' own."""
    source = "".join(path.read_text() for path in SOURCES)
    found = re.findall(r"^(?:void|int) (\w+)\((.*?)\) {", source, re.DOTALL | re.MULTILINE)
    return {name: [_kind(parameter) for parameter in parameters.split(",")] for name, parameters in found}


def _kind(parameter: str) -> str:
    return "pointer" if "*" in parameter else "float" if "float" in parameter else "int"


FUNCTIONS = _functions()
NUMBERS = {name: number for number, name in enumerate(FUNCTIONS)}


def _replay_source() -> str:
    """A function that makes many calls, each of them CALL_WORDS words: the function's number, and its arguments."""
    casts = {"pointer": "(void *)call[{}]", "float": "*(const float *)&call[{}]", "int": "call[{}]"}
    cases = "".join(
        f"case {NUMBERS[name]}: {name}({', '.join(casts[kind].format(1 + i) for i, kind in enumerate(kinds))}); break;\n"
        for name, kinds in FUNCTIONS.items()
    )
    source = "\n".join(f'#include "{path.name}"' for path in SOURCES)
    loop = f"for (const int64_t *call = calls, *end = calls + {CALL_WORDS} * count; call < end; call += {CALL_WORDS})"
    return f"{source}\nvoid replay(const int64_t *calls, int64_t count) {{ {loop} switch (call[0]) {{\n{cases}}} }}\n"


def compiled(folder: Path) -> Path:
    """For this source, compiler and CPU: another of them leaves what is there alone. Its name ends in its own digest, so that a file which
    was cut or changed is made anew, not loaded."""
    compiler = shlex.split(os.environ.get("CC") or "cc")
    native = "-mcpu=native" if IS_ARM else "-march=native"
    version, features = _run(ASK_S, *compiler, "--version"), _run(ASK_S, *compiler, native, "-dM", "-E", "-x", "c", os.devnull)
    source = "".join((_replay_source(), *EXACT_FLAGS, *(path.read_text() for path in SOURCES)))
    key = hashlib.sha256((source + version + features).encode()).hexdigest()[:16]
    for made in folder.glob(f"{key}-*.so"):
        if made.name == f"{key}-{_digest(made)}.so":
            return made
        made.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as staging:
        whole, object_file, linked = (Path(staging, f"whole.{suffix}") for suffix in ("c", "o", "so"))
        whole.write_text(_replay_source())
        flags = native, "-O3", "-fopenmp", "-fPIC", "-std=gnu11", *EXACT_FLAGS, f"-I{SOURCES[0].parent}"
        _run(COMPILE_S, *compiler, *flags, "-c", str(whole), "-o", str(object_file))
        # Without an OpenMP runtime of its own: two would fight for the cores.
        _run(COMPILE_S, *compiler, "-shared", str(object_file), "-o", str(linked), "-lm")
        return linked.replace(folder / f"{key}-{_digest(linked)}.so")


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _run(seconds: float, *command: str) -> str:
    """What it prints. One that takes longer is ended, with what it has started."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
    ) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, output, errors)
    return output


def load(path: Path) -> ctypes.CDLL:
    ctypes.CDLL(_openmp_runtime(), mode=ctypes.RTLD_GLOBAL)  # it is loaded already; now its names can be found
    library = ctypes.CDLL(str(path))
    for name, kinds in (FUNCTIONS | {"replay": ["pointer", "int"]}).items():
        function = getattr(library, name)
        function.restype = None
        function.argtypes = [C_TYPES[kind] for kind in kinds]
    return library


def _openmp_runtime() -> str:
    """The one that torch has brought into this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[1] + line.partition("/")[2]
        if Path(path).name.startswith(OPENMP_RUNTIMES):
            return path
    raise OSError("torch has no OpenMP runtime")
