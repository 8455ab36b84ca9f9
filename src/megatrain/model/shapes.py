"""Describes a model as plain numbers for the planner, from a live model or from a config alone.

Shapes, dtypes and `requires_grad` of parameters are read, and a few values of frozen ones that are in RAM. They may be
on the meta device or in an engine's store.
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatrain.errors import NothingToStream, SettingsError
from megatrain.geometry import compresses_moments, padded
from megatrain.model import fields, transformers_api
from megatrain.model.blocks import BlockSpec, layered_blocks
from megatrain.model.dtypes import Dtypes, has_low_bits, natural_precision
from megatrain.model.trace import TracedLayer, trace
from megatrain.model.transformers_api import config_of

FORMULA_FAMILIES = (
    "gemma2", "gpt_oss", "granite", "llama", "mistral", "mixtral", "olmo2", "qwen2", "qwen3", "qwen3_moe"
)  # fmt: skip
"""Model types for which the planner's activation formula was verified, on a GPU or by tracing."""


@dataclass(frozen=True, kw_only=True)
class SlabShape:
    """Parameters of a block with the same stored dtype and the same `requires_grad`."""

    parameters: int
    numel: int
    """Elements with every parameter padded, before the slab is padded to pages."""
    vectors: int
    """Padded elements of parameters whose moments are always FP32."""
    trains: bool
    """False: frozen, so only weights are stored."""
    itemsize: int | None
    """Bytes per element if fixed (kept in FP32, or not a float); None: depends on the precision of the run."""
    low_bits: bool = False
    """Whether frozen weights were loaded with bits that BF16 does not have. In BF16 they have a residual then."""


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """One block: its parameters and its work per token."""

    name: str
    kind: str
    """"layer", "embedding", "head" or "other"."""
    slabs: tuple[SlabShape, ...]
    """Its own parameters. A tied parameter belongs to the first block that has it."""
    matmul_parameters: int
    """Parameters in matrix products for one token, counting only the experts that a token is sent to."""
    expert_matmul_parameters: int
    """Those that belong to routed experts, whose products are smaller and slower."""
    hidden_size: int
    intermediate_size: int
    """MLP width for one token: the experts that it is sent to, and the shared ones."""
    experts: int
    """Routed experts; 0: dense."""
    experts_per_token: int
    expert_biases: bool
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    norms: int = 0
    """Norms over the hidden size that consist of several FP32 operations (transformers' RMSNorm)."""
    fused_norms: int = 0
    """Norms over the hidden size that are one operation (LayerNorm)."""
    head_norms: bool = False
    """Whether queries and keys are normed."""
    span: int = 0
    """The largest number of tokens that a token attends to (a sliding window); 0: all previous ones."""
    attends: bool = False
    """Whether it has attention that takes a mask or writes scores."""
    tied: bool
    """Whether it shares parameters with another block."""
    traced: TracedLayer | None = None
    """Traced sizes of its activations; None: the planner's formula is used."""

    @property
    def parameters(self) -> int:
        return sum(slab.parameters for slab in self.slabs)

    @property
    def trainable(self) -> int:
        return sum(slab.parameters for slab in self.slabs if slab.trains)

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """The width of keys; that of values is the same."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A model as the planner sees it. Blocks are in forward order."""

    name: str
    blocks: tuple[BlockShape, ...]
    vocab_size: int
    precision: str
    """"bf16" or "fp32", as loaded or as in the config (default "bf16")."""
    attention: str
    """The attention implementation of transformers: "sdpa", "eager"..."""
    logits: str = "chunked"
    """How training computes the logits: "none", "chunked" or "whole" (`logits_of`)."""
    softcap: bool = False
    """Whether the logits are capped with a tanh."""
    fp32_logits: bool = False
    """Whether the model casts the logits to FP32."""
    bare_head: bool = False
    """Whether the logits are the product with one matrix and nothing else."""
    positions: int = 0
    """The maximum sequence length in the config; 0: not given."""
    guessed: tuple[str, ...] = ()
    """Layer classes without traced sizes, for which the planner's formula may be wrong."""

    @property
    def parameters(self) -> int:
        return sum(block.parameters for block in self.blocks)

    @property
    def trainable(self) -> int:
        return sum(block.trainable for block in self.blocks)

    @property
    def matmul_parameters(self) -> int:
        """Parameters in matrix products for one token; TFLOP/s are computed from it."""
        return sum(block.matmul_parameters for block in self.blocks)


def describe(source: Any) -> ModelShape:
    """The shape of a model, a transformers config, or a model name or directory that is available locally."""
    if isinstance(source, ModelShape):
        return source
    if isinstance(source, torch.nn.Module):
        return _describe(source, config_of(source))
    from transformers import PretrainedConfig

    if isinstance(source, str | os.PathLike):
        source = _read(os.fspath(source))
    if not isinstance(source, PretrainedConfig):
        raise SettingsError(f"a plan needs a model, a transformers config or a name, not {type(source).__name__}.")
    return _describe(meta_model(source), source)


