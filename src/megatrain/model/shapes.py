"""What a plan has to know of a model, as plain numbers: from a live model, or from a config without any weights.

Only shapes, dtypes and `requires_grad` of parameters are looked at, so the parameters may be on the meta device, or
already live in an engine's store.
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
from megatrain.geometry import MIN_COMPRESSED_NUMEL, padded
from megatrain.model import fields, transformers_api
from megatrain.model.blocks import BlockSpec, layered_blocks
from megatrain.model.dtypes import Dtypes, natural_precision
from megatrain.model.trace import TracedLayer, trace
from megatrain.model.transformers_api import config_of

FORMULA_FAMILIES = (
    "gemma2", "gpt_oss", "granite", "llama", "mistral", "mixtral", "olmo2", "qwen2", "qwen3", "qwen3_moe"
)  # fmt: skip
"""Families whose layers the planner's formula was made for, and held to: measured on a GPU, or counted on the CPU."""


@dataclass(frozen=True, kw_only=True)
class SlabShape:
    """Parameters of a block that share a dtype in the store, and whether they train."""

    parameters: int
    numel: int
    """`parameters`, with every one of them padded, before the slab is padded to whole pages."""
    vectors: int
    """Padded elements of those that keep FP32 moments whatever is asked for."""
    trains: bool
    """False: frozen, it has weights and nothing else."""
    itemsize: int | None
    """Bytes per element if that is fixed (kept in FP32, or not a float at all); None: the precision of the run."""


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """One block: what it weighs, and what it computes for a token."""

    name: str
    kind: str
    """"layer", "embedding", "head" or "other"."""
    slabs: tuple[SlabShape, ...]
    """What it owns; parameters that an earlier block has too are that block's."""
    matmul_parameters: int
    """Parameters that take part in matrix products for one token: of the experts, those that a token is sent to."""
    expert_matmul_parameters: int
    """Those of them that belong to routed experts, whose products are smaller and slower."""
    hidden_size: int
    intermediate_size: int
    """Width of the MLP that one token passes: of the experts, those it is sent to, and the shared ones."""
    experts: int
    """Routed experts; 0: dense."""
    experts_per_token: int
    expert_biases: bool
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    norms: int = 0
    """Norms over the hidden size that are written out in FP32 (RMSNorm as transformers has it)."""
    fused_norms: int = 0
    """The same as one operation (LayerNorm)."""
    head_norms: bool = False
    """Whether queries and keys are normed too."""
    span: int = 0
    """Tokens that a token attends to at most (a sliding window); 0: all before it."""
    attends: bool = False
    """Whether it has attention that takes a mask, or writes scores."""
    tied: bool
    """Whether it owns, or uses, parameters that several blocks share."""
    traced: TracedLayer | None = None
    """What was counted of its activations; None: they follow the planner's formula, or have to."""

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
        """Of keys, and of values."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A model as a plan sees it; blocks in the order of the forward."""

    name: str
    blocks: tuple[BlockShape, ...]
    vocab_size: int
    precision: str
    """"bf16" or "fp32": what it was loaded in, or what its config says ("bf16" if it says nothing)."""
    attention: str
    """The attention that transformers chose: "sdpa", "eager"..."""
    logits: str = "chunked"
    """What training has of them: "none", a "chunked" head's, or all of them "whole" (`logits_kind`)."""
    softcap: bool = False
    """Whether they are bounded by a hyperbolic tangent."""
    fp32_logits: bool = False
    """Whether the model turns them into FP32."""
    positions: int = 0
    """Tokens in the longest sequence that its config names; 0: it names none."""
    guessed: tuple[str, ...] = ()
    """Classes of layers whose activations nobody has counted: the planner's formula may be wrong for them."""

    @property
    def parameters(self) -> int:
        return sum(block.parameters for block in self.blocks)

    @property
    def trainable(self) -> int:
        return sum(block.trainable for block in self.blocks)

    @property
    def matmul_parameters(self) -> int:
        """Active per token, the head once: what TFLOP/s are counted with."""
        return sum(block.matmul_parameters for block in self.blocks)


def describe(source: Any) -> ModelShape:
    """The shape of a model: a live one, a transformers config, or the name or folder of one that is on this machine."""
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
        said = str(error).strip() or type(error).__name__
        if os.path.exists(path):
            paragraph = " ".join(said.split("\n\n")[0].split()).rstrip(".")
            raise SettingsError(f"the config of {name!r} cannot be used: {paragraph}.") from error
        raise SettingsError(
            f"no config was found for {name!r}: it is neither a file nor a directory here, and as a name of a model: "
            f"{said.splitlines()[0].rstrip('.')}; pass a directory with a config.json."
        ) from error


