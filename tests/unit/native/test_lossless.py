"""Lossless compression: exact for every bit pattern, the same bytes with any number of threads, safe with any input."""

import ctypes
import errno
import hashlib
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.errors import CheckpointError
from megatrain.native import library, lossless

CHUNK = lossless.CHUNK
HEADER, ENTRY, PLANE_HEAD = 40, 16, 4
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
DTYPES = list(BITS)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(BITS[tensor.dtype])


def from_bits(values: list[int], dtype: torch.dtype) -> torch.Tensor:
    width = 8 * dtype.itemsize
    signed = [value - (1 << width) if value >> (width - 1) else value for value in values]
    return torch.tensor(signed, dtype=BITS[dtype]).view(dtype)


def random_bits(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


def normal(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).mul_(0.01).to(dtype)


def decoded(encoded: torch.Tensor, like: torch.Tensor, threads: int = 1) -> torch.Tensor:
    out = torch.full_like(bits_of(like), 0x55).view(like.dtype)
    lossless.decode(encoded, out, threads)
    return out


def check_round_trip(source: torch.Tensor) -> torch.Tensor:
    before = source.clone()
    encoded = lossless.encode(source, 1)
    assert torch.equal(bits_of(source), bits_of(before))
    assert encoded.numel() <= lossless.bound(source.numel(), source.itemsize)
    assert torch.equal(bits_of(decoded(encoded, source)), bits_of(source))
    return encoded


def plane_modes(encoded: torch.Tensor, numel: int, planes: int) -> list[int]:
    """The modes of the planes of the first chunk."""
    at = HEADER + ENTRY * math.ceil(numel / CHUNK)
    modes = []
    for _ in range(planes):
        head = int.from_bytes(bytes(encoded[at : at + PLANE_HEAD].tolist()), "little")
        modes.append(head >> 24)
        at += PLANE_HEAD + (head & 0xFFFFFF)
    return modes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 2, 3, 4, 5, 31, 63, 1000, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 17])
def test_round_trip_of_every_length(dtype, numel):
    check_round_trip(normal(numel, dtype))
    check_round_trip(random_bits(numel, dtype))


def test_every_bf16_pattern_survives():
    every = from_bits(list(range(1 << 16)), torch.bfloat16)
    check_round_trip(every)
    check_round_trip(every[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))])
    check_round_trip(every.sort().values)


def test_special_fp32_patterns_survive():
    mantissas = [0, 1, 0x2AAAAA, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFE, 0x7FFFFF]
    patterns = [s << 31 | e << 23 | m for s in (0, 1) for e in range(256) for m in mantissas]
    special = from_bits(patterns, torch.float32)
    assert special.isnan().sum() == 2 * 7
    check_round_trip(special)
    check_round_trip(special.repeat(40))
    check_round_trip(torch.cat([normal(CHUNK), special, torch.zeros(CHUNK), -torch.zeros(CHUNK)]))


@settings(max_examples=60, deadline=None)
@given(
    patterns=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40),
    repeats=st.integers(1, 2000),
    dtype=st.sampled_from(DTYPES),
)
def test_round_trip_of_any_patterns(patterns, repeats, dtype):
    # A few patterns repeated often produce codes of every shape, and lanes that compress very differently.
    shift = 32 - 8 * dtype.itemsize
    values = [pattern >> shift for pattern in patterns]
    check_round_trip(from_bits(values, dtype).repeat(repeats))
    check_round_trip(from_bits(values, dtype).repeat_interleave(repeats))


def test_code_lengths_are_limited():
    # Counts that grow like Fibonacci numbers need the longest codes: 23 bits here.
    counts = [1, 1]
    while sum(counts) + counts[-1] + counts[-2] <= CHUNK:
        counts.append(counts[-1] + counts[-2])
    exponents = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    shuffled = exponents[torch.randperm(len(exponents), generator=torch.Generator().manual_seed(0))]
    source = (shuffled.to(torch.int32) << 23).view(torch.float32)
    assert plane_modes(check_round_trip(source), len(source), 4) == [2, 0, 0, 0]


