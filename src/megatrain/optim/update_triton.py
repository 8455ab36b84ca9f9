"""The update of a slab in GPU memory, in one pass: the same operations in the same order as the reference.

A program handles ROWS rows of 2 x COLS elements, as a left and a right half. A row is one block of codes, or 256
elements without codes: the largest magnitude is reduced within a warp, and both 4-bit codes of a byte belong to one
thread. Full rows need no mask, so that every access is as wide as the tile allows; the rest goes to a second launch of
one program.

Nothing is contracted to an FMA, and `div_rn` and `sqrt_rn` replace approximations. Processors produce different NaN
bits, so NaN results equal the reference in being NaN, not in their bits.
"""

# mypy: ignore-errors
from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from megatrain.optim.rules import SGD, AdamW, Lion
from megatrain.optim.update import Operands
from megatrain.store.formats import Codes, Format
from megatrain.store.moments import Piece
from megatrain.store.random import GROUP

_ADAMW = tl.constexpr(AdamW.code)
_LION = tl.constexpr(Lion.code)
_SGD = tl.constexpr(SGD.code)
_GROUP = tl.constexpr(GROUP)
_GOLDEN64 = tl.constexpr(0x9E3779B97F4A7C15)
_GOLDEN32 = tl.constexpr(0x9E3779B9)
_ONE = tl.constexpr(0x3F800000)
_SMALLEST = tl.constexpr(0x00800000)
_LARGEST = tl.constexpr(0x7F7FFFFF)
_EXPONENT = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)


@dataclass(frozen=True)
class _Numbers:
    """The constants of a format. Also the compiled kernel's cache key, so every value is a field."""

    bits: int
    mantissa: int
    signed: bool
    levels: int
    base: int
    below: float


@triton.jit
def _bits(value):
    return value.to(tl.int32, bitcast=True)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _load(pointer, mask):
    return tl.load(pointer) if mask is None else tl.load(pointer, mask=mask, other=0)


@triton.jit
def _load_float(pointer, mask):
    """FP32, or BF16 viewed as int16."""
    value = _load(pointer, mask)
    if pointer.dtype.element_ty == tl.int16:
        value = _float(value.to(tl.int32) << 16)
    return value


