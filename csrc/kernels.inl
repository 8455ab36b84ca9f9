// The update of groups of 256 elements: bit for bit what src/megatrain/optim/update.py defines.
//
// One loop reads every stream of a group, widens it to FP32, applies the rule, and writes back what needs no more than
// its own element. Codes need the largest magnitude of their block first, so their moments wait on the stack for a
// second loop. Every operation is a correctly rounded IEEE one on one element and there are no sums over elements, so
// every instruction set gives the same bits. Loops have a constant length and no branches: compilers vectorise them.
//
// This file is compiled once per instruction set. It may not use anything of the C++ library, nor define anything with
// external linkage but `kernels`: the linker keeps one copy of an inline function, and it could be the AVX-512 one.
#include <stdint.h>

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

// Where one group's streams begin.
struct Streams {
    uint8_t* weight;
    uint8_t* residual;
    const uint8_t* gradient;
    uint8_t* moments[2];
    uint8_t* scales[2];
};

template <int kind>
inline float load_gradient(const uint8_t* from, int i) {
    if (kind == MT_GRADIENT_BF16) return widened(reinterpret_cast<const uint16_t*>(from)[i]);
    const float value = reinterpret_cast<const float*>(from)[i];
    return kind == MT_GRADIENT_FP32_TO_BF16 ? rounded_to_nearest(value) : value;
}

template <int kind>
inline float load_weight(const Streams& here, int i) {
    if (kind == MT_WEIGHT_FP32) return reinterpret_cast<const float*>(here.weight)[i];
    const uint16_t high = reinterpret_cast<const uint16_t*>(here.weight)[i];
    return kind == MT_WEIGHT_SPLIT ? joined(high, reinterpret_cast<const int16_t*>(here.residual)[i]) : widened(high);
}

template <int kind>
inline void store_weight(const Streams& here, int i, float value, uint32_t place) {
    if (kind == MT_WEIGHT_FP32) {
        reinterpret_cast<float*>(here.weight)[i] = value;
    } else if (kind == MT_WEIGHT_SPLIT) {
        const uint32_t bits = without_nan(as_bits(value));
        reinterpret_cast<uint16_t*>(here.weight)[i] = static_cast<uint16_t>((bits + 0x8000u) >> 16);
        // The bits less the high half as it was rounded, modulo 2^16.
        reinterpret_cast<int16_t*>(here.residual)[i] = static_cast<int16_t>(bits);
    } else {
        reinterpret_cast<uint16_t*>(here.weight)[i] = rounded_at_random(value, drawn(place) & 0xffffu);
    }
}

// Element i of a run in which the scale is one number and so is the place of a code in its byte.
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
        // Two runs of 4-bit codes, one after the other, lie in the lower and upper halves of the same bytes.
        const int block = kFour ? run / 2 : run, nibble = run % 2 * 4;
        const int back = kFour ? (run - block) * kRun : 0;
        const float scale0 = kScaled ? reinterpret_cast<const float*>(here.scales[0])[block] : 0.0f;
        const float scale1 = kScaled && kTwo ? reinterpret_cast<const float*>(here.scales[1])[block] : 0.0f;
        uint32_t place = place_of(static_cast<uint32_t>(key), run * kRun);
        uint32_t weight_place = place_of(static_cast<uint32_t>(key >> 32), run * kRun);
        MT_INDEPENDENT
        for (int i = run * kRun; i < (run + 1) * kRun; ++i) {
            const float g = load_gradient<gradient>(here.gradient, i);
            float w = load_weight<weight>(here, i), v = 0.0f;
            float m = load_moment<state, Signed8, Signed4>(here.moments[0], i - back, nibble, scale0);
            if (kTwo) v = load_moment<state, Positive8, Positive4>(here.moments[1], i - back, nibble, scale1);
            scalars.apply(w, m, v, g);
            store_weight<weight>(here, i, w, weight_place);
            const uint32_t draws = state == MT_STATE_BF16 ? drawn(place) : 0u;
            store_moment<state>(here.moments[0], first, i, m, draws & 0xffffu);
            if (kTwo) store_moment<state>(here.moments[1], second, i, v, draws >> 16);
            place += kStride;
            weight_place += kStride;
        }
    }
}

