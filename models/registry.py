"""Makes the class of a natively served architecture known by its name."""

from collections.abc import Callable
from importlib import import_module

from transformers import AutoConfig, PretrainedConfig

from loray.models.architectures import NATIVE, architecture_names
from loray.models.decoder import Decoder
from loray.models.parallel import Parallel
from loray.models.solar import SolarConfig

DecoderClass = Callable[[PretrainedConfig, Parallel, int], Decoder]  # config, parallel, max_total_tokens


def _load(place: str) -> DecoderClass:
    module, _, name = place.partition(".")
    found: DecoderClass = getattr(import_module(f"loray.models.{module}"), name)
    return found


AutoConfig.register(SolarConfig.model_type, SolarConfig)
ARCHITECTURES = {name: _load(place) for name, place in NATIVE.items()}


def model_class(config: PretrainedConfig) -> DecoderClass:
    names = architecture_names({"architectures": config.architectures})
    return next(ARCHITECTURES[name] for name in names if name in ARCHITECTURES)
