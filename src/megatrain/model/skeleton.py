"""A model without weights, from a config or the name of one."""

from __future__ import annotations

import copy
from typing import Any

import torch

from megatrain.errors import SettingsError


def is_config(value: Any) -> bool:
    from transformers import PretrainedConfig

    return isinstance(value, PretrainedConfig)


def config_of(module: torch.nn.Module) -> Any:
    """The transformers config that a module has; what others call `config` says nothing here."""
    config = getattr(module, "config", None)
    return config if is_config(config) else None


def config_named(name: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise SettingsError(f"no config was found for {name!r}: {error}") from error


def skeleton(config: Any, cls: Any = None) -> torch.nn.Module:
    """The model without weights: of a class, else of that which the config names, else of the one that fits it best."""
    import transformers

    # Constructors write to it.
    config = copy.deepcopy(config)
    asked = next(iter(getattr(config, "architectures", None) or ()), None)
    cls = cls or (getattr(transformers, asked, None) if asked else None)
    try:
        with torch.device("meta"):
            named = cls is not None and hasattr(cls, "_from_config")
            built: torch.nn.Module = cls._from_config(config) if named else _auto(config).from_config(config)
    except ImportError:
        raise  # it names the package that is missing
    except Exception as error:
        # Whatever a model's constructor makes of a field that is missing.
        said = (str(error).strip().splitlines() or [""])[0]
        raise SettingsError(
            f"transformers cannot build a model from this {type(config).__name__} ({type(error).__name__}: {said}); "
            "complete the config, or plan with a model."
        ) from error
    return built


def _auto(config: Any) -> Any:
    """The kind of model that transformers has for a config which names none."""
    import transformers as hf

    causal = (hf.AutoModelForCausalLM, hf.MODEL_FOR_CAUSAL_LM_MAPPING)
    pairs = (hf.AutoModelForSeq2SeqLM, hf.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING)
    speech = (hf.AutoModelForSpeechSeq2Seq, hf.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING)
    images = (hf.AutoModelForImageTextToText, hf.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    order = [pairs, speech, causal, images] if getattr(config, "is_encoder_decoder", False) else [causal, images, pairs]
    # A causal model of such a config would be its language model alone.
    if getattr(config, "vision_config", None) is not None:
        order.insert(0, images)
    # None of them: a class of its own, in the folder of the config, is found by any.
    return next((auto for auto, known in order if type(config) in known), order[0][0])
