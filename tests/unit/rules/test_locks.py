"""A lock that stays locked after Ctrl-C would block every other thread for ever."""

import re
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "src" / "megatrain"


def test_no_cached_property():
    """In Python 3.11 a cached property locks during its computation, with one lock for all objects."""
    found = [path for path in SOURCE.rglob("*.py") if re.search(r"\bcached_property\b", path.read_text())]
    assert not found
