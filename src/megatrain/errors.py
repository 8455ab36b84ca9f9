"""Every exception that MegaTrain raises. A message says what happened, with numbers, and what to do."""

from __future__ import annotations


class MegaTrainError(RuntimeError):
    """Base class of all MegaTrain exceptions."""


class SettingsError(MegaTrainError, ValueError):
    """A setting has an invalid or unsupported value."""


class UnknownSetting(SettingsError, TypeError):
    """There is no setting or option of this name."""


class NothingToStream(MegaTrainError, ValueError):
    """The model has no parameters, or (`megatrain.plan`) no repeated layers to plan for."""


class UnsupportedModel(MegaTrainError, ValueError):
    """The model cannot be trained (weights on the meta device, an unknown dtype...)."""


class UnsupportedCall(MegaTrainError):
    """The model was called in a way that streaming does not support."""


class WindowAborted(MegaTrainError):
    """Another micro-batch of the window failed. `Engine.window` raises that micro-batch's error."""


class AlreadyAttached(MegaTrainError):
    """The model already belongs to an open engine."""


class EngineClosed(MegaTrainError):
    """The engine was closed. Its model can be read but not run."""


class ModelMoved(MegaTrainError):
    """A model whose weights are in an engine's store cannot be moved or cast."""


class ForkedProcess(MegaTrainError):
    """A forked child tried to change or run a model that belongs to its parent."""


class DeviceUnavailable(MegaTrainError):
    """The requested device does not exist."""


class DistributedUnsupported(MegaTrainError):
    """More than one process was launched."""


class UnsupportedTransformers(MegaTrainError, ImportError):
    """The installed transformers lacks something that MegaTrain needs."""


class NativeLibraryMissing(MegaTrainError):
    """The native library is not built, or has another version."""


class NotEnoughMemory(MegaTrainError, MemoryError):
    """An allocation would not fit; nothing was allocated."""


class OutOfRam(MegaTrainError, MemoryError):
    """RAM ran short during a run, which was stopped before the system would have killed it."""


class DataError(MegaTrainError, ValueError):
    """The dataset cannot be turned into batches."""


class MissingLabels(DataError):
    """A training batch has no labels, so there is no loss."""


class NonFiniteGradients(MegaTrainError):
    """Too many steps in a row had an infinite or NaN gradient norm."""


class CheckpointError(MegaTrainError, ValueError):
    """A checkpoint is incomplete, damaged, of another model, or could not be written."""


class DirectoryInUse(MegaTrainError):
    """Another process writes checkpoints into this directory."""


class DiskFailed(MegaTrainError):
    """State or inputs on disk could not be read or written, or were damaged."""


class DiskFull(DiskFailed):
    """There is not enough free space for state or inputs on disk."""


class DriveLimit(MegaTrainError):
    """The run has written as much to disk as `max_drive_tb` allows."""


class LaneFailed(MegaTrainError):
    """Work on a background lane failed. The cause is attached."""