// Not inline: it is the same whatever the weights and gradients are.
template <class First, class Second, bool two>
__attribute__((noinline)) void encode(const float* first, const float* second, uint32_t key, const Streams& here) {
    constexpr int kBlock = First::kBlock, kBytes = kBlock * First::kBits / 8;
    for (int block = 0; block < kGroup / kBlock; ++block) {
        const float* m = first + block * kBlock;
        const float* v = second + block * kBlock;
        const float scale0 = largest<kBlock>(m), scale1 = two ? largest<kBlock>(v) : 1.0f;
        reinterpret_cast<float*>(here.scales[0])[block] = scale0;
        if (two) reinterpret_cast<float*>(here.scales[1])[block] = scale1;
        const float inverse0 = 1.0f / scale0, inverse1 = 1.0f / scale1;
        uint8_t* codes0 = here.moments[0] + block * kBytes;
        uint8_t* codes1 = two ? here.moments[1] + block * kBytes : nullptr;
        uint32_t place = place_of(key, block * kBlock);
        MT_INDEPENDENT
        for (int i = 0; i < kBytes; ++i) {
            uint32_t draws = drawn(place);
            uint32_t code0 = encoded<First>(m[i], inverse0, draws & 0xffffu);
            uint32_t code1 = two ? encoded<Second>(v[i], inverse1, draws >> 16) : 0u;
            if (First::kBits == 4) {
                draws = drawn(place + kBytes * kStride);
                code0 |= encoded<First>(m[i + kBytes], inverse0, draws & 0xffffu) << 4;
                if (two) code1 |= encoded<Second>(v[i + kBytes], inverse1, draws >> 16) << 4;
            }
            codes0[i] = static_cast<uint8_t>(code0);
            if (two) codes1[i] = static_cast<uint8_t>(code1);
            place += kStride;
        }
    }
}

template <int rule, int weight, int gradient, int state>
void update_group(const Streams& here, uint64_t key, const float* numbers, int count) {
    constexpr bool kTwo = rule == MT_RULE_ADAMW;
    alignas(64) float first[kGroup], second[kGroup];
    apply<rule, weight, gradient, state>(here, key, Scalars<rule>(numbers), first, second);
    if (state < MT_STATE_8BIT) return;
    // What lies past the end is not state: its codes stay zero and it has no say in the scale.
    for (int i = count; i < kGroup; ++i) first[i] = second[i] = 0.0f;
    if (state == MT_STATE_8BIT) encode<Signed8, Positive8, kTwo>(first, second, static_cast<uint32_t>(key), here);
    if (state == MT_STATE_4BIT) encode<Signed4, Positive4, kTwo>(first, second, static_cast<uint32_t>(key), here);
}

// ---- which loop

using Group = void (*)(const Streams&, uint64_t key, const float* scalars, int count);

template <int rule, int weight, int gradient>
Group of_state(int state) {
    switch (state) {
        case MT_STATE_FP32: return update_group<rule, weight, gradient, MT_STATE_FP32>;
        case MT_STATE_BF16: return update_group<rule, weight, gradient, MT_STATE_BF16>;
        case MT_STATE_8BIT: return update_group<rule, weight, gradient, MT_STATE_8BIT>;
        default: return update_group<rule, weight, gradient, MT_STATE_4BIT>;
    }
}

template <int rule, int weight>
Group of_gradient(const Update& what) {
    switch (what.gradient_kind) {
        case MT_GRADIENT_FP32: return of_state<rule, weight, MT_GRADIENT_FP32>(what.state_kind);
        case MT_GRADIENT_BF16: return of_state<rule, weight, MT_GRADIENT_BF16>(what.state_kind);
        default: return of_state<rule, weight, MT_GRADIENT_FP32_TO_BF16>(what.state_kind);
    }
}

template <int rule>
Group of_weight(const Update& what) {
    switch (what.weight_kind) {
        case MT_WEIGHT_FP32: return of_gradient<rule, MT_WEIGHT_FP32>(what);
        case MT_WEIGHT_SPLIT: return of_gradient<rule, MT_WEIGHT_SPLIT>(what);
        default: return of_gradient<rule, MT_WEIGHT_BF16>(what);
    }
}

Group loop_of(const Update& what) {
    switch (what.rule) {
        case MT_RULE_ADAMW: return of_weight<MT_RULE_ADAMW>(what);
        case MT_RULE_LION: return of_weight<MT_RULE_LION>(what);
        default: return of_weight<MT_RULE_SGD>(what);
    }
}

// ---- ranges of groups

// Bytes per 256 elements.
struct Widths {
    size_t weight, residual, gradient, moment, scale;
};

