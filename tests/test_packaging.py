"""A wheel from a clean copy works outside the repository, also beside the Hugging Face package named `kernels`."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ["deployments", "cluster", "models", "kernels"]
IMPORT_ALL = """
import importlib
for name in modules:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "triton" or not name.startswith("loray.kernels."):  # which a machine without a GPU may lack
            raise
print("all")
"""
pytestmark = pytest.mark.slow


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("copy")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    pip("wheel", "--no-deps", "--wheel-dir", str(copy / "out"), str(copy))
    return next((copy / "out").glob("loray-*.whl"))


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    pip("install", "--no-deps", "--target", str(folder), str(wheel))
    return folder


def run(code: str, *sites: Path, cwd: Path) -> str:
    return answer(start(code, *sites, cwd=cwd))


def start(code: str, *sites: Path, cwd: Path) -> subprocess.Popen[str]:
    """A process that sees the given folders and not the repository's own editable install."""
    lines = [
        "import sys",
        "sys.meta_path = [finder for finder in sys.meta_path if 'editable' not in str(getattr(finder, '__module__', finder)).lower()]",
        "sys.path_hooks = [hook for hook in sys.path_hooks if 'editable' not in str(getattr(hook, '__module__', hook)).lower()]",
        "sys.path_importer_cache.clear()",
        code,
    ]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(str(site) for site in sites)}
    command = [sys.executable, "-c", "\n".join(lines)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=cwd)


def answer(process: subprocess.Popen[str]) -> str:
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    return stdout.strip()


def test_the_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {f"loray/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    assert names == expected | {f"loray/kernels/native{part}.c" for part in ("", "_attention", "_linear_arm", "_linear_x86")}


def test_the_installed_package_imports_outside_the_repository(site: Path, tmp_path: Path) -> None:
    code = "import loray.deployments.config, loray.models.checkpoint as m; print(m.__file__)"
    assert run(code, site, cwd=tmp_path) == str(site / "loray/models/checkpoint.py")


def test_every_module_imports_from_the_installed_package(site: Path, tmp_path: Path) -> None:
    modules = [
        ".".join(("loray", *path.relative_to(ROOT).with_suffix("").parts)) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")
    ]
    assert run(f"modules = {modules}{IMPORT_ALL}", site, cwd=tmp_path) == "all"


def test_it_lives_beside_the_hugging_face_package_named_kernels(site: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    pip("install", "--no-deps", "--target", str(theirs), "kernels")
    ours = sorted(path.stem for path in (ROOT / "kernels").glob("*.py"))[0]
    imports = f"import kernels, transformers.models.llama.modeling_llama, loray.kernels.{ours} as ours"
    code = f"{imports}; print(kernels.__file__); print(ours.__file__)"
    expected = [str(theirs / "kernels/__init__.py"), str(site / f"loray/kernels/{ours}.py")]
    folders = (tmp_path, ROOT)  # in the latter a folder `kernels` lies in the way
    for process in [start(code, site, theirs, cwd=folder) for folder in folders]:
        assert answer(process).splitlines() == expected
