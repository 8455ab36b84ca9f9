"""`MegaMixin`: put it in front of any `transformers.Trainer` subclass and its model streams. `Trainer` is one.

Only the places where a Trainer touches devices, gradients, optimizer state and checkpoints are overridden; loops,
losses, callbacks and logging are its own.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import IterableDataset
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from megatrain import settings as settings_module
from megatrain.checkpoint import lock, replace
from megatrain.engine.adopt import engine_of
from megatrain.engine.session import Engine
from megatrain.engine.warmup import compile_layers
from megatrain.errors import DiskFailed, LaneFailed, MissingLabels, NotEnoughMemory, OutOfRam, SettingsError
from megatrain.hardware import inventory
from megatrain.hf.checkpoint_list import last_complete, require_resumable
from megatrain.hf.checkpoints import Checkpoints
from megatrain.hf.data import is_stream, prepare
from megatrain.hf.labels import LabelCount
from megatrain.hf.microbatches import MicroBatches
from megatrain.hf.optimizers import Given, changed
from megatrain.hf.planning import plan_of, planned_batch
from megatrain.hf.progress import Pace, RunRecord
from megatrain.hf.recovery import RamStop
from megatrain.hf.rescue import rescue
from megatrain.hf.sigterm import Termination
from megatrain.hf.smoothing import in_chunks
from megatrain.model import transformers_api
from megatrain.model.blocks import layered_blocks
from megatrain.optim.optimizer import Optimizer
from megatrain.planner import Plan
from megatrain.settings import CHANGE_RESULTS, Settings
from megatrain.telemetry.notices import announce, warn
from megatrain.telemetry.progress import hidden


class MegaMixin(MicroBatches, Checkpoints):
    """Streams a Trainer's model through a MegaTrain engine.

    `class SFT(MegaMixin, trl.SFTTrainer): ...`. The engine is `self.engine`; it is attached when the Trainer is made
    and stays with the model.
    """

    _compile = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        inventory.refuse_distributed()
        super().__init__(*args, **kwargs)
        self.label_smoother = in_chunks(self.label_smoother, lambda: self.engine)
        with hidden(self.args.disable_tqdm):
            self._attach_with_optimizer()
        self._ram_stop = RamStop(lambda: self.engine)
        self._label_count = LabelCount(self)
        self._termination = Termination(lambda: self.is_in_train)
        self.run_record = RunRecord(self)
        internal = (self.run_record, Pace(self), self._label_count, self._ram_stop, self._termination)
        self.callback_handler = Handler(self.callback_handler, internal)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator without what the engine does itself, or does not support."""
        args = self.args
        if args.fp16:
            raise SettingsError("fp16=True is not supported: use bf16=True, which keeps an exact FP32 master.")
        if args.deepspeed:
            raise SettingsError(
                "deepspeed in TrainingArguments is not supported: the engine itself keeps the model's state in RAM or, "
                "with megatrain.init(offload_dir=...), on disk; leave it out."
            )
        _ = args.device  # settles the number of GPUs, which is then overridden
        args._n_gpu = min(args._n_gpu, 1)
        defaults = settings_module.current()
        if args.torch_compile and "compile" in defaults.given and not defaults.compile:
            raise SettingsError(
                "torch_compile=True in TrainingArguments, but megatrain.init asked for compile=False; leave one of "
                "them out."
            )
        # The accelerator may be created again (hyperparameter search), after the argument was reset below.
        self._compile = self._compile or bool(args.torch_compile)
        if args.torch_compile:
            for name, usual in (("torch_compile_backend", "inductor"), ("torch_compile_mode", None)):
                if (value := getattr(args, name)) not in (None, usual):
                    warn(
                        f"{name}={value!r} has no effect: the engine compiles its blocks with torch.compile's defaults"
                    )
            # The engine compiles its blocks. Compiling the whole model around them would only add graph breaks.
            args.torch_compile, args.torch_compile_backend, args.torch_compile_mode = False, None, None
        super().create_accelerator_and_postprocess()
        self._set_autocast()

    def _build_accelerator_args(self, **kwargs: Any) -> Any:
        return super()._build_accelerator_args(**kwargs) | {"device_placement": False}

    def _set_autocast(self) -> None:
        """Disable autocast, which would cast the weights of every block again. A model without blocks computes as in a
        stock Trainer: FP32 weights, under autocast."""
        one_block = hasattr(self, "engine") and not self.engine.blocks
        # Set on this accelerator alone: the accelerator state is shared by all Trainers of the process.
        self.accelerator.native_amp = bool(self.args.bf16) and one_block

    def _get_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """For streams, device placement stays on: accelerate counts the rows of the last batch only then."""
        placed = isinstance(dataset, IterableDataset) or bool(self.accelerator.dispatch_batches)
        with changed(self.accelerator, device_placement=placed):
            return super()._get_dataloader(dataset, *args, **kwargs)

    def _move_model_to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        """Do nothing: the engine moves each block."""

    def _attach_with_optimizer(self) -> None:
        if self.optimizer is None or isinstance(self.optimizer, Optimizer):
            self._attach()
            return
        name, given = type(self.optimizer).__name__, Given(self.optimizer, self.model)
        with changed(self, _given_kind=given.kind):
            self._attach()
        self.optimizer = self.callback_handler.optimizer = given.replaced(self.engine)
        announce(f"the {name} in optimizers= is replaced by the engine's {given.kind}, with its options and state")

    def _attach(self) -> None:
        """Attach an engine to the model, or use the one it has (a second Trainer on the same model)."""
        self._find_engine()
        if self.engine.blocks and self.args.gradient_checkpointing:
            self.args.gradient_checkpointing = False
            announce("gradient_checkpointing=True is not needed: every block already recomputes its forward")
        self._set_autocast()

    def _find_engine(self) -> None:
        choice = self._choose()
        present = engine_of(self.model)
        if present is not None and not present.closed:
            self.engine = present
            _check_attached(present, settings_module.current())
            if self._compile and not present.settings.compile:
                raise SettingsError(
                    "torch_compile=True, but the model already belongs to an engine that does not compile; make that "
                    "engine with compile=True, or close it."
                )
            if choice.moment_width is not None and present.settings.moment_width != choice.moment_width:
                raise SettingsError(
                    f"optim={self._optim!r} keeps moments in {choice.moment_width}, but the model already belongs to "
                    f"an engine that keeps them in {present.settings.moment_width}; close it, or choose an optim "
                    "without a width."
                )
            if self.args.bf16 and present.precision == "fp32" and present.blocks:
                warn(f"bf16=True has no effect: the model already belongs to an engine in {present.precision}")
            return
        defaults = settings_module.current()
        device = self.args.device
        if defaults.device is not None and torch.device(defaults.device).type != device.type:
            raise SettingsError(
                f"megatrain.init asked for device={defaults.device!r}, but TrainingArguments is on {device}; "
                "set use_cpu=True there, or leave device out."
            )
        # bf16-sr, which only megatrain.init can select, computes in BF16 too.
        streams = self.args.bf16 and bool(layered_blocks(self.model, transformers_api.load()))
        if streams and defaults.precision == "fp32":
            raise SettingsError(
                "megatrain.init asked for precision='fp32', but TrainingArguments has bf16=True; set bf16=False there, "
                "or leave precision out."
            )
        width, decided = choice.moment_width, "optimizer_compression" in defaults.given
        if width is not None and decided and defaults.moment_width != width:
            raise SettingsError(
                f"optim={self._optim!r} keeps moments in {width}, megatrain.init asked for "
                f"optimizer_compression={defaults.optimizer_compression!r}; leave one of them out."
            )
        settings = defaults.override(
            device=str(device),
            precision="bf16" if streams and defaults.precision is None else defaults.precision,
            optimizer_compression=defaults.optimizer_compression if decided else width or False,
            **({"compile": True} if self._compile else {}),
        )
        began = time.perf_counter()
        plan = plan_of(self, settings, choice.kind, device)
        planned = time.perf_counter() - began
        if plan is not None and plan is not defaults.plan:
            settings = settings.override(length=None)  # it went into the plan that was made here
        self.engine = Engine(self.model, _kind=choice.kind, **settings.override(plan=plan).chosen())
        self.engine.preparation.add("plan", planned)
        if plan is not None and self.engine.compiled and self.train_dataset is not None:
            with self.engine.preparation.timing("compile_layers"):
                self._compile_layers(plan)

    def _compile_layers(self, plan: Plan) -> None:
        """Compile the layers for the planned batch."""
        if is_stream(self.train_dataset):
            return  # reading a row would take it away from training
        try:
            batch = planned_batch(self, plan)
            if self.model_accepts_loss_kwargs and "labels" in batch:
                # As in `compute_loss`. Layers get it too, so it is part of their graph.
                batch["num_items_in_batch"] = (batch["labels"] != -100).sum()
            # The methods of a Trainer are not called: a subclass may count their calls.
            compile_layers(self.engine, lambda: self.model(**batch))
        except Exception as error:  # whatever is wrong with the data or the model, training meets it and says it better
            announce(f"layers are compiled in the first step: a forward on the planned batch failed ({error!r:.200})")

    def _follow_model(self) -> None:
        """If `model_init` created another model, close the old engine and attach to the new model."""
        if engine_of(self.model) is not self.engine:
            self.engine.close()
            del self.engine
            self.callback_handler.model = self.model
            gc.collect()
            self._attach()

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        trial = args[0] if args else kwargs.get("trial")
        self._failure = None
        directory = self._get_output_dir(trial=trial)
        with self._termination.listening(), self.run_record.running(directory), ExitStack() as lasting:
            lasting.enter_context(hidden(self.args.disable_tqdm))
            # A run that saves nothing needs no lock.
            if self.args.save_strategy != "no":
                lasting.callback(lock.acquire(directory))
            if resume_from_checkpoint is True:
                resume_from_checkpoint = last_complete(self.args.output_dir)
            elif resume_from_checkpoint:
                resume_from_checkpoint = str(replace.find(resume_from_checkpoint))
                require_resumable(Path(resume_from_checkpoint))
            self.engine.memory_limit.apply()
            try:
                result = super().train(resume_from_checkpoint, *args, **kwargs)
            except (OutOfRam, NotEnoughMemory) as error:
                self._stop_with_a_checkpoint(error)
                raise
            except (DiskFailed, LaneFailed) as error:
                rescue(self, error)
                raise
            finally:
                self._restore_filter()
                # Later work, such as generating, is not part of the plan.
                if hasattr(self, "engine"):
                    self.engine.memory_limit.apply(False)
        self._ram_stop.check()
        self._check_last_save()
        return result

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.run_record.add(loss)
        return self._filtered(loss)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.engine.memory_limit.apply(False)
        try:
            output = super().evaluation_loop(*args, **kwargs)
        finally:
            if self.is_in_train:
                self.engine.memory_limit.apply()
        if self.is_in_train:
            try:
                self.engine.memory_limit.reserve(self.engine.quiesce)
            except NotEnoughMemory as less:
                warn(f"after the evaluation: {less}")
        return output

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any) -> Any:
        """If only the loss is needed, compute logits chunk by chunk."""
        with self.engine.loss_only() if prediction_loss_only else nullcontext():
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss. Raises `MissingLabels` if there is none because the batch has no labels."""
        names = self.label_names or ["labels"]
        labelled = not isinstance(inputs, Mapping) or any(name in inputs for name in names)
        if labelled or self._subclass.own_loss:
            return super().compute_loss(model, inputs, *args, **kwargs)
        missing = MissingLabels(
            f"the batch has {', '.join(sorted(map(str, inputs)))} but none of {', '.join(names)}, so the model returns "
            "no loss; add labels to the dataset, or use a collator that makes them "
            "(transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False))."
        )
        try:
            result = super().compute_loss(model, inputs, *args, **kwargs)
        except ValueError as error:
            if not str(error).startswith("The model did not return a loss"):
                raise
            raise missing from error
        loss = result[0] if isinstance(result, tuple) else result
        if loss.requires_grad and loss.numel() > 1:
            # Without labels, the first element of a tuple is not the loss.
            raise missing
        return result


class Trainer(MegaMixin, transformers.Trainer):
    """Takes what `transformers.Trainer` takes.

    Without a collator, datasets of `text`, `messages`, `prompt` + `completion` or bare `input_ids` are tokenized and
    collated for causal language modelling (hf/data.py); with one, everything is passed through.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        **kwargs: Any,
    ) -> None:
        if data_collator is None and model is not None:
            train_dataset, for_training = prepare(train_dataset, model, processing_class)
            eval_dataset, for_evaluation = prepare(eval_dataset, model, processing_class)
            data_collator = for_training or for_evaluation
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            **kwargs,
        )