def test_planes_take_the_cheapest_mode():
    source = normal(CHUNK)
    assert plane_modes(lossless.encode(source, 1), CHUNK, 4) == [2, 1, 1, 1]
    assert plane_modes(lossless.encode(source.square(), 1), CHUNK, 4)[:2] == [2, 2]  # no sign: 7 bits
    assert plane_modes(lossless.encode(source.bfloat16().float(), 1), CHUNK, 4) == [2, 1, 0, 0]
    assert plane_modes(lossless.encode(source.bfloat16(), 1), CHUNK, 2) == [2, 1]
    assert plane_modes(lossless.encode(torch.full((CHUNK,), 3.0), 1), CHUNK, 4) == [0, 0, 0, 0]
    assert plane_modes(lossless.encode(random_bits(CHUNK, torch.float32), 1), CHUNK, 4) == [1, 1, 1, 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_incompressible_data_grows_by_less_than_a_thousandth(dtype):
    source = random_bits(1 << 20, dtype)
    raw = source.numel() * source.itemsize
    assert raw <= lossless.encode(source, 1).numel() <= lossless.bound(source.numel(), source.itemsize) < 1.001 * raw


def test_exponents_shrink_to_their_entropy():
    source = normal(1 << 20)
    exponents = bits_of(source).bitwise_right_shift(23).bitwise_and(0xFF)
    p = torch.bincount(exponents).double() / len(exponents)
    entropy = -(p[p > 0] * p[p > 0].log2()).sum().item()
    spent = 8 * lossless.encode(source, 1).numel() / len(source) - 24
    assert entropy <= spent < entropy + 0.1


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_no_bit(dtype):
    source = torch.cat([normal(20 * CHUNK, dtype), torch.zeros(9 * CHUNK, dtype=dtype), random_bits(CHUNK + 5, dtype)])
    encoded = lossless.encode(source, 1)
    for threads in (2, 3, 64):
        assert torch.equal(lossless.encode(source, threads), encoded)
        assert torch.equal(bits_of(decoded(encoded, source, threads)), bits_of(source))


SMALL = (
    "4d54504c414e455301000000010000003200000000000000000001000000000019005e909ad9bd059100000000000000"
    "0fe31232b94767a1150000027e8012020300030003000e8703381c0087c3011c0e320000010080000000008000000000"
    "800000000080000000008000000000800000000080000000008000000000800000000080000000010000000001000000"
    "00"
)
LARGE = "5b3c50d88061ae13c553e0b73f9f57fa85623a5a5cc888fb5be5adfe90cfd4b5"
HALF = "8ca8dd378fd0e94dc96d5dd30bb3cb21df856235262f834dfed4c08e1788c942"


def test_the_byte_format_is_stable():
    # These are the bytes of version 1, which must stay readable.
    encoded = lossless.encode(torch.tensor([1.0, -2.0, 0.5, 1.0, 1.0]).repeat(10), 1)
    assert bytes(encoded.tolist()).hex() == SMALL
    ramp = torch.arange(1, 3 * CHUNK + 1) * 40503 % 65537 / 65536
    large = torch.cat([ramp, ramp.square(), ramp.neg() + 0.5])
    assert hashlib.sha256(bytes(lossless.encode(large, 1).tolist())).hexdigest() == LARGE
    half = lossless.encode(large.bfloat16(), 1)
    assert hashlib.sha256(bytes(half.tolist())).hexdigest() == HALF


def read_bits(lane: bytes) -> Iterator[int]:
    return (byte >> bit & 1 for byte in lane for bit in range(8))


def plain_huffman(payload: bytes, count: int) -> bytes:
    first, last = payload[:2]
    packed = payload[2 : 2 + (last - first + 2) // 2]
    lengths = [half for byte in packed for half in (byte & 15, byte >> 4)]
    symbol_of, code, before = {}, 0, 0
    for length, symbol in sorted((length, first + i) for i, length in enumerate(lengths) if length):
        code <<= length - before
        symbol_of[length, code] = symbol
        code, before = code + 1, length
    at = 2 + len(packed) + 6
    ends = [int.from_bytes(payload[at - 6 + 2 * lane :][:2], "little") for lane in range(3)]
    out, quarter = bytearray(), math.ceil(count / 4)
    for lane in range(4):
        size = ends[lane] if lane < 3 else len(payload) - at
        bits = read_bits(payload[at : at + size])
        at += size
        for _ in range(min(quarter, max(0, count - lane * quarter))):
            length, code = 1, next(bits)
            while (length, code) not in symbol_of:
                length, code = length + 1, code << 1 | next(bits)
            out.append(symbol_of[length, code])
    return bytes(out)


def plain_decode(encoded: bytes) -> list[int]:
    """Reference decoder for one chunk, following the format in csrc/lossless.cpp. Returns the bit patterns."""
    item = {1: 4, 2: 2}[int.from_bytes(encoded[12:16], "little")]
    count = int.from_bytes(encoded[16:24], "little")
    at, planes = HEADER + ENTRY, []
    for _ in range(item):
        head = int.from_bytes(encoded[at : at + PLANE_HEAD], "little")
        mode, payload = head >> 24, encoded[at + PLANE_HEAD :][: head & 0xFFFFFF]
        planes.append({0: lambda p: p * count, 1: bytes, 2: lambda p: plain_huffman(p, count)}[mode](payload))
        at += PLANE_HEAD + len(payload)
    assert at == len(encoded) == int.from_bytes(encoded[HEADER : HEADER + 8], "little")
    low = 8 * (item - 2)
    patterns = []
    for exponent, top, *rest in zip(*planes, strict=True):
        patterns.append(top >> 7 << (low + 15) | exponent << (low + 7) | (top & 0x7F) << low)
        patterns[-1] |= int.from_bytes(bytes(rest), "big")
    data = b"".join(pattern.to_bytes(item, "little") for pattern in patterns)
    assert checksum(data) == int.from_bytes(encoded[HEADER + 8 : HEADER + ENTRY], "little")
    return patterns


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 5, 1001, 4096])
def test_a_reference_decoder_reads_the_format(dtype, numel):
    mask = (1 << 8 * dtype.itemsize) - 1
    half = torch.where(torch.arange(numel) % 3 == 0, normal(numel), 0.0)
    for source in (normal(numel), normal(numel).square(), half, torch.ones(numel)):
        encoded = lossless.encode(source.to(dtype), 1)
        assert plain_decode(bytes(encoded.tolist())) == [bits & mask for bits in bits_of(source.to(dtype)).tolist()]


