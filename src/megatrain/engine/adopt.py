"""Moves a model's weights into the store and patches the model so that its interface keeps working.

Weights move block by block and the originals are freed, so peak RAM is the model plus one block. Weights that are still
in their files (lazy.py) are read one by one. `Adoption.release` moves weights back.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from megatrain.compute.binding import untraced
from megatrain.compute.block import Block, unbind
from megatrain.engine.placement import Placement
from megatrain.engine.undo import Undo
from megatrain.errors import ModelMoved, NotEnoughMemory
from megatrain.geometry import TIERS
from megatrain.hardware import inventory
from megatrain.lazy import contents, is_lazy, ram_bytes, temporary_bytes
from megatrain.model.blocks import BlockSpec
from megatrain.model.dtypes import Dtypes, has_low_bits, natural_precision
from megatrain.model.transformers_api import TransformersApi
from megatrain.store.export import ExportTensor, exported
from megatrain.store.layout import lay_out
from megatrain.store.parameter import GradientSink, StoreTensor, as_parameter
from megatrain.store.slab import Slab
from megatrain.telemetry.notices import announce
from megatrain.telemetry.progress import progress

if TYPE_CHECKING:
    from megatrain.engine.session import Engine

Owners = dict[int, list[tuple[torch.nn.Module, str]]]
Groups = dict[tuple[torch.dtype, bool], dict[str, torch.nn.Parameter]]
RunBlock = Callable[[Block, Any, Any], Any]
SHARD_BYTES = 2 << 30
"""Shard size for weights that must be copied in order to be saved."""
_ENGINE_ATTRIBUTE = "_megatrain_engine"


@dataclass
class Adoption:
    """The changes that an engine makes to a model's parameters, and how to undo them."""

    model: torch.nn.Module
    device: torch.device
    precision: str
    placement: Placement
    saved_dtypes: Mapping[str, torch.dtype]
    """Parameter name → the dtype in which an earlier engine saved it. That engine returned all masters as FP32."""
    slabs: list[Slab] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._original_dtypes: dict[tuple[int, int], torch.dtype] = {}
        """(slab, segment) → the parameter's dtype before attaching, restored if attaching fails."""
        self._lazy_originals: dict[tuple[int, int], torch.nn.Parameter] = {}
        """(slab, segment) → the parameter itself if its values are in a file. It is put back if attaching fails."""
        self._dtypes = Dtypes(self.model, self.saved_dtypes)

    def adopt(self, specs: list[BlockSpec], add_gradient: GradientSink, run: RunBlock, undo: Undo) -> None:
        """Move weights into slabs and route the blocks' forwards through `run`."""
        undo.add(self.release)
        self._require_ram(specs)
        owners: Owners = {}
        for module in self.model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    owners.setdefault(id(parameter), []).append((module, key))
        title = f"Moving weights to {'pinned ' if self.placement.ram.pinning else ''}RAM"
        with progress(len(specs), "block", title) as advance:
            for spec in specs:
                self._move_to_store(spec, owners, add_gradient)
                # Tensors of up to 32 MiB are on the heap, which does not shrink by itself.
                self.placement.ram.trim()
                if not spec.loose:
                    self._wrap_forward(spec, run, undo)
                advance()
        for module in self.model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = buffer.to(self.device)
            if isinstance(module, torch.nn.RNNBase):
                # It would move the parameters out of the store into one flat buffer for cuDNN.
                undo.patch(module, "flatten_parameters", lambda: None)
            undo.patch(module, "_apply", _refuse_to_move(module, self.device))

    def commit(self) -> None:
        """Attaching succeeded: from now on masters may hold more bits than the original dtype."""
        self._original_dtypes.clear()
        self._lazy_originals.clear()

    def release(self) -> None:
        """Return weights and buffers to the CPU. A split master becomes FP32, so no bits are lost.

        May be called again after a Ctrl-C.
        """
        replaced: dict[int, torch.nn.Parameter] = {}
        for module in self.model.modules():
            for key, parameter in module._parameters.items():
                if isinstance(parameter, StoreTensor):
                    if id(parameter) not in replaced:
                        replaced[id(parameter)] = self._as_plain_parameter(parameter)
                    module._parameters[key] = replaced[id(parameter)]
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = buffer.cpu()
        unbind(self.model)

    def require_ram_for_release(self) -> None:
        """Raise if weights of which a half is on disk do not fit in RAM. Nothing has changed then."""
        nbytes = sum(
            parameter.numel() * _released_dtype(parameter.slab, parameter.segment).itemsize
            for parameter in self.model.parameters()
            if isinstance(parameter, StoreTensor) and _half_on_disk(parameter.slab)
        )
        if nbytes:
            try:
                self.placement.ram.require(nbytes)
            except NotEnoughMemory as refused:
                raise NotEnoughMemory(
                    f"release() would copy {nbytes / 1e9:.3g} GB of weights from disk to RAM: {refused} Use "
                    "engine.save() and load what you need."
                ) from refused

    def _as_plain_parameter(self, parameter: StoreTensor) -> torch.nn.Parameter:
        original = self._lazy_originals.get((parameter.slab.index, parameter.segment))
        if original is not None:
            original.requires_grad_(parameter.requires_grad)
            return original
        full = _released_dtype(parameter.slab, parameter.segment)
        values = parameter.master().to(self._original_dtypes.get((parameter.slab.index, parameter.segment), full))
        return torch.nn.Parameter(values, requires_grad=parameter.requires_grad)

    def _require_ram(self, specs: list[BlockSpec]) -> None:
        """Raise before the first block is moved if RAM does not suffice: each block exists twice while it is moved."""
        seen: set[int] = set()
        extra = peak = total = temporary = 0
        added = dict.fromkeys(TIERS, 0)
        for spec in specs:
            freed, before = 0, added["ram"]
            for (target, trains), parameters in self._group_parameters(spec, seen).items():
                homes = self.placement.homes(spec.label, trains)
                nbytes = lay_out([(name, p.shape) for name, p in parameters.items()], target).nbytes
                added[homes.weight.tier] += nbytes
                split = target == torch.bfloat16 and self.precision != "bf16-sr"
                # A slab has a residual for all of its parameters or for none.
                split = split and any(map(has_low_bits, parameters.values()))
                added[homes.states.tier] += nbytes * split
                # What goes to disk is written there from a copy.
                itemsize = target.itemsize * (homes.weight.tier == "disk") + 2 * (split and homes.states.tier == "disk")
                for parameter in parameters.values():
                    freed += ram_bytes(parameter)
                    temporary = max(temporary, temporary_bytes(parameter) + parameter.numel() * itemsize)
            total = added["ram"] - before
            peak = max(peak, extra + total)
            extra += total - freed
        self.placement.ram.require(peak + temporary, added["ram"])
        if self.placement.disk is not None and added["disk"]:
            self.placement.disk.require(added["disk"])
        if added["vram"]:
            inventory.require_vram(self.device, added["vram"], "the weights of resident blocks")

    def _group_parameters(self, spec: BlockSpec, seen: set[int]) -> Groups:
        """A block's parameters by (stored dtype, trains). Tied parameters belong to the first block that has them."""
        groups: Groups = {}
        for name, parameter in spec.parameters():
            if isinstance(parameter, StoreTensor) or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            full = f"{spec.name}.{name}".lstrip(".")
            dtype = self._dtypes.stored(full, parameter, self.precision)
            groups.setdefault((dtype, parameter.requires_grad), {})[full] = parameter
        return groups

    def _move_to_store(self, spec: BlockSpec, owners: Owners, add_gradient: GradientSink) -> None:
        """Move one block's parameters into slabs: one per dtype, and separate ones for frozen parameters."""
        for (dtype, trains), parameters in self._group_parameters(spec, set()).items():
            layout = lay_out([(name, p.shape) for name, p in parameters.items()], dtype)
            master = self.precision != "bf16-sr"
            slab = Slab(
                len(self.slabs),
                spec.label,
                layout,
                self.placement.homes(spec.label, trains),
                master=master,
                trains=trains,
            )
            self.slabs.append(slab)
            for index, parameter in enumerate(parameters.values()):
                self._original_dtypes[slab.index, index] = parameter.dtype
                if is_lazy(parameter):
                    self._lazy_originals[slab.index, index] = parameter
                slab.load(index, contents(parameter))
                if slab.split_master and parameter.dtype == torch.float32:
                    slab.saved[index] = self.saved_dtypes.get(layout.segments[index].name, torch.float32)
                weight = StoreTensor.of_parameter(slab, index, "weight", self.device)
                visible = as_parameter(weight, parameter.requires_grad, add_gradient)
                for module, key in owners[id(parameter)]:
                    module._parameters[key] = visible

    def _wrap_forward(self, spec: BlockSpec, run: RunBlock, undo: Undo) -> None:
        parameters: dict[str, Any] = dict(spec.module.named_parameters(remove_duplicate=False))
        locations = {name: (p.slab, p.segment) for name, p in parameters.items()}
        original = spec.module.forward
        block = Block(len(self.blocks), spec.name, spec.module, locations, parameters, original, layer=spec.layer)
        self.blocks.append(block)

        @untraced
        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return run(block, args, kwargs)

        undo.patch(spec.module, "forward", forward)