def _read(name: str) -> Any:
    """The config of a model by its name, its directory or the path of its config.json; weights are not read."""
    from transformers import AutoConfig

    path = os.path.expanduser(name)
    if not os.path.exists(path):
        path = name
        if name.endswith(".json") or name.startswith(("/", ".", "~")) or name.count("/") > 1:
            raise SettingsError(
                f"there is no file or directory {name!r}; pass a directory with a config.json, the config.json itself, "
                "or the name of a model."
            )
    elif os.path.isdir(path) and not os.path.isfile(os.path.join(path, "config.json")):
        raise SettingsError(f"the directory {name!r} has no config.json; pass the directory of a saved model.")
    try:
        # False: transformers would ask on stdout whether it may run the model's own code.
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:
        # Whatever the hub makes of a name, or a config class of a field that is wrong.
        if "trust_remote_code" in str(error):
            raise SettingsError(
                f"{name!r} needs Python code from its own repository, which a plan does not run; build the model with "
                "trust_remote_code=True and pass it to megatrain.plan in Python."
            ) from error
        message = str(error).strip() or type(error).__name__
        if os.path.exists(path):
            paragraph = " ".join(message.split("\n\n")[0].split()).rstrip(".")
            raise SettingsError(f"the config of {name!r} cannot be used: {paragraph}.") from error
        raise SettingsError(
            f"no config was found for {name!r}: it is neither a file nor a directory here, and as a name of a model: "
            f"{message.splitlines()[0].rstrip('.')}; pass a directory with a config.json."
        ) from error


def _describe(model: torch.nn.Module, config: Any) -> ModelShape:
    api = transformers_api.load()
    specs = layered_blocks(model, api)
    if not specs:
        raise NothingToStream(f"{type(model).__name__} has no repeated layers, so there is nothing to plan.")
    text = config.get_text_config() if config is not None else None
    # Only a built model has the attention implementation, and only the original config has the dtype.
    built = config_of(model)
    attention = None if built is None else getattr(built.get_text_config(), "_attn_implementation", None)
    skeletal = config is not None and all(parameter.device.type == "meta" for parameter in model.parameters())
    loaded = (getattr(config, "dtype", None) or torch.bfloat16) if skeletal else Dtypes(model).loaded
    reader = _ShapeReader(model, text, specs)
    layers = [item for item in specs if item.layer]
    traced = _traced(model, [item.name for item in layers])
    guessed = {
        type(item.module).__name__ for item in layers if item.name not in traced and not reader.uses_formula(item)
    }
    logits = transformers_api.logits_of(model, [item.module for item in specs], api.causal_loss)
    return ModelShape(
        name=str(getattr(config, "name_or_path", "") or type(model).__name__),
        blocks=tuple(reader.block(item, traced.get(item.name)) for item in specs),
        vocab_size=int(getattr(text, "vocab_size", 0) or 0),
        precision=natural_precision(loaded),
        attention=str(attention or "sdpa"),
        logits=logits.kind,
        fp32_logits=logits.fp32,
        bare_head=logits.bare,
        softcap=bool(getattr(text, "final_logit_softcapping", None)),
        positions=int(getattr(text, "max_position_embeddings", 0) or 0),
        guessed=tuple(sorted(guessed)),
    )


_trace_cache: dict[tuple[Any, ...], dict[str, TracedLayer]] = {}
"""Class, config and layers → traced sizes. One model may be described several times."""


def _traced(model: torch.nn.Module, layers: Sequence[str]) -> dict[str, TracedLayer]:
    """Traced sizes of layers that the planner's formula does not cover; empty for models of other libraries."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return {}
    config = config_of(model)
    text = config.get_text_config()
    if text.model_type in FORMULA_FAMILIES:
        return {}
    chosen = [getattr(text, name, None) for name in ("_attn_implementation", "_experts_implementation")]
    try:
        key = type(model), config.to_json_string(), *chosen, *layers
        if key not in _trace_cache:
            on_meta = meta_model(config, type(model))
            _trace_cache[key] = trace(on_meta, layers, bool(getattr(config, "is_encoder_decoder", False)))
    except (SettingsError, TypeError):
        return {}  # the model cannot be built from its config, or the config cannot be serialized
    return _trace_cache[key]


def meta_model(config: Any, cls: Any = None) -> torch.nn.Module:
    """Build the model on the meta device: of class `cls`, else the config's architecture, else the best auto class."""
    import transformers

    # Constructors may modify it.
    config = copy.deepcopy(config)
    architecture = next(iter(getattr(config, "architectures", None) or ()), None) or ""
    cls = cls or getattr(transformers, architecture, None)
    try:
        with torch.device("meta"):
            named = hasattr(cls, "_from_config")
            built: torch.nn.Module = cls._from_config(config) if named else _auto(config).from_config(config)
    except ImportError:
        raise  # names the missing package
    except Exception as error:
        # A constructor may raise anything if a field of the config is missing.
        message = (str(error).strip().splitlines() or [""])[0]
        raise SettingsError(
            f"transformers cannot build a model from this {type(config).__name__} ({type(error).__name__}: {message}); "
            "complete the config, or plan with a model."
        ) from error
    return built