def test_decoding_writes_only_its_elements():
    source = normal(CHUNK + 100)
    encoded = lossless.encode(source, 1)
    around = torch.full((CHUNK + 300,), 7.0)
    lossless.decode(encoded, around[100:-100], 1)
    assert torch.equal(around[100:-100], source)
    assert (around[:100] == 7).all()
    assert (around[-100:] == 7).all()


def test_encoding_stays_within_its_buffer():
    source = normal(2 * CHUNK + 77).square_()
    encoded = lossless.encode(source, 1)
    used = ctypes.c_size_t()
    for room, code in ((encoded.numel(), 0), (encoded.numel() - 1, errno.ENOSPC), (50, errno.ENOSPC)):
        guarded = torch.full((encoded.numel() + 64,), 0xEE, dtype=torch.uint8)
        found = library.load().mt_lossless_encode(
            source.data_ptr(), source.numel(), 1, guarded.data_ptr(), room, ctypes.byref(used), 1
        )
        assert found == code
        assert (guarded[room:] == 0xEE).all()
        if code == 0:
            assert used.value == encoded.numel()
            assert torch.equal(guarded[:room], encoded)


def test_a_damaged_chunk_is_named_and_the_others_are_decoded():
    source = normal(5 * CHUNK)
    encoded = lossless.encode(source, 1)
    for chunk in (3, 1):
        end = int.from_bytes(bytes(encoded[HEADER + ENTRY * chunk :][:8].tolist()), "little")
        encoded[end - 1] ^= 4
    out = torch.zeros_like(source)
    with pytest.raises(CheckpointError, match="chunk 1 of 5, elements 65536 to 131071, is the first that is damaged"):
        lossless.decode(encoded, out, 2)
    for chunk in range(5):
        part = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
        assert torch.equal(out[part], source[part]) == (chunk not in (1, 3))