class Handler(CallbackHandler):
    """Calls the Trainer's callbacks, then MegaTrain's, which are not in the user's list."""

    def __init__(self, handler: CallbackHandler, internal: Sequence[TrainerCallback]) -> None:
        self.__dict__.update(vars(handler))
        self._internal = internal

    def call_event(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control = super().call_event(event, args, state, control, **kwargs)
        for callback in self._internal:
            control = getattr(callback, event)(args, state, control, **kwargs) or control
        return control


def _check_attached(engine: Engine, defaults: Settings) -> None:
    """Refuse or warn about settings of `megatrain.init` that came after the model's engine was created."""
    if defaults is engine.defaults:
        return  # what the engine has otherwise, it was given itself
    has = vars(engine.settings) | {"device": str(engine.device), "precision": engine.precision}
    # Whether a run is recorded is asked when it begins.
    other = {name: value for name, value in defaults.chosen().items() if has[name] != value and name != "record"}
    # None and "cuda" match any GPU.
    device = torch.device(defaults.device or engine.device)
    if device.type == engine.device.type and device.index in (None, engine.device.index):
        other.pop("device", None)
    if defaults.precision is None:
        other.pop("precision", None)
    if defaults.compile == "auto":
        other.pop("compile", None)
    for name, value in other.items():
        if name in CHANGE_RESULTS:
            raise SettingsError(
                f"megatrain.init asked for {name}={value!r} after the model's engine was made with {has[name]!r}; "
                "close that engine first."
            )
        warn(f"{name}={value!r} of megatrain.init has no effect: the model already belongs to an engine")