def _auto(config: Any) -> Any:
    """The auto class for a config that names no architecture."""
    import transformers as hf

    causal = (hf.AutoModelForCausalLM, hf.MODEL_FOR_CAUSAL_LM_MAPPING)
    pairs = (hf.AutoModelForSeq2SeqLM, hf.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING)
    speech = (hf.AutoModelForSpeechSeq2Seq, hf.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING)
    images = (hf.AutoModelForImageTextToText, hf.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    order = [pairs, speech, causal, images] if getattr(config, "is_encoder_decoder", False) else [causal, images, pairs]
    # For these configs AutoModelForCausalLM builds only the language model.
    if getattr(config, "vision_config", None) is not None:
        order.insert(0, images)
    # For custom code in the config's directory any auto class works.
    return next((auto for auto, known in order if type(config) in known), order[0][0])


class _ShapeReader:
    """Turns modules into block shapes."""

    def __init__(self, model: Any, text: Any, specs: Sequence[BlockSpec]) -> None:
        self._model, self._text = model, text
        self._dtypes = Dtypes(model)
        self._head = transformers_api.output_embedding(model)
        used = [(item.name, {id(parameter) for _, parameter in item.parameters()}) for item in specs]
        self._users = Counter(parameter for _, parameters in used for parameter in parameters)
        self._owners = {parameter: name for name, parameters in reversed(used) for parameter in parameters}
        """Parameter → the first block that has it."""

    def uses_formula(self, item: BlockSpec) -> bool:
        """Whether the planner's formula covers this layer's model type."""
        return getattr(self._config(item), "model_type", None) in FORMULA_FAMILIES

    def block(self, item: BlockSpec, traced: TracedLayer | None) -> BlockShape:
        named = [(f"{item.name}.{name}".lstrip("."), parameter) for name, parameter in item.parameters()]
        kind, config = self._kind(item), self._config(item)
        experts, per_token = fields.experts(config, named) if kind == "layer" else (0, 0)
        hidden, intermediate = fields.widths(config, named, experts, per_token)
        matrices = [(n, p) for n, p in named if experts and fields.is_routed(n) and p.ndim > 1 and "bias" not in n]
        routed = sum(int(p.numel()) for _, p in matrices)
        dense = sum(int(p.numel()) for n, p in named if p.ndim > 1 and not (experts and fields.is_routed(n)))
        active = routed * per_token // experts if experts else 0
        layer: dict[str, Any] = {}
        if kind == "layer":
            layer = fields.attention(config, hidden) | fields.norms(item.module, hidden)
            # Repeated modules that are not decoder layers (projections) have no config and no attention.
            layer["span"] = fields.span(config, item.name) if _nested_config(item.module) is not None else 0
            layer["attends"] = fields.attends(config, item.name, item.module)
        return BlockShape(
            name=item.label,
            kind=kind,
            slabs=self._slabs(item.name, named),
            matmul_parameters=0 if kind == "embedding" else dense + active,
            expert_matmul_parameters=active,
            hidden_size=hidden,
            intermediate_size=intermediate,
            experts=experts,
            experts_per_token=per_token,
            expert_biases=any(fields.is_routed(name) and "bias" in name for name, _ in named),
            tied=any(self._users[id(parameter)] > 1 for _, parameter in named),
            traced=traced,
            **layer,
        )

    def _kind(self, item: BlockSpec) -> str:
        if item.layer:
            return "layer"
        if item.module is self._head:
            return "head"
        return "embedding" if isinstance(item.module, torch.nn.Embedding) else "other"

    def _config(self, item: BlockSpec) -> Any:
        """The config that describes a block: the layer's own, else that of an enclosing model (a vision tower)."""
        config, name = _nested_config(item.module) if item.layer else None, item.name
        while config is None and name:
            name = name.rpartition(".")[0]
            config = config_of(self._model.get_submodule(name))
        return config.get_text_config() if config is not None else self._text

    def _slabs(self, owner: str, named: Sequence[tuple[str, torch.Tensor]]) -> tuple[SlabShape, ...]:
        groups: dict[tuple[torch.dtype | None, bool], list[torch.Tensor]] = {}
        seen: set[int] = set()
        for name, parameter in named:
            if self._owners[id(parameter)] == owner and id(parameter) not in seen:
                seen.add(id(parameter))
                fixed = self._dtypes.fixed(name, parameter)
                groups.setdefault((fixed, parameter.requires_grad), []).append(parameter)
        return tuple(
            SlabShape(
                parameters=sum(p.numel() for p in members),
                numel=sum(padded(p.numel()) for p in members),
                vectors=sum(padded(p.numel()) for p in members if not compresses_moments(p.shape)),
                trains=trains,
                itemsize=None if fixed is None else fixed.itemsize,
                low_bits=not trains and any(map(has_low_bits, members)),
            )
            for (fixed, trains), members in groups.items()
        )


def _nested_config(module: torch.nn.Module) -> Any:
    """The first config of a module or its submodules."""
    return next((config for part in module.modules() if (config := config_of(part)) is not None), None)