def _half_on_disk(slab: Slab) -> bool:
    return slab.weight_on_disk or (slab.residual is not None and slab.residual.is_meta)


def _released_dtype(slab: Slab, index: int) -> torch.dtype:
    # Without a residual the master is BF16; promote it to the dtype in which it is saved.
    master = slab.layout.dtype if slab.residual is None else torch.float32
    return torch.promote_types(master, slab.saved[index])


def _refuse_to_move(module: torch.nn.Module, device: torch.device) -> Callable[..., torch.nn.Module]:
    """Replaces `Module._apply`, which `.to()`, `.cuda()` and `.half()` call."""

    def _apply(fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> torch.nn.Module:
        for dtype in {tensor.dtype for tensor in (*module.parameters(), *module.buffers())}:
            try:
                moved = fn(torch.empty(0, dtype=dtype, device=device))
                target = f"{moved.device}, {moved.dtype}"
                stays = moved.device == device and moved.dtype == dtype
            except (AssertionError, RuntimeError) as unavailable:
                target, stays = f"where it was asked to ({unavailable})", False
            if not stays:
                raise ModelMoved(
                    f"{type(module).__name__} belongs to an engine on {device} and cannot be moved or cast to "
                    f"{target}: its weights live in the engine's store; close the engine and attach a new one "
                    "with other settings, or load a saved copy."
                )
        return module

    return _apply


def precision_of(model: torch.nn.Module, requested: str | None) -> str:
    loaded = Dtypes(model).loaded
    natural = natural_precision(loaded)
    if loaded == torch.float16 and requested is None:
        announce("the model was loaded in FP16: training in BF16 with an exact FP32 master")
    elif requested == "fp32" and natural == "bf16":
        announce("precision='fp32' on a model loaded in 16 bits: weights take twice the memory")
    return requested or natural


def disable_checkpointing(model: torch.nn.Module, undo: Undo) -> None:
    switched: list[Any] = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    for module in switched:
        undo.patch(module, "gradient_checkpointing", False)
    if switched:
        announce("gradient checkpointing is off: every block already recomputes its forward in the backward")


def engine_of(model: torch.nn.Module) -> Engine | None:
    """The engine that is attached to a model, open or closed."""
    return getattr(model, _ENGINE_ATTRIBUTE, None)


def patch_model(engine: Engine, api: TransformersApi, start_forward: Callable[[Any], None], undo: Undo) -> None:
    """Patch the root module: a forward pre-hook, the reference to its engine, saving and resizing."""
    model: Any = engine.model
    takes_cache = "use_cache" in inspect.signature(model.forward).parameters

    @untraced
    def prepare(module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Move inputs to the compute device, and disable the key/value cache if gradients are enabled."""
        start_forward((args, kwargs))
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(engine.device), (args, kwargs))
        if takes_cache and torch.is_grad_enabled():
            api.refuse_cache(module.training, kwargs)
            kwargs["use_cache"] = False
        return args, kwargs

    undo.add(model.register_forward_pre_hook(prepare, prepend=True, with_kwargs=True).remove)
    undo.patch(model, _ENGINE_ATTRIBUTE, engine)
    if hasattr(type(model), "save_pretrained"):
        save = model.save_pretrained
        undo.patch(model, "save_pretrained", lambda *args, **kwargs: _save_pretrained(engine, save, args, kwargs))
    if hasattr(type(model), "resize_token_embeddings"):
        undo.patch(model, "resize_token_embeddings", _refuse_resize)


def _save_pretrained(
    engine: Engine, original_save: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    signature = inspect.signature(original_save)
    call = signature.bind(*args, **kwargs)
    keywords = next((name for name, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD), "")
    # PEFT accepts the state dict only through its **kwargs.
    options = call.arguments if "state_dict" in signature.parameters else call.arguments.setdefault(keywords, {})
    state = options.get("state_dict")
    state = options["state_dict"] = engine.host_state_dict() if state is None else exported(state)
    copied = any(isinstance(tensor, ExportTensor) and tensor.copies for tensor in state.values())
    if copied and "max_shard_size" in signature.parameters:
        # An entire shard is in host memory while it is written.
        call.arguments.setdefault("max_shard_size", engine.ram.portion(SHARD_BYTES))
    with _config_with_saved_dtype(engine.model):
        return original_save(*call.args, **call.kwargs)


@contextmanager
def _config_with_saved_dtype(model: Any) -> Iterator[None]:
    """Make `save_pretrained` write the dtype of the saved weights into the config file."""
    config: Any = getattr(model, "config", None)
    first = next((p for p in model.parameters() if p.is_floating_point()), None)
    if not hasattr(type(config), "save_pretrained") or not isinstance(first, StoreTensor):
        yield
        return
    dtype = str(ExportTensor.of(first).dtype).removeprefix("torch.")

    def save(*args: Any, **kwargs: Any) -> Any:
        # Instance attributes would be written to the file too.
        config.__dict__.pop("save_pretrained", None)
        before, config.dtype = config.dtype, dtype
        try:
            return config.save_pretrained(*args, **kwargs)
        finally:
            config.dtype = before

    config.__dict__["save_pretrained"] = save
    try:
        yield
    finally:
        config.__dict__.pop("save_pretrained", None)


def _refuse_resize(*_: Any, **__: Any) -> Any:
    raise ModelMoved(
        "the embeddings of a model that belongs to an engine cannot be resized; resize them before attaching."
    )
