// The update of groups of 256 elements, bitwise as src/megatrain/optim/update.py defines it, and sums of squares.
//
// One loop reads every stream of a group, widens it to FP32, applies the rule, and writes the results. Codes need the
// largest magnitude of their block first, so their moments stay on the stack for a second loop. Every operation is a
// correctly rounded IEEE operation on one element, so every instruction set gives the same bits. Loops have a constant
// length and no branches, so that compilers vectorise them.
//
// This file is compiled once per instruction set. It must not use the C++ library or define anything with external
// linkage but `kernels`: the linker keeps one copy of an inline function, which could be the AVX-512 one.
#include <stdint.h>

#include <utility>

#include "formats.h"
#include "kernels.h"

#if defined(__clang__)
#define MT_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define MT_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace megatrain::MT_ISA {
namespace {

#include "arithmetic.inl"

// ---- one group

// The streams of an update: the address of a group in each, and its bytes. Null and 0 if a stream does not exist.
enum { kWeight, kResidual, kGradient, kMoments, kScales = kMoments + 2, kStreams = kScales + 2 };

struct Streams {
    uint8_t* at[kStreams];
};

struct Widths {
    size_t of[kStreams];
};

template <int kind>
inline float load_gradient(const uint8_t* from, int i) {
    if (kind == MT_GRADIENT_BF16) return widened(reinterpret_cast<const uint16_t*>(from)[i]);
    const float value = reinterpret_cast<const float*>(from)[i];
    return kind == MT_GRADIENT_FP32_TO_BF16 ? rounded_to_nearest(value) : value;
}

template <int kind>
inline float load_weight(const Streams& here, int i) {
    if (kind == MT_WEIGHT_FP32) return reinterpret_cast<const float*>(here.at[kWeight])[i];
    const uint16_t high = reinterpret_cast<const uint16_t*>(here.at[kWeight])[i];
    if (kind == MT_WEIGHT_BF16) return widened(high);
    return joined(high, reinterpret_cast<const int16_t*>(here.at[kResidual])[i]);
}

template <int kind>
inline void store_weight(const Streams& here, int i, float value, uint32_t counter) {
    if (kind == MT_WEIGHT_FP32) {
        reinterpret_cast<float*>(here.at[kWeight])[i] = value;
    } else if (kind == MT_WEIGHT_SPLIT) {
        const uint32_t bits = without_nan(as_bits(value));
        reinterpret_cast<uint16_t*>(here.at[kWeight])[i] = static_cast<uint16_t>((bits + 0x8000u) >> 16);
        // The bits minus the rounded high half, modulo 2^16.
        reinterpret_cast<int16_t*>(here.at[kResidual])[i] = static_cast<int16_t>(bits);
    } else {
        reinterpret_cast<uint16_t*>(here.at[kWeight])[i] = rounded_at_random(value, drawn(counter) & 0xffffu);
    }
}

// Element i of a run that has one scale and one nibble.
template <int kind, class Eight, class Four>
inline float load_moment(const uint8_t* from, int i, int nibble, float scale) {
    switch (kind) {
        case MT_STATE_FP32: return reinterpret_cast<const float*>(from)[i];
        case MT_STATE_BF16: return widened(reinterpret_cast<const uint16_t*>(from)[i]);
        case MT_STATE_8BIT: return decoded<Eight>(from[i], scale);
        default: return decoded<Four>((static_cast<uint32_t>(from[i]) >> nibble) & 15u, scale);
    }
}

template <int kind>
inline void store_moment(uint8_t* to, float* room, int i, float value, uint32_t draw) {
    if (kind == MT_STATE_FP32) {
        reinterpret_cast<float*>(to)[i] = value;
    } else if (kind == MT_STATE_BF16) {
        reinterpret_cast<uint16_t*>(to)[i] = rounded_at_random(value, draw);
    } else {
        room[i] = value;
    }
}

template <int rule, int weight, int gradient, int state>
inline void apply(const Streams& here, uint64_t key, const Scalars<rule>& scalars, float* first, float* second) {
    constexpr bool kTwo = rule == MT_RULE_ADAMW, kFour = state == MT_STATE_4BIT, kScaled = state >= MT_STATE_8BIT;
    constexpr int kRun = kFour ? Signed4::kBlock / 2 : state == MT_STATE_8BIT ? Signed8::kBlock : kGroup;
    for (int run = 0; run < kGroup / kRun; ++run) {
        // Two consecutive runs of 4-bit codes share bytes: the first in the low halves, the second in the high ones.
        const int block = kFour ? run / 2 : run, nibble = run % 2 * 4;
        const int back = kFour ? (run - block) * kRun : 0;
        const float scale0 = kScaled ? reinterpret_cast<const float*>(here.at[kScales])[block] : 0.0f;
        const float scale1 = kScaled && kTwo ? reinterpret_cast<const float*>(here.at[kScales + 1])[block] : 0.0f;
        uint32_t counter = counter_of(static_cast<uint32_t>(key), run * kRun);
        uint32_t weight_counter = counter_of(static_cast<uint32_t>(key >> 32), run * kRun);
        MT_INDEPENDENT
        for (int i = run * kRun; i < (run + 1) * kRun; ++i) {
            const float g = load_gradient<gradient>(here.at[kGradient], i);
            float w = load_weight<weight>(here, i), v = 0.0f;
            float m = load_moment<state, Signed8, Signed4>(here.at[kMoments], i - back, nibble, scale0);
            if (kTwo) v = load_moment<state, Positive8, Positive4>(here.at[kMoments + 1], i - back, nibble, scale1);
            scalars.apply(w, m, v, g);
            store_weight<weight>(here, i, w, weight_counter);
            const uint32_t draws = state == MT_STATE_BF16 ? drawn(counter) : 0u;
            store_moment<state>(here.at[kMoments], first, i, m, draws & 0xffffu);
            if (kTwo) store_moment<state>(here.at[kMoments + 1], second, i, v, draws >> 16);
            counter += kStride;
            weight_counter += kStride;
        }
    }
}

// Not inline: it does not depend on the kinds of weights and gradients.
template <class First, class Second, bool two>
__attribute__((noinline)) void encode(const float* first, const float* second, uint32_t key, const Streams& here) {
    constexpr int kBlock = First::kBlock, kBytes = kBlock * First::kBits / 8;
    for (int block = 0; block < kGroup / kBlock; ++block) {
        const float* m = first + block * kBlock;
        const float* v = second + block * kBlock;
        const float scale0 = largest<kBlock>(m), scale1 = two ? largest<kBlock>(v) : 1.0f;
        reinterpret_cast<float*>(here.at[kScales])[block] = scale0;
        if (two) reinterpret_cast<float*>(here.at[kScales + 1])[block] = scale1;
        const float inverse0 = 1.0f / scale0, inverse1 = 1.0f / scale1;
        uint8_t* codes0 = here.at[kMoments] + block * kBytes;
        uint8_t* codes1 = two ? here.at[kMoments + 1] + block * kBytes : nullptr;
        uint32_t counter = counter_of(key, block * kBlock);
        MT_INDEPENDENT
        for (int i = 0; i < kBytes; ++i) {
            uint32_t draws = drawn(counter);
            uint32_t code0 = encoded<First>(m[i], inverse0, draws & 0xffffu);
            uint32_t code1 = two ? encoded<Second>(v[i], inverse1, draws >> 16) : 0u;
            if (First::kBits == 4) {
                draws = drawn(counter + kBytes * kStride);
                code0 |= encoded<First>(m[i + kBytes], inverse0, draws & 0xffffu) << 4;
                if (two) code1 |= encoded<Second>(v[i + kBytes], inverse1, draws >> 16) << 4;
            }
            codes0[i] = static_cast<uint8_t>(code0);
            if (two) codes1[i] = static_cast<uint8_t>(code1);
            counter += kStride;
        }
    }
}

template <int rule, int weight, int gradient, int state>
void update_group(const Streams& here, uint64_t key, const float* numbers, int count) {
    constexpr bool kTwo = rule == MT_RULE_ADAMW;
    alignas(64) float first[kGroup], second[kGroup];
    apply<rule, weight, gradient, state>(here, key, Scalars<rule>(numbers), first, second);
    if (state < MT_STATE_8BIT) return;
    // Elements past the end: their codes stay zero, and they do not affect the scale.
    for (int i = count; i < kGroup; ++i) first[i] = second[i] = 0.0f;
    if (state == MT_STATE_8BIT) encode<Signed8, Positive8, kTwo>(first, second, static_cast<uint32_t>(key), here);
    if (state == MT_STATE_4BIT) encode<Signed4, Positive4, kTwo>(first, second, static_cast<uint32_t>(key), here);
}

// ---- ranges of groups

using Group = void (*)(const Streams&, uint64_t key, const float* scalars, int count);

// One loop per combination of 3 rules, 3 weights, 3 gradients and 4 states.
template <int... number>
Group loop_of(const Update& what, std::integer_sequence<int, number...>) {
    static constexpr Group loops[] = {update_group<number / 36, number / 12 % 3, number / 4 % 3, number % 4>...};
    return loops[((what.rule * 3 + what.weight_kind) * 3 + what.gradient_kind) * 4 + what.state_kind];
}

Widths widths_of(const Update& what) {
    constexpr size_t moments[] = {4 * kGroup, 2 * kGroup, kGroup * Signed8::kBits / 8, kGroup * Signed4::kBits / 8};
    constexpr size_t scales[] = {0, 0, 4 * kGroup / Signed8::kBlock, 4 * kGroup / Signed4::kBlock};
    const size_t weight = what.weight_kind == MT_WEIGHT_FP32 ? 4 : 2;
    const size_t gradient = what.gradient_kind == MT_GRADIENT_BF16 ? 2 : 4;
    const size_t residual = what.weight_kind == MT_WEIGHT_SPLIT ? 2 : 0, second = what.rule == MT_RULE_ADAMW ? 1 : 0;
    const size_t moment = moments[what.state_kind], scale = scales[what.state_kind];
    return {{weight * kGroup, residual * kGroup, gradient * kGroup, moment, moment * second, scale, scale * second}};
}

Streams streams_of(const Update& what, const Widths& widths, size_t group) {
    const void* const bases[kStreams] = {what.weight,     what.residual,  what.gradient, what.moments[0],
                                         what.moments[1], what.scales[0], what.scales[1]};
    Streams here = {};
    for (int i = 0; i < kStreams; ++i) {
        if (widths.of[i]) here.at[i] = static_cast<uint8_t*>(const_cast<void*>(bases[i])) + group * widths.of[i];
    }
    return here;
}

// A partial group is updated in a copy of full length, and only its own part is copied back.
void update_part(const Update& what, const Widths& widths, const Streams& here, Group loop, uint64_t key, int count) {
    alignas(64) uint8_t rooms[kStreams][4 * kGroup] = {};
    Streams inside;
    size_t bytes[kStreams];
    // Codes and scales exist for complete blocks.
    const int block = what.state_kind == MT_STATE_8BIT ? Signed8::kBlock : Signed4::kBlock;
    const size_t whole = what.state_kind >= MT_STATE_8BIT ? (count + block - 1) / block * block : count;
    for (int i = 0; i < kStreams; ++i) {
        inside.at[i] = rooms[i];
        bytes[i] = (i < kMoments ? count : whole) * widths.of[i] / kGroup;
        if (bytes[i]) __builtin_memcpy(rooms[i], here.at[i], bytes[i]);
    }
    loop(inside, key, what.scalars, count);
    for (int i = 0; i < kStreams; ++i) {
        if (bytes[i] && i != kGradient) __builtin_memcpy(here.at[i], rooms[i], bytes[i]);
    }
}

void update(const Update& what, size_t begin, size_t end) {
    const Widths widths = widths_of(what);
    const Group loop = loop_of(what, std::make_integer_sequence<int, 108>());
    for (size_t group = begin; group < end; ++group) {
        const Streams here = streams_of(what, widths, group);
        const uint64_t key = key_of(what.seed, what.first / kGroup + group);
        const uint64_t left = what.count - group * kGroup;
        if (left >= kGroup) {
            loop(here, key, what.scalars, kGroup);
        } else {
            update_part(what, widths, here, loop, key, static_cast<int>(left));
        }
    }
}

// The same loads and stores, without arithmetic.
void touch(const Update& what, size_t begin, size_t end) {
    const Widths widths = widths_of(what);
    volatile uint8_t nothing = 0;  // keeps the compiler from removing the loop
    const uint8_t zero = nothing;
    uint8_t seen = 0;
    for (size_t group = begin; group < end && (group + 1) * kGroup <= what.count; ++group) {
        const Streams here = streams_of(what, widths, group);
        for (int i = 0; i < kStreams; ++i) {
            uint8_t* stream = here.at[i];
            for (size_t at = 0; at < widths.of[i]; ++at) {
                if (i == kGradient) {
                    seen |= stream[at];
                } else {
                    stream[at] ^= zero;
                }
            }
        }
    }
    nothing = seen;
}

// ---- sums of squares, bitwise as `reference_square_sum` in src/megatrain/stream/norm.py
//
// A chunk is one tree: its second half is added to its first until one number is left. Viewed as eight rows, the first
// three halvings add rows to rows, so one loop reduces the gradient to one row of sums; the rest halve that row in the
// cache. Squares are exact in FP64 and chunks are never split, so threads and instruction sets do not matter.

// Adds eight rows of squares into one, in the order of three halvings; elements from `count` on are zeros.
template <int kind, bool whole>
inline void add_rows(const uint8_t* from, int count, int row, double* __restrict sums) {
    for (int i = 0; i < row; ++i) {
        const auto at = [=](int k) {
            const double value = whole || i + k * row < count ? load_gradient<kind>(from, i + k * row) : 0.0f;
            return value * value;
        };
        sums[i] = ((at(0) + at(4)) + (at(2) + at(6))) + ((at(1) + at(5)) + (at(3) + at(7)));
    }
}

template <int kind>
double square_sum_of(const void* values, int count, int chunk) {
    constexpr int kRows = 8;
    alignas(64) double sums[kMaxChunk / kRows];
    // Chunks of fewer than eight elements are padded with zeros, which do not change the sum.
    const int row = chunk < kRows ? 1 : chunk / kRows;
    (count == row * kRows ? add_rows<kind, true> : add_rows<kind, false>)(
        static_cast<const uint8_t*>(values), count, row, sums);
    for (int half = row / 2; half > 0; half /= 2) {
        MT_INDEPENDENT
        for (int i = 0; i < half; ++i) sums[i] += sums[half + i];
    }
    return sums[0];
}

}  // namespace

#define MT_TEXT(word) #word
#define MT_NAME(word) MT_TEXT(word)
const Kernels kernels = {MT_NAME(MT_ISA), update, touch, {square_sum_of<0>, square_sum_of<1>, square_sum_of<2>}};

}  // namespace megatrain::MT_ISA
