"""The C++ header agrees with `geometry` on the facts that both need."""

import re
from pathlib import Path

from megatrain.geometry import ALIGN_ELEMENTS, WIDTHS

HEADER = (Path(__file__).parents[3] / "csrc" / "formats.h").read_text()


def test_bits_and_blocks_of_codes():
    found = re.findall(r"using (?:Signed|Positive)(\d) = Codes<(\d+), (\d+), \d, (?:true|false)>;", HEADER)
    assert len(found) == 4
    for name, bits, block in found:
        width = WIDTHS[f"{name}bit"]
        assert (width.bits, width.block) == (int(bits), int(block))


def test_parameters_are_aligned_to_a_group_of_random_numbers():
    assert re.search(rf"constexpr int kGroup = {ALIGN_ELEMENTS};", HEADER)