@triton.jit
def _mix64(value):
    """As in store/random.py, like the next two functions."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _draw(key, lane):
    """Random bits of an element, from its row's key and its column's offset."""
    value = key + lane
    value = (value ^ (value >> 16)) * 0x85EBCA6B
    value = (value ^ (value >> 13)) * 0xC2B2AE35
    return value ^ (value >> 16)


@triton.jit
def _keys(seed_low, seed_high, group, start):
    """The 32-bit keys for moments and weights of the row that starts `start` elements after `group`.

    Two blocks of 128 share a key; the offset of the second is added here.
    """
    seed = (seed_high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | seed_low.to(tl.uint32, bitcast=True)
    key = _mix64(seed + (group + start // _GROUP).to(tl.uint64) * _GOLDEN64)
    skipped = (start % _GROUP).to(tl.uint32) * _GOLDEN32
    return key.to(tl.uint32) + skipped, (key >> 32).to(tl.uint32) + skipped


@triton.jit
def _load_master(weight, residual, at, mask):
    master = _load_float(weight + at, mask)
    if residual is not None:
        master = _float(_bits(master) + _load(residual + at, mask).to(tl.int32))
    return master


@triton.jit
def _store_master(weight, residual, at, mask, master, key, lane):
    if weight.dtype.element_ty == tl.float32:
        tl.store(weight + at, master, mask=mask)
    elif residual is None:
        draws = (_draw(key, lane) & 0xFFFF).to(tl.int32)
        tl.store(weight + at, _round_to_bf16(master, draws), mask=mask)
    else:
        bits = tl.where(master != master, _NAN, _bits(master))
        high = (bits + 0x8000) >> 16
        tl.store(weight + at, high.to(tl.int16), mask=mask)
        tl.store(residual + at, (bits - (high << 16)).to(tl.int16), mask=mask)


@triton.jit
def _round_to_bf16(value, draws):
    bits = _bits(value)
    rounded = tl.where((bits & _EXPONENT) == _EXPONENT, bits, bits + draws)
    return (tl.where(value != value, _NAN, rounded) >> 16).to(tl.int16)


@triton.jit
def _decode(codes, scale, CODES: tl.constexpr):
    """As in store/formats.py. CODES are the constants of a format; None for one without codes."""
    magnitude = codes & (CODES.levels - 1)
    value = _float((magnitude + CODES.base) << (23 - CODES.mantissa))
    if CODES.signed:
        value = tl.where(magnitude == 0, 0.0, value)
        value = _float(_bits(value * scale) | ((codes >> (CODES.bits - 1)) << 31))
    else:
        value = value * scale
    return value


@triton.jit
def _encode(value, inverse, draws, CODES: tl.constexpr):
    SHIFT: tl.constexpr = 23 - CODES.mantissa
    share = tl.abs(value) * inverse
    # At most 1 plus less than a code's width, so no upper clamp is needed.
    codes = ((tl.minimum(_bits(share), _ONE) + (draws << (SHIFT - 16))) >> SHIFT) - CODES.base
    if CODES.signed:
        # Between zero and level 1. For integers, d < trunc(x) equals d + 1 <= x, which is also false for NaN.
        small = share * CODES.below
        codes = tl.where(small >= 65536.0, codes, ((draws + 1).to(tl.float32) <= small).to(tl.int32))
        codes = codes | ((_bits(value) >> 31) & CODES.levels)
    else:
        codes = tl.maximum(codes, 0)
    return codes


@triton.constexpr_function
def _payload_length(numel, codes):
    return numel if codes is None else numel * codes.bits // 8


@triton.jit
def _load_moment(payload, scales, tile, COLS: tl.constexpr, CODES: tl.constexpr):
    rows, left, masks = tile
    if CODES is None:
        values = (_load_float(payload + left, masks[0]), _load_float(payload + left + COLS, masks[1]))
    else:
        scale = _load(scales + rows, masks[2])
        if CODES.bits == 4:
            # A row is COLS bytes: the left half in the low bits, the right half in the high bits.
            both = _load(payload + left - rows * COLS, masks[2]).to(tl.int32)
            codes = (both & 15, both >> 4)
        else:
            codes = (_load(payload + left, masks[2]), _load(payload + left + COLS, masks[2]))
        values = (_decode(codes[0].to(tl.int32), scale, CODES), _decode(codes[1].to(tl.int32), scale, CODES))
    return values


@triton.jit
def _store_moment(payload, scales, tile, values, draws, COLS: tl.constexpr, CODES: tl.constexpr):
    _, left, masks = tile
    if CODES is not None:
        _store_codes(payload, scales, tile, values, draws, COLS, CODES)
    elif payload.dtype.element_ty == tl.float32:
        tl.store(payload + left, values[0], mask=masks[0])
        tl.store(payload + left + COLS, values[1], mask=masks[1])
    else:
        tl.store(payload + left, _round_to_bf16(values[0], draws[0]), mask=masks[0])
        tl.store(payload + left + COLS, _round_to_bf16(values[1], draws[1]), mask=masks[1])


@triton.jit
def _store_codes(payload, scales, tile, values, draws, COLS: tl.constexpr, CODES: tl.constexpr):
    rows, left, masks = tile
    left_value, right_value = values
    if masks[0] is not None:
        # A block is stored completely; padding past the end is zeros, whose codes are zero too.
        left_value = tl.where(masks[0], left_value, 0.0)
        right_value = tl.where(masks[1], right_value, 0.0)
    # Compared as integers, infinity and NaN are the largest magnitudes.
    highest = tl.maximum(_bits(left_value) & 0x7FFFFFFF, _bits(right_value) & 0x7FFFFFFF)
    highest = tl.max(highest, axis=1, keep_dims=True)
    scale = _float(tl.minimum(tl.maximum(highest, _SMALLEST), _LARGEST))
    tl.store(scales + rows, scale, mask=masks[2])
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    left_codes = _encode(left_value, inverse, draws[0], CODES)
    right_codes = _encode(right_value, inverse, draws[1], CODES)
    if CODES.bits == 4:
        tl.store(payload + left - rows * COLS, (left_codes | (right_codes << 4)).to(tl.uint8), mask=masks[2])
    else:
        tl.store(payload + left, left_codes.to(tl.uint8), mask=masks[2])
        tl.store(payload + left + COLS, right_codes.to(tl.uint8), mask=masks[2])


@triton.jit
def _divide(root, scalar):
    """Correctly rounded like `div_rn`, but without its branch, since all elements share the inverse.

    The first correction leaves an error of at most one ulp. The remainder is then exact, and with an inverse rounded to
    nearest the second correction gives the rounded quotient (Markstein's theorem). Roots are between 2^-75 and 2^64, so
    nothing underflows. Infinity (and a zero scalar) has no remainder.
    """
    inverse = tl.div_rn(1.0, scalar)
    raw = root * inverse
    quotient = tl.fma(tl.fma(raw, -scalar, root), inverse, raw)
    quotient = tl.fma(tl.fma(quotient, -scalar, root), inverse, quotient)
    return tl.where(raw < float("inf"), quotient, raw)


@triton.jit
def _update(master, first, second, gradient, scalars, RULE: tl.constexpr):
    """As in optim/rules.py. Rules with one moment return the second unchanged."""
    clipped = gradient * scalars[0]
    if RULE == _ADAMW:
        _, beta1, one_minus_beta1, beta2, one_minus_beta2, root_correction, eps, decay, step_size = scalars
        first = first * beta1 + clipped * one_minus_beta1
        second = second * beta2 + (clipped * one_minus_beta2) * clipped
        denominator = _divide(tl.sqrt_rn(second), root_correction) + eps
        master = master * decay - tl.div_rn(first * step_size, denominator)
    elif RULE == _LION:
        _, beta1, one_minus_beta1, beta2, one_minus_beta2, decay, lr = scalars
        blend = first * beta1 + clipped * one_minus_beta1
        first = first * beta2 + clipped * one_minus_beta2
        master = master * decay - ((blend > 0).to(tl.float32) - (blend < 0).to(tl.float32)) * lr
    else:
        tl.static_assert(RULE == _SGD)
        _, momentum, weight_decay, lr = scalars
        first = first * momentum + (clipped + master * weight_decay)
        master = master - first * lr
    return master, first, second


@triton.jit
def _load_gradient(gradient, mask, ROUNDED: tl.constexpr):
    value = _load_float(gradient, mask)
    if ROUNDED and gradient.dtype.element_ty == tl.float32:
        # To nearest even, in integers: the conversion instruction is slow.
        bits = _bits(value)
        bits = (bits + (0x7FFF + ((bits >> 16) & 1))) & -0x10000
        value = tl.where(value != value, value, _float(bits))
    return value


@triton.jit(do_not_specialize=["seed_low", "seed_high", "count"])
def _kernel(
    weight, residual, gradient, payloads, scales, scalars, seed_low, seed_high, count,
    RULE: tl.constexpr, ROUNDED: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    MASKED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    TILE: tl.constexpr = ROWS * 2 * COLS
    TWO: tl.constexpr = len(payloads) == 2
    rows = tl.arange(0, ROWS)[:, None]
    lanes = tl.arange(0, COLS)[None, :]
    left = rows * (2 * COLS) + lanes
    masks = (None, None, None)
    if MASKED:
        masks = (left < count, left + COLS < count, rows * (2 * COLS) < count)
    tile = (rows, left, masks)

    # Offsets within a tile fit 32 bits; the start of a tile may not.
    program = tl.program_id(0).to(tl.int64)
    weight += program * TILE
    gradient += program * TILE
    if residual is not None:
        residual += program * TILE

    state_key, weight_key = _keys(seed_low, seed_high, program * (TILE // _GROUP), rows * (2 * COLS))
    left_lane = lanes.to(tl.uint32) * _GOLDEN32
    right_lane = (lanes + COLS).to(tl.uint32) * _GOLDEN32

    first_payload = payloads[0] + program * _payload_length(TILE, FIRST)
    first_scales = scales[0]
    if FIRST is not None:
        first_scales += program * ROWS
    left_first, right_first = _load_moment(first_payload, first_scales, tile, COLS, FIRST)
    left_second, right_second = left_first, right_first
    if TWO:
        second_payload = payloads[1] + program * _payload_length(TILE, SECOND)
        second_scales = scales[1]
        if SECOND is not None:
            second_scales += program * ROWS
        left_second, right_second = _load_moment(second_payload, second_scales, tile, COLS, SECOND)
    left_master = _load_master(weight, residual, left, masks[0])
    left_gradient = _load_gradient(gradient + left, masks[0], ROUNDED)
    left_master, left_first, left_second = _update(left_master, left_first, left_second, left_gradient, scalars, RULE)
    right_master = _load_master(weight, residual, left + COLS, masks[1])
    right_gradient = _load_gradient(gradient + left + COLS, masks[1], ROUNDED)
    right_master, right_first, right_second = _update(
        right_master, right_first, right_second, right_gradient, scalars, RULE
    )
    _store_master(weight, residual, left, masks[0], left_master, weight_key, left_lane)
    _store_master(weight, residual, left + COLS, masks[1], right_master, weight_key, right_lane)
    # The first moment uses the low half of a draw, the second the high half.
    left_draw = _draw(state_key, left_lane)
    right_draw = _draw(state_key, right_lane)
    draws = ((left_draw & 0xFFFF).to(tl.int32), (right_draw & 0xFFFF).to(tl.int32))
    _store_moment(first_payload, first_scales, tile, (left_first, right_first), draws, COLS, FIRST)
    if TWO:
        draws = ((left_draw >> 16).to(tl.int32), (right_draw >> 16).to(tl.int32))
        _store_moment(second_payload, second_scales, tile, (left_second, right_second), draws, COLS, SECOND)


def triton_kernel(operands: Operands) -> None:
    """Equals `reference_kernel`, for tensors on a GPU; runs on its current stream."""
    rows, cols, warps = _shape(operands.moments[0].format)
    tile = 2 * rows * cols
    count, full = operands.count, operands.count // tile * tile
    key = operands.seed + (operands.first // GROUP + 1) * _GOLDEN64.value
    with torch.cuda.device(operands.weight.device):
        for start, length in ((0, full), (full, count - full)):
            if not length:
                continue
            seed = key + start // GROUP * _GOLDEN64.value
            pieces = [_part(piece, start, length) for piece in operands.moments]
            _kernel[(triton.cdiv(length, tile),)](
                _words(operands.weight[start:]),
                None if operands.residual is None else operands.residual[start:],
                _words(operands.gradient[start:]),
                tuple(payload for payload, _ in pieces),
                tuple(scales for _, scales in pieces),
                operands.scalars,
                _int32(seed),
                _int32(seed >> 32),
                min(length, tile),
                RULE=operands.rule.code,
                ROUNDED=operands.gradient_dtype == torch.bfloat16,
                FIRST=_numbers(operands.moments[0].format),
                SECOND=_numbers(operands.moments[-1].format),
                MASKED=length < tile,
                ROWS=rows,
                COLS=cols,
                num_warps=warps,
                enable_fp_fusion=False,
            )


def _shape(chosen: Format) -> tuple[int, int, int]:
    """ROWS, COLS and warps: 4 adjacent elements (16 bytes of FP32) per thread and half."""
    if chosen.block:
        # One warp: with more, scales go through shared memory and warps synchronise.
        return GROUP // chosen.block, chosen.block // 2, 1
    return 4, GROUP // 2, 4


def _words(values: torch.Tensor) -> torch.Tensor:
    """BF16 viewed as int16, since its bits are handled as integers."""
    return values.view(torch.int16) if values.dtype == torch.bfloat16 else values


def _part(piece: Piece, start: int, length: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    chosen = piece.format
    payload = piece.payload[chosen.payload_bytes(start) :]
    if chosen.block:
        return payload, piece.scales[start // chosen.block :]
    payload = payload[: chosen.payload_bytes(length)]
    return payload.view(torch.float32 if chosen.bits == 32 else torch.int16), None


@cache
def _numbers(chosen: Format) -> _Numbers | None:
    if not isinstance(chosen, Codes):
        return None
    base = (127 << chosen.mantissa) - (chosen.levels - 1)
    return _Numbers(chosen.bits, chosen.mantissa, chosen.signed, chosen.levels, base, chosen.below)


def _int32(word: int) -> int:
    """The low 32 bits as a signed integer, so that Triton compiles one version."""
    return (word & 0xFFFFFFFF) - ((word & 0x80000000) << 1)