Widths widths_of(const Update& what) {
    constexpr size_t moments[] = {4 * kGroup, 2 * kGroup, kGroup * Signed8::kBits / 8, kGroup * Signed4::kBits / 8};
    constexpr size_t scales[] = {0, 0, 4 * kGroup / Signed8::kBlock, 4 * kGroup / Signed4::kBlock};
    return {
        size_t{what.weight_kind == MT_WEIGHT_FP32 ? 4u : 2u} * kGroup,
        size_t{what.weight_kind == MT_WEIGHT_SPLIT ? 2u : 0u} * kGroup,
        size_t{what.gradient_kind == MT_GRADIENT_BF16 ? 2u : 4u} * kGroup,
        moments[what.state_kind],
        scales[what.state_kind],
    };
}

inline uint8_t* at(const void* base, size_t offset) {
    return base ? const_cast<uint8_t*>(static_cast<const uint8_t*>(base)) + offset : nullptr;
}

inline Streams streams_of(const Update& what, const Widths& widths, size_t group) {
    Streams here;
    here.weight = at(what.weight, group * widths.weight);
    here.residual = at(what.residual, group * widths.residual);
    here.gradient = at(what.gradient, group * widths.gradient);
    for (int i = 0; i < 2; ++i) {
        here.moments[i] = at(what.moments[i], group * widths.moment);
        here.scales[i] = at(what.scales[i], group * widths.scale);
    }
    return here;
}

// A partial group is worked on in a whole one, of which only its own part is copied back.
void update_part(const Update& what, const Widths& widths, const Streams& here, Group loop, uint64_t key, int count) {
    alignas(64) uint8_t rooms[7][4 * kGroup] = {};
    const Streams inside = {rooms[0], rooms[1], rooms[2], {rooms[3], rooms[4]}, {rooms[5], rooms[6]}};
    const size_t n = static_cast<size_t>(count);
    // Codes and scales exist for whole blocks.
    const size_t block = what.state_kind == MT_STATE_8BIT ? Signed8::kBlock : Signed4::kBlock;
    const size_t blocks = (n + block - 1) / block;
    const size_t whole = widths.scale ? blocks * block : n;
    const size_t weight = n * widths.weight / kGroup, residual = n * widths.residual / kGroup;
    const size_t moment = whole * widths.moment / kGroup, scale = widths.scale ? blocks * sizeof(float) : 0;
    __builtin_memcpy(inside.weight, here.weight, weight);
    if (residual) __builtin_memcpy(inside.residual, here.residual, residual);
    __builtin_memcpy(rooms[2], here.gradient, n * widths.gradient / kGroup);
    const int moments = what.rule == MT_RULE_ADAMW ? 2 : 1;
    for (int i = 0; i < moments; ++i) {
        __builtin_memcpy(inside.moments[i], here.moments[i], moment);
        if (scale) __builtin_memcpy(inside.scales[i], here.scales[i], scale);
    }
    loop(inside, key, what.scalars, count);
    __builtin_memcpy(here.weight, inside.weight, weight);
    if (residual) __builtin_memcpy(here.residual, inside.residual, residual);
    for (int i = 0; i < moments; ++i) {
        __builtin_memcpy(here.moments[i], inside.moments[i], moment);
        if (scale) __builtin_memcpy(here.scales[i], inside.scales[i], scale);
    }
}

void update(const Update& what, size_t begin, size_t end) {
    const Widths widths = widths_of(what);
    const Group loop = loop_of(what);
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

// ---- the same loads and stores, without arithmetic

void read_and_write(uint8_t* stream, size_t bytes, uint8_t zero) {
    for (size_t i = 0; i < bytes; ++i) stream[i] ^= zero;
}

uint8_t read(const uint8_t* stream, size_t bytes) {
    uint8_t seen = 0;
    for (size_t i = 0; i < bytes; ++i) seen |= stream[i];
    return seen;
}

void touch(const Update& what, size_t begin, size_t end) {
    const Widths widths = widths_of(what);
    volatile uint8_t nothing = 0;  // or the compiler would know that nothing changes
    const uint8_t zero = nothing;
    uint8_t seen = 0;
    for (size_t group = begin; group < end && (group + 1) * kGroup <= what.count; ++group) {
        const Streams here = streams_of(what, widths, group);
        seen |= read(here.gradient, widths.gradient);
        read_and_write(here.weight, widths.weight, zero);
        if (here.residual) read_and_write(here.residual, widths.residual, zero);
        for (int i = 0; i < (what.rule == MT_RULE_ADAMW ? 2 : 1); ++i) {
            read_and_write(here.moments[i], widths.moment, zero);
            if (here.scales[i]) read_and_write(here.scales[i], widths.scale, zero);
        }
    }
    nothing = seen;
}

}  // namespace

#define MT_TEXT(word) #word
#define MT_NAME(word) MT_TEXT(word)
const Kernels kernels = {MT_NAME(MT_ISA), update, touch};

}  // namespace megatrain::MT_ISA