def _describe(model: torch.nn.Module, config: Any) -> ModelShape:
    known = transformers_api.load()
    found = layered_blocks(model, known)
    if not found:
        raise NothingToStream(f"{type(model).__name__} has no repeated layers, so there is nothing to plan.")
    text = config.get_text_config() if config is not None else None
    # What transformers chose when it built the model is not in a config that was only read; a dtype is only there.
    built = config_of(model)
    attention = None if built is None else getattr(built.get_text_config(), "_attn_implementation", None)
    skeletal = config is not None and all(parameter.device.type == "meta" for parameter in model.parameters())
    loaded = (getattr(config, "dtype", None) or torch.bfloat16) if skeletal else Dtypes(model).loaded
    reader = _ShapeReader(model, text, found)
    layers = [item for item in found if item.layer]
    traced = _traced(model, [item.name for item in layers])
    guessed = {
        type(item.module).__name__ for item in layers if item.name not in traced and not reader.uses_formula(item)
    }
    logits, fp32 = transformers_api.logits_kind(model, [item.module for item in found], known.causal_loss)
    return ModelShape(
        name=str(getattr(config, "name_or_path", "") or type(model).__name__),
        blocks=tuple(reader.block(item, traced.get(item.name)) for item in found),
        vocab_size=int(getattr(text, "vocab_size", 0) or 0),
        precision=natural_precision(loaded),
        attention=str(attention or "sdpa"),
        logits=logits,
        fp32_logits=fp32,
        softcap=bool(getattr(text, "final_logit_softcapping", None)),
        positions=int(getattr(text, "max_position_embeddings", 0) or 0),
        guessed=tuple(sorted(guessed)),
    )


_trace_cache: dict[tuple[Any, ...], dict[str, TracedLayer]] = {}
"""A class and its config → what was counted: a model is described again by each part that plans with it."""


def _traced(model: torch.nn.Module, layers: Sequence[str]) -> dict[str, TracedLayer]:
    """What was counted of layers that the planner's formula was not made for; nothing of other libraries' models."""
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
            twin = meta_model(config, type(model))
            _trace_cache[key] = trace(twin, layers, bool(getattr(config, "is_encoder_decoder", False)))
    except (SettingsError, TypeError):
        return {}  # a model that its config alone does not make, or a config that cannot be written
    return _trace_cache[key]


def meta_model(config: Any, cls: Any = None) -> torch.nn.Module:
    """The model without weights: of a class, else of that which the config names, else of the one that fits it best."""
    import transformers

    # Constructors write to it.
    config = copy.deepcopy(config)
    asked = next(iter(getattr(config, "architectures", None) or ()), None) or ""
    cls = cls or getattr(transformers, asked, None)
    try:
        with torch.device("meta"):
            named = hasattr(cls, "_from_config")
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


class _ShapeReader:
    """Turns modules into block shapes."""

    def __init__(self, model: Any, text: Any, found: Sequence[BlockSpec]) -> None:
        self._model, self._text = model, text
        self._dtypes = Dtypes(model)
        self._head = transformers_api.output_embedding(model)
        used = [(item.name, {id(parameter) for _, parameter in item.parameters()}) for item in found]
        self._users = Counter(parameter for _, parameters in used for parameter in parameters)
        self._owners = {parameter: name for name, parameters in reversed(used) for parameter in parameters}
        """The first block that has a parameter."""

    def uses_formula(self, item: BlockSpec) -> bool:
        """Whether a layer is of a family that the planner's formula was made for."""
        return getattr(self._config(item), "model_type", None) in FORMULA_FAMILIES

    def block(self, item: BlockSpec, traced: TracedLayer | None) -> BlockShape:
        named = [(f"{item.name}.{name}".lstrip("."), parameter) for name, parameter in item.parameters()]
        kind, config = self._kind(item), self._config(item)
        experts, per_token = fields.experts(config, named) if kind == "layer" else (0, 0)
        hidden, intermediate = fields.widths(config, named, experts, per_token)
        routed = sum(int(p.numel()) for n, p in named if experts and fields.is_routed(n) and p.ndim > 1)
        dense = sum(int(p.numel()) for n, p in named if p.ndim > 1 and not (experts and fields.is_routed(n)))
        active = routed * per_token // experts if experts else 0
        layer: dict[str, Any] = {}
        if kind == "layer":
            layer = fields.attention(config, hidden) | fields.norms(item.module, hidden)
            # Repeated modules that are no decoder layers (projections) have no config of their own, and no attention.
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
        """What describes a block: of a layer its own config, else that of the model around it (a vision tower's)."""
        found, name = _nested_config(item.module) if item.layer else None, item.name
        while found is None and name:
            name = name.rpartition(".")[0]
            found = config_of(self._model.get_submodule(name))
        return found.get_text_config() if found is not None else self._text

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
                vectors=sum(padded(p.numel()) for p in members if p.ndim < 2 or p.numel() < MIN_COMPRESSED_NUMEL),
                trains=trains,
                itemsize=None if fixed is None else fixed.itemsize,
            )
            for (fixed, trains), members in groups.items()
        )


def _nested_config(module: torch.nn.Module) -> Any:
    """The first config that a module or a part of it has."""
    return next((config for part in module.modules() if (config := config_of(part)) is not None), None)
