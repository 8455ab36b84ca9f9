// The C ABI of libmegatrain. Python declares the same signatures in src/megatrain/native/library.py.
//
// Every function returns 0 or an errno value, except mt_abi_version. Nothing throws across this line.
#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define MT_API __attribute__((visibility("default")))
#else
#define MT_API
#endif

// Raised whenever a signature or a meaning below changes; equal to ABI_VERSION in library.py.
#define MT_ABI_VERSION 2

#ifdef __cplusplus
extern "C" {
#endif

MT_API int mt_abi_version(void);

// Fault in every page of [base, base + bytes) for writing, from several threads, leaving the contents as
// they are. Nobody else may write to the range meanwhile. `threads` is at least 1 and is capped by the
// CPUs this process may run on.
MT_API int mt_touch(void* base, size_t bytes, int threads);

// memcpy from several threads. The ranges must not overlap. `threads` as above.
MT_API int mt_copy(void* dst, const void* src, size_t bytes, int threads);

// How the gradient of an update is stored, and whether it is rounded on the way in.
enum mt_gradient {
    MT_GRADIENT_FP32 = 0,          // FP32, as it is
    MT_GRADIENT_BF16 = 1,          // BF16
    MT_GRADIENT_FP32_TO_BF16 = 2,  // an FP32 sum, rounded to BF16 (nearest even) before use
};

// One AdamW step on `count` elements, in one pass over all streams. The FP32 master is `weight` itself if
// `residual` is null, else the pair (BF16 high half in `weight`, int16 residual). `scalars` are clip, beta1,
// 1 - beta1, beta2, 1 - beta2, root correction, eps, decay, step size. The result does not depend on `threads`,
// nor on the instruction set that is used. All pointers are aligned to their elements.
MT_API int mt_adamw(void* weight, int16_t* residual, float* exp_avg, float* exp_avg_sq, const void* gradient,
                    int gradient_kind, size_t count, const float* scalars, int threads);

#ifdef __cplusplus
}
#endif
