// AdamW in one pass: the sequence of src/megatrain/optim/adamw.py, bit for bit.
//
// The loop below is the only arithmetic there is. It is compiled for several instruction sets and chosen at load
// time; since every operation in it is a correctly rounded IEEE one on a single element, without FMA and without
// reductions, all of them give the same bits.
#include "megatrain.h"

#include <cmath>
#include <cstring>

#include "parallel.h"

#if defined(__x86_64__)
#define MT_EVERY_ISA __attribute__((target_clones("default", "avx2", "arch=x86-64-v4")))
#else
#define MT_EVERY_ISA
#endif

namespace {

struct Scalars {
    float clip, beta1, one_minus_beta1, beta2, one_minus_beta2, root_correction, eps, decay, step_size;
};

inline float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline bool is_nan(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

inline float gradient_fp32(const void* gradient, size_t i) { return static_cast<const float*>(gradient)[i]; }

inline float gradient_bf16(const void* gradient, size_t i) {
    return as_float(static_cast<uint32_t>(static_cast<const uint16_t*>(gradient)[i]) << 16);
}

inline float gradient_rounded(const void* gradient, size_t i) {
    const uint32_t bits = as_bits(static_cast<const float*>(gradient)[i]);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    return as_float(is_nan(bits) ? 0x7fc00000u : rounded);
}

// x = clip g;  m = b1 m + (1-b1) x;  v = b2 v + ((1-b2) x) x;  w = decay w - (step m) / (sqrt(v) / c + eps)
inline float step(float master, float& m, float& v, float gradient, const Scalars& s) {
    const float x = gradient * s.clip;
    m = m * s.beta1 + x * s.one_minus_beta1;
    v = v * s.beta2 + (x * s.one_minus_beta2) * x;
    const float denominator = std::sqrt(v) / s.root_correction + s.eps;
    return master * s.decay - (m * s.step_size) / denominator;
}

// A function per gradient kind: target_clones cannot be put on a template.
#define MT_ADAMW(KIND)                                                                                             \
    MT_EVERY_ISA void adamw_whole_##KIND(float* __restrict weight, float* __restrict m, float* __restrict v,       \
                                         const void* __restrict gradient, size_t begin, size_t end, Scalars s) {   \
        for (size_t i = begin; i < end; ++i) weight[i] = step(weight[i], m[i], v[i], gradient_##KIND(gradient, i), s); \
    }                                                                                                              \
    MT_EVERY_ISA void adamw_split_##KIND(uint16_t* __restrict high, int16_t* __restrict low, float* __restrict m,  \
                                         float* __restrict v, const void* __restrict gradient, size_t begin,       \
                                         size_t end, Scalars s) {                                                  \
        for (size_t i = begin; i < end; ++i) {                                                                     \
            const uint32_t joined = (static_cast<uint32_t>(high[i]) << 16) + static_cast<uint32_t>(static_cast<int32_t>(low[i])); \
            const uint32_t found = as_bits(step(as_float(joined), m[i], v[i], gradient_##KIND(gradient, i), s));   \
            const uint32_t bits = is_nan(found) ? 0x7fc00000u : found;                                             \
            const uint32_t top = (bits + 0x8000u) >> 16;                                                           \
            high[i] = static_cast<uint16_t>(top);                                                                  \
            low[i] = static_cast<int16_t>(bits - (top << 16));                                                     \
        }                                                                                                          \
    }

MT_ADAMW(fp32)
MT_ADAMW(bf16)
MT_ADAMW(rounded)

}  // namespace

int mt_adamw(void* weight, int16_t* residual, float* exp_avg, float* exp_avg_sq, const void* gradient,
             int gradient_kind, size_t count, const float* scalars, int threads) {
    if (gradient_kind < MT_GRADIENT_FP32 || gradient_kind > MT_GRADIENT_FP32_TO_BF16) return EINVAL;
    if (count != 0 && (!exp_avg || !exp_avg_sq || !gradient || !scalars)) return EFAULT;
    Scalars s;
    std::memcpy(&s, scalars, sizeof s);
    // Ranges are in bytes of the moments; a multiple of 64 of them is a multiple of 16 elements of every stream.
    const auto run = [=](size_t begin_byte, size_t end_byte) {
        const size_t begin = begin_byte / sizeof(float), end = end_byte / sizeof(float);
        if (residual == nullptr) {
            const auto kernel = gradient_kind == MT_GRADIENT_FP32   ? adamw_whole_fp32
                                : gradient_kind == MT_GRADIENT_BF16 ? adamw_whole_bf16
                                                                    : adamw_whole_rounded;
            kernel(static_cast<float*>(weight), exp_avg, exp_avg_sq, gradient, begin, end, s);
        } else {
            const auto kernel = gradient_kind == MT_GRADIENT_FP32   ? adamw_split_fp32
                                : gradient_kind == MT_GRADIENT_BF16 ? adamw_split_bf16
                                                                    : adamw_split_rounded;
            kernel(static_cast<uint16_t*>(weight), residual, exp_avg, exp_avg_sq, gradient, begin, end, s);
        }
    };
    const auto origin = reinterpret_cast<uintptr_t>(exp_avg);
    return megatrain::in_parallel(origin, count * sizeof(float), 64, threads, run);
}
