"""The default model's tokenizer, read without torch, is the one that transformers makes of the same files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from loray.deployments.tokenizer import Tokenizer
from loray.models.checkpoint import resolve_model
from loray.models.converted import MARKER
from tests.tiny_tokenizer import save_tiny_tokenizer, tiny_tokenizer

TEXTS = ["", " two  spaces\n\tand 1234.5", "grüße 日本語 🙂", "<|im_start|>user\nhi<|im_end|>", "def f(x):\n    return x"]
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]

pytestmark = pytest.mark.slow


def test_the_default_models_is_transformers_own() -> None:
    folder = resolve_model("smollm2-135m", None)
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    assert type(ours._tokenizer) is type(theirs)
    assert ours.special_tokens == theirs.special_tokens_map and ours.vocab_size == len(theirs)
    assert ours.chat_template(has_tools=False) == theirs.chat_template
    assert ours._tokenizer.apply_chat_template(CHAT, tokenize=False) == theirs.apply_chat_template(CHAT, tokenize=False)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours._tokenizer(text)["input_ids"] == ids
        assert ours._tokenizer.decode(ids) == theirs.decode(ids)


def test_an_ingress_needs_no_torch_for_the_default_model() -> None:
    code = f"""
import sys
from pathlib import Path
import loray.deployments.ingress
from loray.deployments.tokenizer import Tokenizer
tokenizer = Tokenizer.load(Path({str(resolve_model("smollm2-135m", None))!r}))
tokenizer._tokenizer.apply_chat_template({CHAT!r}, tokenize=False)
sys.exit("torch" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("changed", [{"tokenizer_class": "Qwen2Tokenizer"}, {"auto_map": {"AutoTokenizer": [None, "mine.Mine"]}}, None])
def test_any_other_is_chosen_by_transformers(changed: dict[str, object] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_tokenizer(tmp_path)
    if changed is not None:
        (tmp_path / MARKER).write_text("{}")
        config = tmp_path / "tokenizer_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | changed))
    asked: list[Path] = []
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda folder, **_: asked.append(folder) or tiny_tokenizer())
    Tokenizer.load(tmp_path)
    assert asked == [tmp_path]
