// Entry points of the optimizer step and of sums of squares: chooses kernels and splits work among threads.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cfenv>

#include "formats.h"
#include "kernels.h"
#include "parallel.h"

namespace megatrain {
namespace {

// Round to nearest, gradual underflow, no traps: the results must not depend on what the caller's thread has set, such
// as torch.set_flush_denormal (new threads inherit it).
class PlainArithmetic {
   public:
    PlainArithmetic() {
        std::fegetenv(&found_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~PlainArithmetic() { std::fesetenv(&found_); }

   private:
    std::fenv_t found_;
};

struct Available {
    const Kernels* kernels[3];
    int count;
};

Available find_available() {
    Available found = {{&portable::kernels}, 1};
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) found.kernels[found.count++] = &avx2::kernels;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        found.kernels[found.count++] = &avx512::kernels;
    }
#endif
    return found;
}

const Available& available() {
    static const Available found = find_available();
    return found;
}

std::atomic<const Kernels*> chosen{nullptr};

const Kernels& in_use() {
    const Kernels* kernels = chosen.load(std::memory_order_relaxed);
    return kernels ? *kernels : *available().kernels[available().count - 1];
}

int check(const Update* what, int threads) {
    if (what == nullptr) return EFAULT;
    if (threads < 1) return EINVAL;
    if (what->rule < MT_RULE_ADAMW || what->rule > MT_RULE_SGD) return EINVAL;
    if (what->weight_kind < MT_WEIGHT_FP32 || what->weight_kind > MT_WEIGHT_BF16) return EINVAL;
    if (what->gradient_kind < MT_GRADIENT_FP32 || what->gradient_kind > MT_GRADIENT_FP32_TO_BF16) return EINVAL;
    if (what->state_kind < MT_STATE_FP32 || what->state_kind > MT_STATE_4BIT) return EINVAL;
    if (what->first % kGroup != 0) return EINVAL;
    if (what->count == 0) return 0;
    if (!what->weight || !what->gradient) return EFAULT;
    if (what->weight_kind == MT_WEIGHT_SPLIT && !what->residual) return EFAULT;
    for (int i = 0; i < (what->rule == MT_RULE_ADAMW ? 2 : 1); ++i) {
        if (!what->moments[i]) return EFAULT;
        if (what->state_kind >= MT_STATE_8BIT && !what->scales[i]) return EFAULT;
    }
    return 0;
}

// Parts are long enough for hardware prefetching and short enough that a slow core does not delay the rest.
constexpr size_t kLeastGroups = 64, kMostGroups = 1024;

int run(const Update* what, int threads, Work work) {
    if (const int error = check(what, threads)) return error;
    const size_t groups = what->count / kGroup + (what->count % kGroup != 0);
    if (groups == 0) return 0;
    const size_t wanted = groups < 4 * kLeastGroups ? 1 : std::min(threads, usable_cpus());
    const size_t each = wanted == 1 ? groups : std::clamp(groups / (16 * wanted), kLeastGroups, kMostGroups);
    return in_parts((groups + each - 1) / each, wanted, [=](size_t part) {
        const PlainArithmetic plain;
        work(*what, part * each, std::min((part + 1) * each, groups));
    });
}

}  // namespace
}  // namespace megatrain

int mt_update(const struct mt_update* what, int threads) {
    return megatrain::run(what, threads, megatrain::in_use().update);
}

int mt_touch_streams(const struct mt_update* what, int threads) {
    return megatrain::run(what, threads, megatrain::in_use().touch);
}

int mt_square_sums(const void* values, int kind, size_t count, size_t chunk, double* partials, int threads) {
    using namespace megatrain;
    if (kind < MT_GRADIENT_FP32 || kind > MT_GRADIENT_FP32_TO_BF16) return EINVAL;
    if (chunk == 0 || chunk > kMaxChunk || (chunk & (chunk - 1)) != 0) return EINVAL;
    if (count != 0 && (values == nullptr || partials == nullptr)) return EFAULT;
    const Sum square_sum = in_use().square_sum[kind];
    const size_t item = kind == MT_GRADIENT_BF16 ? 2 : 4, grain = chunk * item;
    // An origin that is a multiple of the grain puts every split between chunks.
    return in_parallel(grain, count * item, grain, threads, [=](size_t begin, size_t end) {
        const PlainArithmetic plain;
        for (size_t at = begin; at < end; at += grain) {
            const size_t here = std::min(chunk, count - at / item);
            partials[at / grain] = square_sum(static_cast<const char*>(values) + at, here, chunk);
        }
    });
}

int mt_isa_count(void) { return megatrain::available().count; }

const char* mt_isa_name(int number) {
    return number < 0 || number >= mt_isa_count() ? nullptr : megatrain::available().kernels[number]->name;
}

int mt_isa_use(int number) {
    if (number < 0 || number >= mt_isa_count()) return EINVAL;
    megatrain::chosen.store(megatrain::available().kernels[number], std::memory_order_relaxed);
    return 0;
}
