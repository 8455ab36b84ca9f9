// The C ABI of the lossless codec. Python declares the same signatures in src/megatrain/native/lossless.py.
//
// As in megatrain.h: every function returns 0 or an errno value, nothing throws, and `threads` is at least 1 and does
// not affect the result. Elements are aligned to their size. lossless.cpp describes the byte format.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "megatrain.h"

enum mt_lossless_dtype {
    MT_LOSSLESS_FP32 = 1,
    MT_LOSSLESS_BF16 = 2,
};

#ifdef __cplusplus
extern "C" {
#endif

// The maximum encoded size of `count` elements. EINVAL: unknown dtype; EOVERFLOW: too many elements.
MT_API int mt_lossless_bound(size_t count, int dtype, size_t* bytes);

// Encodes `count` elements into `encoded` and sets `used` to the encoded size. ENOSPC: more than `capacity` bytes are
// needed; mt_lossless_bound bytes are always enough.
MT_API int mt_lossless_encode(const void* elements, size_t count, int dtype, void* encoded, size_t capacity,
                              size_t* used, int threads);

// Decodes untrusted bytes into `count` elements. EMSGSIZE: a valid encoding of another count or dtype. EBADMSG: damage;
// `bad_chunk` is the first damaged chunk, and all intact chunks were decoded, or SIZE_MAX if the header is damaged and
// nothing was decoded.
MT_API int mt_lossless_decode(const void* encoded, size_t bytes, void* elements, size_t count, int dtype, int threads,
                              size_t* bad_chunk);

#ifdef __cplusplus
}
#endif
