"""How an architecture is served, and which are refused."""

import subprocess
import sys

import pytest
from transformers import LlamaConfig

from loray.models.architectures import NATIVE, UnsupportedModel, choose
from loray.models.registry import ARCHITECTURES, model_class


@pytest.mark.parametrize("name", NATIVE)
def test_an_architecture_with_a_file_is_served_natively(name: str) -> None:
    assert choose({"architectures": [name]}, "auto", False) == "native"


def test_a_single_name_need_not_be_a_list() -> None:
    assert choose({"architectures": "LlamaForCausalLM"}, "auto", False) == "native"
    assert model_class(LlamaConfig(architectures="LlamaForCausalLM")) is ARCHITECTURES["LlamaForCausalLM"]


def test_it_can_be_served_through_transformers_when_asked() -> None:
    assert choose({"architectures": ["LlamaForCausalLM"]}, "transformers", False) == "transformers"


@pytest.mark.parametrize("name", ["BloomForCausalLM", "MptForCausalLM", "FalconForCausalLM", "GPTBigCodeForCausalLM", "PhiForCausalLM"])
def test_any_other_causal_model_goes_through_transformers(name: str) -> None:
    assert choose({"architectures": [name]}, "auto", False) == "transformers"
    with pytest.raises(UnsupportedModel, match=f"native does not know {name}"):
        choose({"architectures": [name]}, "native", False)


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
        {"architectures": ["BertForMaskedLM"]},
        {"architectures": ["BartForCausalLM"], "is_encoder_decoder": True},
        {"architectures": ["MambaForCausalLM"]},
        {"architectures": []},
        {},
    ],
)
def test_what_neither_way_can_serve_is_refused_with_what_can(config: dict[str, object]) -> None:
    with pytest.raises(UnsupportedModel) as refusal:
        choose(config, "auto", False)
    assert all(name in str(refusal.value) for name in NATIVE)
    assert "\n" not in str(refusal.value)


def test_code_that_comes_with_a_checkpoint_needs_consent() -> None:
    config = {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}}
    with pytest.raises(UnsupportedModel, match="trust_remote_code"):
        choose(config, "auto", False)
    assert choose(config, "auto", True) == "transformers"


def test_native_architectures_are_known_without_torch() -> None:
    code = "import sys; from loray.models.architectures import choose; choose({'architectures': ['OPTForCausalLM']}, 'auto', False)"
    subprocess.run([sys.executable, "-c", f"{code}; assert not {{'torch', 'transformers'}} & set(sys.modules)"], check=True)
