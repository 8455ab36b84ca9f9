// The C ABI of the lossless codec. Python declares the same signatures in src/megatrain/native/lossless.py.
//
// As in megatrain.h: every function returns 0 or an errno value, nothing throws, and `threads` is at least 1 and
// changes no bit of any result. Elements are aligned to their size. The byte format is described in lossless.cpp.
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

// The most bytes that `count` elements can take when encoded. EINVAL: an unknown dtype; EOVERFLOW: too many elements.
MT_API int mt_lossless_bound(size_t count, int dtype, size_t* bytes);

// Encodes `count` elements into `encoded`. ENOSPC: they need more than `capacity` bytes; mt_lossless_bound bytes are
// always enough. `used` is set to what the encoding takes.
MT_API int mt_lossless_encode(const void* elements, size_t count, int dtype, void* encoded, size_t capacity,
                              size_t* used, int threads);

// Decodes `bytes` bytes, which may come from anywhere, into `count` elements. EMSGSIZE: they are an encoding, but not
// of that many elements of that dtype. EBADMSG: they are damaged; `bad_chunk` is the first chunk that is, and every
// other chunk was still decoded, or it is SIZE_MAX if the header is damaged, and nothing was decoded.
MT_API int mt_lossless_decode(const void* encoded, size_t bytes, void* elements, size_t count, int dtype, int threads,
                              size_t* bad_chunk);

#ifdef __cplusplus
}
#endif
