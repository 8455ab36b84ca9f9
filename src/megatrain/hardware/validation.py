"""Checks of JSON fields and paths, and immutable mappings, for `Machine` and `Plan`."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Never, TypeVar

from megatrain.errors import SettingsError

V = TypeVar("V")
MOST_COUNT = 1 << 63
"""Counts must be below this, because arithmetic on them uses 64 bits."""


class Frozen(dict[str, V]):
    """A hashable dict that cannot be changed, nor the dicts inside it. Equal to a dict with the same items."""

    def __init__(self, items: Any = ()) -> None:
        super().__init__(
            (key, Frozen(value) if isinstance(value, Mapping) else value) for key, value in dict(items).items()
        )

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        # By default, pickle and copy fill a dict item by item, which this class refuses.
        return Frozen, (dict(self),)

    def _refuse(self, *_: Any, **__: Any) -> Never:
        raise TypeError("this mapping is frozen; change a copy made with dict(), and pass it to dataclasses.replace().")

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = __ior__ = _refuse


def read_object(text: Any, what: str) -> Any:
    """Parse JSON. `what` is what errors call it."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise SettingsError(f"{what} is not JSON: {error}.") from error


def fields_of(cls: Any, data: Any, what: str) -> dict[str, Any]:
    """`data`, checked to be an object with the fields of a dataclass. Fields with a default may be missing."""
    if not isinstance(data, dict):
        raise SettingsError(f"{what} must be an object, not {type(data).__name__}.")
    names = [field.name for field in dataclasses.fields(cls)]
    needed = [field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING]
    missing = [name for name in needed if name not in data]
    unknown = [name for name in data if name not in names]
    if missing or unknown:
        lacks = f"lacks {', '.join(missing)}" if missing else ""
        has = f"has {', '.join(unknown)}, unknown here" if unknown else ""
        raise SettingsError(f"{what} {' and '.join(part for part in (lacks, has) if part)}.")
    return data


def is_count(value: Any, least: int = 0) -> bool:
    """Whether it is an integer of at least `least`."""
    return type(value) is int and least <= value < MOST_COUNT


def is_rate(value: Any) -> bool:
    """Whether it is a finite number that is not negative."""
    return type(value) in (int, float) and 0 <= value <= sys.float_info.max


def require(holds: bool, name: str, rule: str) -> None:
    if not holds:
        raise SettingsError(f"{name} {rule}.")


def folders(offload_dir: Any) -> list[str]:
    """The distinct directories of an `offload_dir`, as absolute paths without links."""
    if offload_dir is None:
        return []
    paths = [offload_dir] if isinstance(offload_dir, str | bytes | os.PathLike) else offload_dir
    if not isinstance(paths, Sequence):
        raise SettingsError(f"offload_dir must be a directory or a list of them, not {type(offload_dir).__name__}.")
    return list(dict.fromkeys(map(resolved, paths)))


def resolved(folder: Any) -> str:
    """The absolute path of a directory, which need not exist."""
    path = os.fspath(folder) if isinstance(folder, str | os.PathLike) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise SettingsError(f"offload_dir must be a directory or a list of them, not {folder!r}.")
    return os.path.realpath(os.path.expanduser(path))
