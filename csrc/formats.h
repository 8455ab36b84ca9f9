// Block-wise codes of 8 and 4 bits, as src/megatrain/store/formats.py defines them. Compile-time constants only: the
// kernels are compiled once per instruction set, and the linker must not share functions between them.
#pragma once

#include <stdint.h>

namespace megatrain {

// Elements that share a key for random bits (store/random.py); a multiple of the block sizes.
constexpr int kGroup = 256;

template <int kBitsOfCode, int kBlockOfScale, int kMantissaBits, bool kHasSign>
struct Codes {
    static constexpr int kBits = kBitsOfCode;
    static constexpr int kBlock = kBlockOfScale;
    static constexpr bool kSigned = kHasSign;
    static constexpr int kLevels = 1 << (kBits - (kSigned ? 1 : 0));     // per sign
    static constexpr int kShift = 23 - kMantissaBits;                    // from a code to the bits of its level
    static constexpr int kBase = (127 << kMantissaBits) - (kLevels - 1);  // level(c) has the bits (c + base) << shift
    // Magnitudes under level 1, times this, are compared with the 16 random bits.
    static constexpr float kBelow = 65536.0f / __builtin_bit_cast(float, (1 + kBase) << kShift);
    static_assert(kGroup % kBlock == 0 && kShift >= 16);
};

using Signed8 = Codes<8, 256, 3, true>;
using Positive8 = Codes<8, 256, 3, false>;
using Signed4 = Codes<4, 128, 1, true>;
using Positive4 = Codes<4, 128, 0, false>;

}  // namespace megatrain
