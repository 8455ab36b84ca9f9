"""A lock that Ctrl-C leaves taken makes every other thread wait for good."""

import re
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "src" / "megatrain"


def test_no_cached_property():
    """In Python 3.11 each holds a lock of its own while it is computed, whichever object it is of."""
    found = [path for path in SOURCE.rglob("*.py") if re.search(r"\bcached_property\b", path.read_text())]
    assert not found