def mixed() -> torch.Tensor:
    """Every mode in one tensor: codes with one and with many symbols per look-up, constants, noise, a short chunk."""
    return torch.cat([normal(CHUNK), normal(CHUNK).square_(), torch.zeros(CHUNK), random_bits(777, torch.float32)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_flipped_bit_of_a_small_encoding_is_noticed(dtype):
    source = torch.tensor([1.0, -2.0, 0.5, 1.0, 3.1]).repeat(50).to(dtype)
    encoded = lossless.encode(source, 1)
    assert 2 in plane_modes(encoded, source.numel(), source.itemsize)
    for bit in range(8 * encoded.numel()):
        damaged = encoded.clone()
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointError):
            decoded(damaged, source)


@pytest.mark.parametrize("seed", range(3))
def test_random_damage_is_noticed(seed):
    source = mixed()
    encoded = lossless.encode(source, 1)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(60):
        damaged = encoded.clone()
        for at in torch.randint(0, len(encoded), (3,), generator=generator).tolist():
            damaged[at] ^= int(torch.randint(1, 256, (), generator=generator))
        with pytest.raises(CheckpointError):
            decoded(damaged, source)


def test_damaged_headers_and_directories_are_noticed():
    source = mixed()
    encoded = lossless.encode(source, 1)
    starts = [HEADER + 4 * ENTRY] + [
        int.from_bytes(bytes(encoded[HEADER + ENTRY * chunk :][:8].tolist()), "little") for chunk in range(3)
    ]
    for start in [0, HEADER, *starts]:
        for at in range(start, min(start + 64, len(encoded))):
            for value in {0, 1, 0x7F, 0x80, 0xFF, int(encoded[at]) ^ 0x10} - {int(encoded[at])}:
                damaged = encoded.clone()
                damaged[at] = value
                with pytest.raises(CheckpointError):
                    decoded(damaged, source)


def test_truncation_and_trailing_bytes_are_noticed():
    source = mixed()
    encoded = lossless.encode(source, 1)
    lengths = [*range(0, 120), *range(120, len(encoded), 9973), *range(len(encoded) - 20, len(encoded))]
    for length in lengths:
        with pytest.raises(CheckpointError):
            decoded(encoded[:length].clone(), source)
    with pytest.raises(CheckpointError, match="chunk 3 of 4"):
        decoded(torch.cat([encoded, torch.zeros(1, dtype=torch.uint8)]), source)
    empty = torch.empty(0)
    with pytest.raises(CheckpointError, match="header"):
        decoded(torch.cat([lossless.encode(empty, 1), torch.zeros(1, dtype=torch.uint8)]), empty)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**31), numel=st.integers(1, 3000), dtype=st.sampled_from(DTYPES))
def test_hostile_chunks_are_refused(data, seed, numel, dtype):
    # The header's checksum is right; the planes are random bytes with plausible heads.
    generator = torch.Generator().manual_seed(seed)
    chunk = b""
    for _ in range(dtype.itemsize):
        mode = data.draw(st.sampled_from([0, 1, 2, 2, 2, 3]))
        size = {0: 1, 1: numel}.get(mode, data.draw(st.integers(0, 2000)))
        body = bytearray(torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).tolist())
        if mode == 2 and data.draw(st.booleans()):
            body[:3] = data.draw(
                st.sampled_from([b"\x05\x06\x11", b"\xfe\xff\x11", b"\x00\x02\x21\x02", b"\x00\x00\x11"])
            )
        chunk += (mode << 24 | len(body)).to_bytes(4, "little") + bytes(body)
    with pytest.raises(CheckpointError, match="chunk 0 of 1"):
        decoded(framed(chunk, numel, dtype), torch.empty(numel, dtype=dtype))


