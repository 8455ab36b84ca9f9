// The C ABI of libmegatrain. Python declares the same signatures in src/megatrain/native/library.py.
//
// Every function returns 0 or an errno value, except mt_abi_version. Nothing throws across this line.
#pragma once

#include <stddef.h>

#if defined(__GNUC__)
#define MT_API __attribute__((visibility("default")))
#else
#define MT_API
#endif

// Raised whenever a signature or a meaning below changes; equal to ABI_VERSION in library.py.
#define MT_ABI_VERSION 1

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

#ifdef __cplusplus
}
#endif
