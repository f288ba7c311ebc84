"""native*.c, compiled for this machine's CPU once, and loaded. What its functions do, native.py says."""

import ctypes
import hashlib
import os
import platform
import re
import subprocess
import tempfile
from pathlib import Path

IS_ARM = platform.machine() == "aarch64"
SOURCES = [Path(__file__).with_name(name) for name in ("native.c", "native_attention.c", *(["native_linear.c"] if IS_ARM else []))]
OPENMP_RUNTIMES = "libgomp", "libiomp5", "libomp"
COMPILE_S = 120.0
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
    source = "\n".join(f'#include "{path}"' for path in SOURCES)
    loop = f"for (const int64_t *call = calls, *end = calls + {CALL_WORDS} * count; call < end; call += {CALL_WORDS})"
    return f"{source}\nvoid replay(const int64_t *calls, int64_t count) {{ {loop} switch (call[0]) {{\n{cases}}} }}\n"


def compiled(folder: Path) -> Path:
    """For this source, compiler and CPU: another of them leaves what is there alone."""
    compiler = os.environ.get("CC", "cc")
    native = "-mcpu=native" if IS_ARM else "-march=native"
    version, features = _run(compiler, "--version"), _run(compiler, native, "-dM", "-E", "-x", "c", os.devnull)
    source = "".join((_replay_source(), *EXACT_FLAGS, *(path.read_text() for path in SOURCES)))
    made = folder / f"{hashlib.sha256((source + version + features).encode()).hexdigest()[:16]}.so"
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as staging:
            whole, object_file, linked = (f"{staging}/native.{suffix}" for suffix in ("c", "o", "so"))
            Path(whole).write_text(_replay_source())
            _run(compiler, native, "-O3", "-fopenmp", "-fPIC", "-std=gnu11", *EXACT_FLAGS, "-c", whole, "-o", object_file)
            _run(
                compiler, "-shared", object_file, "-o", linked, "-lm"
            )  # without an OpenMP runtime of its own: two would fight for the cores
            Path(linked).replace(made)
    return made


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMPILE_S).stdout


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
