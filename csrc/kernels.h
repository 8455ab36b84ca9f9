// The kernels, per instruction set. Each kernels_*.cpp compiles kernels.inl into its own namespace.
#pragma once

#include <stddef.h>

#include "megatrain.h"

namespace megatrain {

using Update = struct ::mt_update;  // a function has the same name

// Updates the groups of 256 elements [begin, end); the last group of an update may be partial.
using Work = void (*)(const Update& what, size_t begin, size_t end);

// The sum of squares of a chunk of a gradient that has `count` elements (mt_square_sums in megatrain.h).
using Sum = double (*)(const void* values, int count, int chunk);
constexpr int kMaxChunk = 1 << 16;

struct Kernels {
    const char* name;
    Work update;
    Work touch;
    Sum square_sum[3];  // by mt_gradient
};

namespace portable { extern const Kernels kernels; }
#if defined(__x86_64__)
namespace avx2 { extern const Kernels kernels; }
namespace avx512 { extern const Kernels kernels; }
#endif

}  // namespace megatrain
