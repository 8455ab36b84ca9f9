// XXH64 with seed 0 (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace megatrain {
namespace xxh {

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87, kPrime2 = 0xC2B2AE3D27D4EB4F, kPrime3 = 0x165667B19E3779F9,
                   kPrime4 = 0x85EBCA77C2B2AE63, kPrime5 = 0x27D4EB2F165667C5;

inline uint64_t rotate(uint64_t value, int bits) { return value << bits | value >> (64 - bits); }

template <typename Word>
inline uint64_t load(const unsigned char* at) {
    Word word;
    std::memcpy(&word, at, sizeof word);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = sizeof word == 8 ? __builtin_bswap64(word) : __builtin_bswap32(word);
#endif
    return word;
}

inline uint64_t round(uint64_t sum, uint64_t word) { return rotate(sum + word * kPrime2, 31) * kPrime1; }

inline uint64_t merge(uint64_t hash, uint64_t sum) { return (hash ^ round(0, sum)) * kPrime1 + kPrime4; }

}  // namespace xxh

inline uint64_t xxh64(const unsigned char* at, size_t count) {
    const unsigned char* const end = at + count;
    using namespace xxh;
    uint64_t hash = kPrime5;
    if (count >= 32) {
        uint64_t a = kPrime1 + kPrime2, b = kPrime2, c = 0, d = 0 - kPrime1;
        for (; end - at >= 32; at += 32) {
            a = round(a, load<uint64_t>(at));
            b = round(b, load<uint64_t>(at + 8));
            c = round(c, load<uint64_t>(at + 16));
            d = round(d, load<uint64_t>(at + 24));
        }
        hash = rotate(a, 1) + rotate(b, 7) + rotate(c, 12) + rotate(d, 18);
        hash = merge(merge(merge(merge(hash, a), b), c), d);
    }
    hash += count;
    for (; end - at >= 8; at += 8) hash = rotate(hash ^ round(0, load<uint64_t>(at)), 27) * kPrime1 + kPrime4;
    for (; end - at >= 4; at += 4) hash = rotate(hash ^ load<uint32_t>(at) * kPrime1, 23) * kPrime2 + kPrime3;
    for (; at < end; ++at) hash = rotate(hash ^ *at * kPrime5, 11) * kPrime1;
    hash = (hash ^ hash >> 33) * kPrime2;
    hash = (hash ^ hash >> 29) * kPrime3;
    return hash ^ hash >> 32;
}

}  // namespace megatrain
