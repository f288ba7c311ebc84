"""What adapters of a model that transformers runs may have beside plain LoRA equals PEFT, or is refused by name."""

from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from transformers import AutoConfig

from loray.models.adapter import AdapterError
from loray.models.step import AdapterLoad
from tests.models.conductor import Request, prompt_of
from tests.models.families import base_oracle, random_model
from tests.models.peft_items import save_item
from tests.models.test_causal_lm import HostedConductor
from tests.models.tiny_llama import oracle_generate

SERVED: dict[str, dict[str, Any]] = {
    "patterns": {"r": 6, "rank_pattern": {"dense": 3}, "alpha_pattern": {"query_key_value": 20}, "use_rslora": True},
    "lora_bias": {"lora_bias": True},
    "bias": {"bias": "lora_only", "target_modules": ["query_key_value", "dense_4h_to_h"]},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "DoRA": ({"use_dora": True}, "use_dora: DoRA is not supported on a model that transformers runs"),
    "embedding": ({"target_modules": ["word_embeddings"]}, "word_embeddings.*LoRA on the embedding or the head is not supported for it"),
    "head": ({"target_modules": ["lm_head"]}, "lm_head.*LoRA on the embedding or the head is not supported for it"),
    "tokens": ({"trainable_token_indices": [3]}, "trained tokens are not supported on a model that transformers runs"),
    "norms": ({"bias": "all", "target_modules": ["dense"]}, "trained biases of other modules than linears are not supported"),
}


@pytest.fixture(scope="module")
def bloom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"vocab_size": 101, "hidden_size": 40, "n_layer": 2, "n_head": 5, "initializer_range": 0.15}
    folder = tmp_path_factory.mktemp("bloom") / "base"
    random_model(AutoConfig.for_model("bloom", **sizes)).save_pretrained(folder)
    return folder


def test_patterns_and_biases_equal_peft_together_with_the_base_model(bloom: Path, tmp_path: Path) -> None:
    hosted = HostedConductor(bloom)
    requests, oracles = [Request(prompt_of(9))], [base_oracle(bloom)]
    for page, (name, settings) in enumerate(SERVED.items()):
        folder = save_item(bloom, tmp_path / name, settings)
        hosted.load(folder, [2 * page + 1])
        requests.append(Request(prompt_of(8 + page, seed=page), [2 * page + 1]))
        oracles.append(PeftModel.from_pretrained(base_oracle(bloom), folder).eval())
    for request, output, oracle in zip(requests, hosted.play(requests, chunk=4, stagger=1), oracles, strict=True):
        token_ids, logprobs = oracle_generate(oracle, request.prompt)
        assert output.token_ids == token_ids
        assert output.logprobs == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_what_only_a_native_model_can_is_refused_by_name(bloom: Path, tmp_path: Path, name: str) -> None:
    settings, message = REFUSED[name]
    folder = save_item(bloom, tmp_path / "mine", settings)
    hosted = HostedConductor(bloom)
    with pytest.raises(AdapterError, match=f"adapter 'mine': .*{message}"):
        hosted.runner.host_adapters.prepare(str(folder), "")
    assert list(hosted.step(loads=[AdapterLoad(str(folder), [0])])[2]) == [0]
