// Sums of squares of a gradient in host memory: bit for bit what `reference_square_sum` in src/megatrain/stream/norm.py
// gives, in one pass and without a copy.
//
// A chunk is one tree: its second half is added to its first until one number is left. Seen as eight rows, the first
// three halvings add rows to rows, so one loop goes from the gradient to one row of sums; the others halve that row in
// the cache. Squares are exact in FP64, and a chunk is never cut, so neither threads nor instruction sets matter.
#include <algorithm>
#include <cerrno>
#include <cfenv>

#include "megatrain.h"
#include "parallel.h"

#if defined(__x86_64__)
#define MT_EVERY_ISA __attribute__((target_clones("default", "arch=x86-64-v3")))
#else
#define MT_EVERY_ISA
#endif

namespace megatrain {
namespace {

#include "arithmetic.inl"

constexpr size_t kRows = 8, kMostElements = size_t{1} << 16;

// Round to nearest, gradual underflow, whatever the caller's thread has set: the smallest values count on every thread.
class DefaultArithmetic {
   public:
    DefaultArithmetic() {
        std::fegetenv(&found_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultArithmetic() { std::fesetenv(&found_); }

   private:
    std::fenv_t found_;
};

template <int kind>
inline double square(const void* from, size_t i) {
    float value;
    if (kind == MT_GRADIENT_BF16) {
        value = widened(static_cast<const uint16_t*>(from)[i]);
    } else {
        value = static_cast<const float*>(from)[i];
        if (kind == MT_GRADIENT_FP32_TO_BF16) value = rounded_to_nearest(value);
    }
    return static_cast<double>(value) * static_cast<double>(value);
}

// Eight rows of squares into one of sums, in the order of three halvings; elements from `count` on are zeros.
template <int kind, bool whole>
inline void add_rows(const void* from, size_t count, size_t row, double* __restrict sums) {
    for (size_t i = 0; i < row; ++i) {
        const auto at = [=](size_t k) {
            return whole || i + k * row < count ? square<kind>(from, i + k * row) : 0.0;
        };
        sums[i] = ((at(0) + at(4)) + (at(2) + at(6))) + ((at(1) + at(5)) + (at(3) + at(7)));
    }
}

MT_EVERY_ISA void add_fp32(const void* from, size_t row, double* __restrict sums) {
    add_rows<MT_GRADIENT_FP32, true>(from, 0, row, sums);
}

MT_EVERY_ISA void add_bf16(const void* from, size_t row, double* __restrict sums) {
    add_rows<MT_GRADIENT_BF16, true>(from, 0, row, sums);
}

MT_EVERY_ISA void add_fp32_to_bf16(const void* from, size_t row, double* __restrict sums) {
    add_rows<MT_GRADIENT_FP32_TO_BF16, true>(from, 0, row, sums);
}

MT_EVERY_ISA void add_halves(double* sums, size_t half) {
    const double* __restrict second = sums + half;
    double* __restrict first = sums;
    for (size_t i = 0; i < half; ++i) first[i] += second[i];
}

void add_whole(int kind, const void* from, size_t row, double* sums) {
    switch (kind) {
        case MT_GRADIENT_FP32: return add_fp32(from, row, sums);
        case MT_GRADIENT_BF16: return add_bf16(from, row, sums);
        default: return add_fp32_to_bf16(from, row, sums);
    }
}

void add_part(int kind, const void* from, size_t count, size_t row, double* sums) {
    switch (kind) {
        case MT_GRADIENT_FP32: return add_rows<MT_GRADIENT_FP32, false>(from, count, row, sums);
        case MT_GRADIENT_BF16: return add_rows<MT_GRADIENT_BF16, false>(from, count, row, sums);
        default: return add_rows<MT_GRADIENT_FP32_TO_BF16, false>(from, count, row, sums);
    }
}

double tree(int kind, const void* from, size_t count, size_t chunk) {
    alignas(64) double sums[kMostElements / kRows];
    // Chunks of fewer than eight are as good with zeros behind them: the halvings that meet those change nothing.
    size_t row = std::max<size_t>(chunk / kRows, 1);
    if (count == row * kRows) {
        add_whole(kind, from, row, sums);
    } else {
        add_part(kind, from, count, row, sums);
    }
    for (; row > 1; row /= 2) add_halves(sums, row / 2);
    return sums[0];
}

}  // namespace
}  // namespace megatrain

int mt_square_sums(const void* values, int kind, size_t count, size_t chunk, double* partials, int threads) {
    using namespace megatrain;
    if (kind < MT_GRADIENT_FP32 || kind > MT_GRADIENT_FP32_TO_BF16) return EINVAL;
    if (chunk == 0 || chunk > kMostElements || (chunk & (chunk - 1)) != 0) return EINVAL;
    if (count != 0 && (values == nullptr || partials == nullptr)) return EFAULT;
    const size_t item = kind == MT_GRADIENT_BF16 ? 2 : 4, grain = chunk * item;
    // An origin that is a multiple of the grain makes every cut fall between chunks.
    return in_parallel(grain, count * item, grain, threads, [=](size_t begin, size_t end) {
        const DefaultArithmetic arithmetic;
        for (size_t at = begin; at < end; at += grain) {
            const size_t left = count - at / item;
            partials[at / grain] = tree(kind, static_cast<const char*>(values) + at, std::min(chunk, left), chunk);
        }
    });
}
