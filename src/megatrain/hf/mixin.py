"""`MegaMixin`: put it in front of any `transformers.Trainer` subclass and its model streams.

Only the places where a Trainer touches devices, gradients, optimizer state and checkpoints are overridden; loops,
losses, callbacks and logging are its own.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import TrainerCallback

from megatrain import settings as settings_module
from megatrain.checkpoint import manifest, replace
from megatrain.engine.session import Engine
from megatrain.engine.surface import engine_of
from megatrain.errors import MissingLabels, NotEnoughMemory, SettingsError
from megatrain.hardware import inventory
from megatrain.hf.callbacks import Handler
from megatrain.hf.checkpoints import Checkpoints, is_stock, last_complete
from megatrain.hf.planning import plan_of
from megatrain.hf.progress import Pace, StepLines
from megatrain.hf.recovery import RamStop, once_more, twice
from megatrain.hf.tried import Tried
from megatrain.optim.optimizer import Optimizer
from megatrain.telemetry.notices import announce, warn

STOCK_LOGGING_STEPS = 500
OPTIMIZERS = {
    "adamw_torch": ("adamw", None), "adamw_torch_fused": ("adamw", None),
    "adamw_bnb_8bit": ("adamw", "8bit"), "adamw_8bit": ("adamw", "8bit"),
    "lion_32bit": ("lion", None), "lion_8bit": ("lion", "8bit"), "sgd": ("sgd", None),
}  # fmt: skip
"""`TrainingArguments.optim` → kind, and how moments are stored (None: as `megatrain.init` was told)."""


class MegaMixin(Checkpoints):
    """Streams a Trainer's model through a MegaTrain engine.

    `class SFT(MegaMixin, trl.SFTTrainer): ...`. The engine is `self.engine`; it is attached when the Trainer is made
    and stays with the model.
    """

    engine: Engine
    accelerator: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        inventory.refuse_distributed()
        self._micro_batches: list[Any] = []
        self._losses: list[torch.Tensor] = []
        self._tried = Tried()
        self._looked = False
        """Whether a step's micro-batches have been through one by one."""
        self._together = 1
        """Micro-batches of this step that pass a block together."""
        super().__init__(*args, **kwargs)
        self._attach()
        self._refuse_foreign_optimizer()
        self._ram_stop = RamStop(lambda: self.engine)
        self.callback_handler = Handler(self.callback_handler, (StepLines(self), Pace(self), self._ram_stop))

    # ---- set-up

    def create_accelerator_and_postprocess(self) -> None:
        self._adapt_arguments()
        super().create_accelerator_and_postprocess()  # type: ignore[misc]

    def _adapt_arguments(self) -> None:
        """What a stock Trainer would do to the model that an engine does itself, or cannot do."""
        args = self.args
        if args.fp16:
            raise SettingsError("fp16=True is not supported: use bf16=True, which keeps an exact FP32 master.")
        if self._optim not in OPTIMIZERS:
            raise SettingsError(f"optim={self._optim!r} is not supported; these are: {', '.join(OPTIMIZERS)}.")
        _ = args.device  # settles the number of GPUs, which is then overridden
        args._n_gpu = min(args._n_gpu, 1)
        self._compile = bool(args.torch_compile) or settings_module.current().compile
        if args.torch_compile:
            # The engine compiles its blocks; compiling the whole model around them would only break the graph.
            args.torch_compile, args.torch_compile_backend, args.torch_compile_mode = False, None, None
        if args.gradient_checkpointing:
            args.gradient_checkpointing = False
            announce("gradient_checkpointing=True is not needed: every block already recomputes its forward")
        if args.logging_steps == STOCK_LOGGING_STEPS and args.logging_strategy == "steps":
            args.logging_steps = 1

    @property
    def _optim(self) -> str:
        return str(getattr(self.args.optim, "value", self.args.optim))

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        built: dict[str, Any] = super()._build_accelerator_args(**kwargs)  # type: ignore[misc]
        # Precision is the engine's: autocast on top would cast the weights of every block again.
        return built | {"device_placement": False, "mixed_precision": "no"}

    def _move_model_to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        """The engine puts each block where it is computed."""

    def _attach(self) -> None:
        """Give the model an engine, or take the one it has (a second Trainer on the same model)."""
        present = engine_of(self.model)
        if present is not None and not present.closed:
            self.engine = present
            wanted = OPTIMIZERS[self._optim][1]
            if wanted is not None and present.settings.moment_width != wanted:
                raise SettingsError(
                    f"optim={self._optim!r} keeps moments in {wanted}, but the model already belongs to an engine that "
                    f"keeps them in {present.settings.moment_width}; close it, or choose an optim without a width."
                )
            if self.args.bf16 and present.precision == "fp32":
                announce(f"bf16=True has no effect: the model already belongs to an engine in {present.precision}")
            return
        asked = settings_module.current()
        device = self.args.device
        if asked.device is not None and torch.device(asked.device).type != device.type:
            raise SettingsError(
                f"megatrain.init asked for device={asked.device!r}, but TrainingArguments is on {device}; "
                "set use_cpu=True there, or leave device out."
            )
        # bf16-sr is asked for by megatrain.init alone, and computes in BF16 too.
        precision = "bf16" if self.args.bf16 and asked.precision != "bf16-sr" else asked.precision
        width = OPTIMIZERS[self._optim][1]
        if width is not None and asked.optimizer_compression and asked.moment_width != width:
            raise SettingsError(
                f"optim={self._optim!r} keeps moments in {width}, megatrain.init asked for "
                f"optimizer_compression={asked.optimizer_compression!r}; leave one of them out."
            )
        settings = asked.override(
            device=str(device),
            precision=precision,
            compile=self._compile,
            optimizer_compression=asked.optimizer_compression or width or False,
        )
        plan = plan_of(self, settings, OPTIMIZERS[self._optim][0], device)
        self.engine = Engine(self.model, **vars(settings.override(plan=plan)))

    def _refuse_foreign_optimizer(self) -> None:
        if self.optimizer is not None and not isinstance(self.optimizer, Optimizer):
            raise SettingsError(
                f"optimizers=({type(self.optimizer).__name__}, ...) cannot update streamed weights; leave it out, or "
                "pass one made by megatrain.Engine(model).optimizer(...)."
            )
        if self.optimizer is not None and self.optimizer.max_grad_norm is None and self.args.max_grad_norm:
            # A stock Trainer clips whatever optimizer it was given.
            self.optimizer.max_grad_norm = float(self.args.max_grad_norm)
            announce(f"max_grad_norm={self.args.max_grad_norm:g} of TrainingArguments applies to the optimizer given")

    def create_optimizer(self, model: torch.nn.Module | None = None) -> Any:
        if engine_of(self.model) is not self.engine:
            # `model_init` made another model: the first one's memory is wanted now.
            self.engine.close()
            del self.engine
            self.callback_handler.model = self.model
            gc.collect()
            self._attach()
        if self.optimizer is None:
            decayed = set(self.get_decay_parameter_names(self.model))  # type: ignore[attr-defined]
            named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
            groups = [
                {"params": [p for name, p in named if name in decayed], "weight_decay": self.args.weight_decay},
                {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
            ]
            kind = OPTIMIZERS[self._optim][0]
            betas = None if kind == "sgd" else (self.args.adam_beta1, self.args.adam_beta2)
            self.optimizer = self.engine.optimizer(
                groups,
                kind=kind,
                lr=self.args.learning_rate,
                betas=betas,
                eps=self.args.adam_epsilon if kind == "adamw" else None,
                max_grad_norm=self.args.max_grad_norm or None,
            )
        return self.optimizer

    # ---- a step

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_complete(self.args.output_dir)
        elif resume_from_checkpoint:
            resume_from_checkpoint = str(replace.find(resume_from_checkpoint))
            if not is_stock(Path(resume_from_checkpoint)):
                manifest.verify(resume_from_checkpoint)
        self.engine.relief.hold_to_plan()
        try:
            result = super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
        finally:
            # Whatever comes now (generating, say) was not planned.
            if hasattr(self, "engine"):
                self.engine.relief.hold_to_plan(False)
        self._ram_stop.check()
        return result

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.engine.relief.hold_to_plan(False)
        try:
            found = super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]
        finally:
            if self.is_in_train:  # type: ignore[attr-defined]
                self.engine.relief.hold_to_plan()
        if self.is_in_train:  # type: ignore[attr-defined]
            try:
                self.engine.relief.take(self.engine.quiesce)
            except NotEnoughMemory as less:
                warn(f"after the evaluation: {less}")
        return found

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any) -> Any:
        """Nobody looks at logits if only the loss is asked for: then no more than a chunk of them is computed."""
        with self.engine.loss_only() if prediction_loss_only else nullcontext():
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)  # type: ignore[misc]

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One micro-batch; the first call of a step runs all of its micro-batches, later calls return their losses."""
        names = self.label_names  # type: ignore[attr-defined]
        if names and isinstance(inputs, Mapping) and not any(name in inputs for name in names) and not self._own_loss:
            raise _missing_labels(inputs, names)
        step = super().training_step  # type: ignore[misc]
        if len(self._micro_batches) < 2 or not any(inputs is batch for batch in self._micro_batches):
            alone = len(self._micro_batches) == 1 and inputs is self._micro_batches[0]
            single = functools.partial(self._single, step, alone, model, inputs, *args, **kwargs)
            loss: torch.Tensor = self._guarded(single, [inputs])
            return loss
        if inputs is self._micro_batches[0]:
            tasks = [functools.partial(step, model, batch, *args, **kwargs) for batch in self._micro_batches]
            self._losses = self._guarded(lambda: self._run_windows(tasks), self._micro_batches)
        position = next(i for i, batch in enumerate(self._micro_batches) if batch is inputs)
        return self._losses[position]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]
        except ValueError as error:
            said = str(error).startswith("The model did not return a loss")
            if self._own_loss or not said or "labels" in inputs:
                raise
            # A forward that names no labels may take them all the same, or need none: only its outputs show.
            raise _missing_labels(inputs, ["labels"]) from error

    @property
    def _own_loss(self) -> bool:
        return not self._stock_method("compute_loss") or self.compute_loss_func is not None  # type: ignore[attr-defined]

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        samples, items = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        # Without blocks nothing is shared between micro-batches: they come one by one, as in a stock Trainer.
        self._micro_batches = samples if self.engine.blocks else []
        return samples, items

    def _guarded(self, work: Callable[[], Any], batches: Sequence[Any]) -> Any:
        """A step, or one micro-batch of it that comes alone, with a second try if the GPU runs out of memory."""
        if not self._stock_method("training_step"):
            # Another training step may count its calls, or choose its inputs by them.
            return work()
        done, again = twice(self.engine, self._own_optimizer().zero_grad, work)
        if again:
            # What was done again had less kept than later steps keep: no size has been through with that.
            self._tried = Tried()
        else:
            self._tried.add(batches, self._together)
        return done

    def _single(self, step: Callable[..., torch.Tensor], alone: bool, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._together = 1
        with self._final_backward() if alone else nullcontext():
            return step(*args, **kwargs)

    def _run_windows(self, tasks: Sequence[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
        """The micro-batches of a step, in windows of as many as their boundary activations leave room for."""
        size = 1 if self._in_order() else min(self.engine.window_size(self._micro_batches[0]), len(tasks))
        self._together = size
        losses: list[torch.Tensor] = []
        for start in range(0, len(tasks), size):
            with self._final_backward() if start + size >= len(tasks) else nullcontext():
                losses += self.engine.window(tasks[start : start + size], whole=size >= len(tasks))
        if self._in_order() and self.engine.revisits and not self._looked:
            announce(
                "micro-batches pass blocks more than once (two forwards or backwards in one training step): "
                "they run one after the other, so that gradients are added in order"
            )
        self._looked = True
        return losses

    def _in_order(self) -> bool:
        """Whether micro-batches must run one after the other, whatever there is room for.

        A loss or a step of one's own may pass a block twice; a window then adds gradients in another order than they
        come in one by one. The first step shows it: bits must not depend on how much memory is free.
        """
        stock = self._stock_method("compute_loss") and self._stock_method("training_step")
        return not stock and (self.engine.revisits or not self._looked)

    def _final_backward(self) -> AbstractContextManager[None]:
        """Let updates start in the backward, unless somebody wants to look at the gradients before the step."""
        looks = [c for c in self.callback_handler.callbacks if _overrides(c, "on_pre_optimizer_step")]
        optimizer = self._own_optimizer()
        # A size that has not been through may run out of memory, and a step that has begun to update stays begun.
        untried = not self._tried.covers(self._micro_batches, self._together)
        if looks or untried or optimizer._optimizer_step_pre_hooks or not self._stock_method("training_step"):
            # Another training step may look at gradients, or do several backwards.
            return nullcontext()
        return optimizer.final_backward()

    def _stock_method(self, method: str) -> bool:
        """Whether a method is transformers' own, but for what is put around it here."""
        owners = [c for c in type(self).__mro__ if method in vars(c) and c is not MegaMixin]
        return owners == [transformers.Trainer]

    def _clip_grad_norm(self, model: Any) -> float:
        # The clip factor is applied inside the update, from this same norm.
        return once_more(self.engine, self.engine.grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: float | None = None) -> float:
        return once_more(self.engine, self.engine.grad_norm) if grad_norm is None else grad_norm


def _overrides(callback: Any, event: str) -> bool:
    return getattr(type(callback), event) is not getattr(TrainerCallback, event)


def _missing_labels(inputs: Any, names: Sequence[str]) -> MissingLabels:
    return MissingLabels(
        f"the batch has {', '.join(sorted(inputs))} but none of {', '.join(names)}, so the model returns no loss; add "
        "labels to the dataset, or use a collator that makes them "
        "(transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False))."
    )
