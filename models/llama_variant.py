"""How each family of Llama's kind differs from Llama: a row of flags, read from its config. No layers, no tensors."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True)
class Skips:
    """Solar: before some layers the hidden state is kept; before others the one kept last is mixed in again."""

    keeps: tuple[frozenset[int], ...]  # layers that keep, for each place
    mixes: tuple[frozenset[int], ...]  # layers that mix, for each place
    weight: float  # of what was kept


@dataclass(frozen=True, slots=True)
class Variant:
    """The defaults are Llama's."""

    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    activation: str
    score_scale: float
    windows: tuple[int, ...]  # sliding window of each layer, 0 = none
    rope_kinds: tuple[str, ...]  # key into the config's rotary parameters for each layer, "" = there is only one set
    is_fused: bool = False  # the checkpoint itself has q|k|v and gate|up in one tensor each
    has_qk_norm: bool = False  # each head of q and k is normalised
    has_post_norms: bool = False  # a norm after attention and after the MLP as well
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    score_cap: float = 0.0
    logit_cap: float = 0.0
    skips: Skips | None = None


def variant_of(config: PretrainedConfig) -> Variant:
    llama = Variant(
        qkv_bias=bool(getattr(config, "attention_bias", False)),
        o_bias=bool(getattr(config, "attention_bias", False)),
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        activation=getattr(config, "hidden_act", None) or config.hidden_activation,
        score_scale=head_dim_of(config) ** -0.5,
        windows=_windows(config),
        rope_kinds=("",) * config.num_hidden_layers,
    )
    return VARIANTS[config.model_type](llama, config)


def head_dim_of(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _windows(config: PretrainedConfig) -> tuple[int, ...]:
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _as_it_is(llama: Variant, config: PretrainedConfig) -> Variant:
    return llama


def _phi3(llama: Variant, config: PretrainedConfig) -> Variant:
    return replace(llama, is_fused=True)


def _qwen2(llama: Variant, config: PretrainedConfig) -> Variant:
    return replace(llama, qkv_bias=True, o_bias=False)


def _qwen3(llama: Variant, config: PretrainedConfig) -> Variant:
    return replace(llama, has_qk_norm=True)


def _granite(llama: Variant, config: PretrainedConfig) -> Variant:
    return replace(
        llama,
        score_scale=config.attention_multiplier,
        embedding_scale=config.embedding_multiplier,
        residual_scale=config.residual_multiplier,
        logit_scale=1 / config.logits_scaling,
    )


def _solar(llama: Variant, config: PretrainedConfig) -> Variant:
    keeps = (frozenset(config.bskcn_1), frozenset(config.bskcn_2))
    mixes = (frozenset(config.bskcn_3), frozenset(config.bskcn_4))
    return replace(llama, windows=(0,) * config.num_hidden_layers, skips=Skips(keeps, mixes, config.bskcn_tv[1]))


def _gemma(llama: Variant, config: PretrainedConfig) -> Variant:
    if getattr(config, "use_bidirectional_attention", None):
        raise ValueError("Gemma with use_bidirectional_attention is an encoder, not a causal language model")
    return replace(llama, norm_offset=1.0, embedding_scale=config.hidden_size**0.5)


def _gemma2(llama: Variant, config: PretrainedConfig) -> Variant:
    return replace(
        _gemma(llama, config),
        activation=config.hidden_activation,
        has_post_norms=True,
        score_scale=config.query_pre_attn_scalar**-0.5,
        score_cap=config.attn_logit_softcapping or 0.0,
        logit_cap=config.final_logit_softcapping or 0.0,
    )


def _gemma3(llama: Variant, config: PretrainedConfig) -> Variant:
    # transformers reads attn_logit_softcapping here and never applies it
    return replace(_gemma2(llama, config), has_qk_norm=True, rope_kinds=tuple(config.layer_types), score_cap=0.0)


VARIANTS: dict[str, Callable[[Variant, PretrainedConfig], Variant]] = {
    "llama": _as_it_is,
    "mistral": _as_it_is,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "granite": _granite,
    "solar": _solar,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
}
