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
    activation: str
    score_scale: float
    windows: tuple[int, ...]  # sliding window of each layer, 0 = none
    rope_kinds: tuple[str, ...]  # key into the config's rotary parameters for each layer, "" = there is only one set
    rotary_share: float = 1.0  # of each head
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
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
    """Each family reads the fields that its class in transformers reads, and no others."""
    plain = Variant(
        activation=getattr(config, "hidden_act", None) or config.hidden_activation,
        score_scale=head_dim_of(config) ** -0.5,
        windows=(0,) * config.num_hidden_layers,
        rope_kinds=("",) * config.num_hidden_layers,
    )
    if config.model_type not in VARIANTS:
        raise ValueError(f"config.json: model_type {config.model_type!r} is none of Llama's family: {', '.join(VARIANTS)}")
    return VARIANTS[config.model_type](plain, config)


def head_dim_of(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _windows(config: PretrainedConfig) -> tuple[int, ...]:
    """Of the layers that config.layer_types names."""
    return tuple((config.sliding_window or 0) if kind == "sliding_attention" else 0 for kind in config.layer_types)


def _llama(plain: Variant, config: PretrainedConfig) -> Variant:
    return replace(_with_attention_bias(plain, config), mlp_bias=config.mlp_bias)


def _with_attention_bias(plain: Variant, config: PretrainedConfig) -> Variant:
    return replace(plain, qkv_bias=config.attention_bias, o_bias=config.attention_bias)


def _mistral(plain: Variant, config: PretrainedConfig) -> Variant:
    return replace(plain, windows=(config.sliding_window or 0,) * config.num_hidden_layers)


def _phi3(plain: Variant, config: PretrainedConfig) -> Variant:
    share = config.rope_parameters.get("partial_rotary_factor", 1.0)
    return replace(_mistral(plain, config), is_fused=True, rotary_share=share)


def _qwen2(plain: Variant, config: PretrainedConfig) -> Variant:
    return replace(plain, qkv_bias=True, windows=_windows(config))


def _qwen3(plain: Variant, config: PretrainedConfig) -> Variant:
    return replace(_with_attention_bias(plain, config), has_qk_norm=True, windows=_windows(config))


def _granite(plain: Variant, config: PretrainedConfig) -> Variant:
    return replace(
        _llama(plain, config),
        score_scale=config.attention_multiplier,
        embedding_scale=config.embedding_multiplier,
        residual_scale=config.residual_multiplier,
        logit_scale=1 / config.logits_scaling,
    )


def _solar(plain: Variant, config: PretrainedConfig) -> Variant:
    keeps = (frozenset(config.bskcn_1), frozenset(config.bskcn_2))
    mixes = (frozenset(config.bskcn_3), frozenset(config.bskcn_4))
    return replace(_llama(plain, config), skips=Skips(keeps, mixes, config.bskcn_tv[1]))


def _gemma(plain: Variant, config: PretrainedConfig) -> Variant:
    if getattr(config, "use_bidirectional_attention", None):
        raise ValueError("Gemma with use_bidirectional_attention is an encoder, not a causal language model")
    return replace(_with_attention_bias(plain, config), norm_offset=1.0, embedding_scale=config.hidden_size**0.5)


def _gemma2(plain: Variant, config: PretrainedConfig) -> Variant:
    return replace(
        _gemma(plain, config),
        activation=config.hidden_activation,
        windows=_windows(config),
        has_post_norms=True,
        score_scale=config.query_pre_attn_scalar**-0.5,
        score_cap=config.attn_logit_softcapping or 0.0,
        logit_cap=config.final_logit_softcapping or 0.0,
    )


def _gemma3(plain: Variant, config: PretrainedConfig) -> Variant:
    # transformers reads attn_logit_softcapping here and never applies it
    return replace(_gemma2(plain, config), has_qk_norm=True, rope_kinds=tuple(config.layer_types), score_cap=0.0)


VARIANTS: dict[str, Callable[[Variant, PretrainedConfig], Variant]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "granite": _granite,
    "solar": _solar,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
}
