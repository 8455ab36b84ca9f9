"""Every exception a user can meet. Each message is one sentence: what happened, the numbers, what to do."""

from __future__ import annotations


class MegaTrainError(RuntimeError):
    """Base class of everything MegaTrain raises on purpose."""


class SettingsError(MegaTrainError, ValueError):
    """A setting has a value that cannot be honoured."""


class UnknownSetting(SettingsError, TypeError):
    """There is no setting or option of this name."""


class NothingToStream(MegaTrainError, ValueError):
    """The model has no parameters, or (`megatrain.plan`) no repeated layers to plan for."""


class UnsupportedModel(MegaTrainError, ValueError):
    """The model cannot be trained as it is (weights on meta, an unknown dtype...)."""


class UnsupportedCall(MegaTrainError):
    """The model was called in a way that streaming cannot honour."""


class WindowAborted(MegaTrainError):
    """Another micro-batch of the window failed; its error is what the caller of `Engine.window` sees."""


class AlreadyAttached(MegaTrainError):
    """The model already belongs to an open engine."""


class EngineClosed(MegaTrainError):
    """The engine was closed; its model can be read but not run."""


class ModelMoved(MegaTrainError):
    """Somebody tried to move or cast a model whose weights live in the engine's store."""


class ForkedProcess(MegaTrainError):
    """A forked child tried to change or to run a model that belongs to its parent."""


class DeviceUnavailable(MegaTrainError):
    """The device that was asked for is not there."""


class DistributedUnsupported(MegaTrainError):
    """More than one process was launched."""


class UnsupportedTransformers(MegaTrainError, ImportError):
    """The installed transformers lacks what MegaTrain hooks into."""


class NativeLibraryMissing(MegaTrainError):
    """The native library is not built, or is of another version."""


class NotEnoughMemory(MegaTrainError, MemoryError):
    """An allocation would not fit; nothing was allocated."""


class OutOfRam(MegaTrainError, MemoryError):
    """RAM ran short in the middle of a run; it was stopped before the system would have killed it."""


class DataError(MegaTrainError, ValueError):
    """The dataset cannot be turned into batches."""


class MissingLabels(DataError):
    """A training batch has no labels, so there is no loss."""


class NonFiniteGradients(MegaTrainError):
    """Too many steps in a row had an infinite or NaN gradient norm."""


class CheckpointError(MegaTrainError, ValueError):
    """A checkpoint is incomplete, damaged, of another model, or could not be written."""


class DirectoryInUse(MegaTrainError):
    """Another process writes its checkpoints into this directory."""


class LaneFailed(MegaTrainError):
    """Work on a background lane failed; the cause is attached."""
