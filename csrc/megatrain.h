// The C ABI of libmegatrain. Python declares the same signatures in src/megatrain/native/library.py.
//
// Functions that can fail return 0 or an errno value. Nothing throws.
#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define MT_API __attribute__((visibility("default")))
#else
#define MT_API
#endif

// Incremented when a signature or a meaning below changes; equal to ABI_VERSION in library.py.
#define MT_ABI_VERSION 7

#ifdef __cplusplus
extern "C" {
#endif

MT_API int mt_abi_version(void);

// Faults in every page of [base, base + bytes) for writing, from several threads, without changing the contents. The
// range must not be written meanwhile. `threads` is at least 1 and is capped by the CPUs that this process may use.
MT_API int mt_touch(void* base, size_t bytes, int threads);

// The CPU quota of this process's cgroup in CPUs, rounded up; 0 without a quota. `root` is prepended to /proc and /sys:
// "" outside of tests.
MT_API int mt_cpu_quota(const char* root);

// memcpy from several threads. The ranges must not overlap. `threads` as above.
MT_API int mt_copy(void* dst, const void* src, size_t bytes, int threads);

// Kinds of operands. The numbers are part of the ABI; native/library.py and optim/rules.py use the same.
enum mt_rule { MT_RULE_ADAMW = 0, MT_RULE_LION = 1, MT_RULE_SGD = 2 };
enum mt_weight {
    MT_WEIGHT_FP32 = 0,   // FP32, its own master
    MT_WEIGHT_SPLIT = 1,  // BF16 high half in `weight`, int16 low half in `residual`: an exact FP32 master
    MT_WEIGHT_BF16 = 2,   // BF16 without a master, rounded stochastically
};
enum mt_gradient {
    MT_GRADIENT_FP32 = 0,          // FP32
    MT_GRADIENT_BF16 = 1,          // BF16
    MT_GRADIENT_FP32_TO_BF16 = 2,  // an FP32 sum, rounded to BF16 (nearest even) before use
};
enum mt_state {
    MT_STATE_FP32 = 0,
    MT_STATE_BF16 = 1,  // rounded stochastically
    MT_STATE_8BIT = 2,  // codes with one FP32 scale per 256 elements (csrc/formats.h)
    MT_STATE_4BIT = 3,  // two codes per byte, one FP32 scale per 128 elements
};

struct mt_update {
    int32_t rule, weight_kind, gradient_kind, state_kind;
    void* weight;
    int16_t* residual;     // MT_WEIGHT_SPLIT only
    const void* gradient;
    void* moments[2];      // AdamW: first and second; Lion and SGD: one, the other is null
    float* scales[2];      // 8 and 4 bits only
    uint64_t count;        // elements
    uint64_t first;        // index of the first element in its slab, a multiple of 256; selects the random bits
    uint64_t seed;
    float scalars[12];     // of the rule, in the order of src/megatrain/optim/rules.py
};

// One optimizer step in one pass over all streams. The result does not depend on `threads`, the instruction set, or the
// calling thread's rounding and flushing modes. All pointers are aligned to their elements. The last block of codes may
// be partial: its unused codes stay zero.
MT_API int mt_update(const struct mt_update* what, int threads);

// The loads and stores of an update without its arithmetic: reads every stream and writes all but the gradient back
// unchanged (complete groups of 256 only). Measures the memory bandwidth limit; for benchmarks.
MT_API int mt_touch_streams(const struct mt_update* what, int threads);

// Writes the FP64 sum of squares of every `chunk` elements of a gradient (`kind` is one of mt_gradient): the second
// half is added to the first until one number is left. `chunk` is a power of two, at most 65536; a partial last chunk
// counts as padded with zeros. As above, the result does not depend on threads or modes.
MT_API int mt_square_sums(const void* values, int kind, size_t count, size_t chunk, double* partials, int threads);

// Instruction sets that were compiled in and that this CPU supports, best last. The best is used by default;
// `mt_isa_use` selects another for later updates (EINVAL if the number does not exist).
MT_API int mt_isa_count(void);
MT_API const char* mt_isa_name(int number);
MT_API int mt_isa_use(int number);

#ifdef __cplusplus
}
#endif
