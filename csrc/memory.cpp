// Faulting in and copying large ranges of host memory with several threads.
#include "megatrain.h"

#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "parallel.h"

using megatrain::in_parallel;

int mt_abi_version(void) { return MT_ABI_VERSION; }

int mt_touch(void* base, size_t bytes, int threads) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const auto origin = reinterpret_cast<uintptr_t>(base);
    // Reading a new anonymous page only maps the shared zero page, so each page needs a write. Writing the same byte
    // back preserves the contents; volatile keeps the compiler from removing it. Ranges start on page boundaries.
    return in_parallel(origin, bytes, page, threads, [=](size_t begin, size_t end) {
        auto* bytes_at = static_cast<volatile unsigned char*>(base);
        for (size_t at = begin; at < end; at += page - (origin + at) % page) bytes_at[at] = bytes_at[at];
    });
}

int mt_copy(void* dst, const void* src, size_t bytes, int threads) {
    if (bytes != 0 && src == nullptr) return EFAULT;
    constexpr size_t kCacheLine = 64;  // no two threads write to one line
    return in_parallel(reinterpret_cast<uintptr_t>(dst), bytes, kCacheLine, threads, [=](size_t begin, size_t end) {
        std::memcpy(static_cast<char*>(dst) + begin, static_cast<const char*>(src) + begin, end - begin);
    });
}