def test_only_the_element_checksum_of_a_framed_chunk_is_wrong():
    # Shows that the test above fails for the intended reason.
    chunk = b"".join((1 << 24 | 9).to_bytes(4, "little") + bytes(range(9)) for _ in range(2))
    out = torch.empty(9, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match="chunk 0 of 1"):
        lossless.decode(framed(chunk, 9, torch.bfloat16), out, 1)
    assert bits_of(out).tolist() == [i << 7 | i for i in range(9)]


def framed(chunk: bytes, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """One chunk behind a valid header and directory."""
    code = {4: 1, 2: 2}[dtype.itemsize]
    head = b"MTPLANES" + b"".join(
        value.to_bytes(width, "little") for value, width in ((1, 4), (code, 4), (numel, 8), (CHUNK, 8))
    )
    directory = (HEADER + ENTRY + len(chunk)).to_bytes(8, "little") + bytes(8)
    total = mix(checksum(head), checksum(directory)).to_bytes(8, "little")
    return torch.tensor(list(head + total + directory + chunk), dtype=torch.uint8)


MIX, WORD = 0x9E3779B97F4A7C15, 2**64 - 1


def mix(total: int, word: int) -> int:
    product = (total ^ word) * MIX & WORD
    return (product << 29 | product >> 35) & WORD


def checksum(data: bytes) -> int:
    """Reference implementation of `checksum` in csrc/lossless.cpp."""
    totals = [len(data), 1, 2, 3]
    whole = len(data) // 32 * 32
    for at in range(0, len(data), 8):
        lane = at // 8 % 4 if at < whole else 0
        totals[lane] = mix(totals[lane], int.from_bytes(data[at : at + 8], "little"))
    total = mix(mix(mix(totals[0], totals[1]), totals[2]), totals[3])
    return (total ^ total >> 32) * MIX & WORD


def test_a_wrong_target_is_distinguished_from_damage():
    encoded = lossless.encode(normal(1000), 1)
    for out in (torch.empty(999), torch.empty(CHUNK + 1), torch.empty(1000, dtype=torch.bfloat16), torch.empty(0)):
        with pytest.raises(CheckpointError, match=r"intact, but does not hold \d+ elements of"):
            lossless.decode(encoded, out, 1)


def test_invalid_arguments_are_refused():
    for refused in (torch.zeros(4, 4), torch.zeros(8)[::2], torch.zeros(4, dtype=torch.float64)):
        with pytest.raises(ValueError, match="only flat FP32 or BF16"):
            lossless.encode(refused, 1)
        with pytest.raises(ValueError, match="only flat FP32 or BF16"):
            lossless.decode(torch.zeros(9, dtype=torch.uint8), refused, 1)
    with pytest.raises(ValueError, match="flat uint8"):
        lossless.decode(torch.zeros(9), torch.zeros(9), 1)
    for numel, itemsize in ((3, 1), (3, 8), (-1, 4)):
        with pytest.raises(ValueError, match="2 or 4 bytes"):
            lossless.bound(numel, itemsize)
    with pytest.raises(OSError, match="too large"):
        lossless.bound(1 << 61, 4)
    for numel in (0, 8):
        with pytest.raises(OSError, match="Invalid argument"):
            lossless.encode(torch.zeros(numel), 0)
    with pytest.raises(OSError, match="No space left"):
        lossless.encode(normal(1000), 1, torch.empty(3000, dtype=torch.uint8))
    with pytest.raises(ValueError, match="flat uint8"):
        lossless.encode(normal(1000), 1, torch.empty(8000, dtype=torch.int8))


def test_an_output_buffer_can_be_reused():
    room = torch.empty(lossless.bound(CHUNK, 4), dtype=torch.uint8)
    for seed in range(2):
        source = normal(CHUNK, seed=seed)
        encoded = lossless.encode(source, 1, room)
        assert encoded.data_ptr() == room.data_ptr()
        assert torch.equal(encoded, lossless.encode(source, 1))
