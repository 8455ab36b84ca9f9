// Splitting a range of bytes among threads.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <new>
#include <system_error>

#include "pool.h"

namespace megatrain {

// Below this, waking a thread costs more than it saves.
constexpr size_t kBytesPerPart = size_t{1} << 20;
// More parts than threads, so that threads that finish early find more work.
constexpr size_t kPartsPerThread = 8;

// Calls work(part) for each part, on the calling thread and the pool's. Exceptions become error codes.
template <typename Work>
int in_parts(size_t parts, size_t threads, Work work) noexcept {
    const auto call = [](void* context, size_t part) noexcept -> int {
        try {
            (*static_cast<Work*>(context))(part);
        } catch (const std::system_error& failure) {
            return failure.code().value();
        } catch (const std::bad_alloc&) {
            return ENOMEM;
        }
        return 0;
    };
    return run_parts(parts, static_cast<int>(threads), call, &work);
}

// Splits [0, bytes) into parts at addresses `origin` + offset that are multiples of `grain`, and calls work(begin, end)
// for each.
template <typename Work>
int in_parallel(uintptr_t origin, size_t bytes, size_t grain, int threads, Work work) noexcept {
    if (threads < 1) return EINVAL;
    if (bytes == 0) return 0;
    if (origin == 0) return EFAULT;

    const size_t wanted = std::min<size_t>(threads, usable_cpus()), lead = origin % grain;
    const size_t parts = std::clamp<size_t>(bytes / kBytesPerPart, 1, wanted == 1 ? 1 : wanted * kPartsPerThread);
    const auto start = [=](size_t part) -> size_t {
        if (part == 0 || part == parts) return part ? bytes : 0;
        const size_t down = (bytes / parts * part + lead) / grain * grain;
        return down < lead ? 0 : down - lead;
    };
    return in_parts(parts, wanted, [=](size_t part) {
        const size_t begin = start(part), end = start(part + 1);
        if (begin < end) work(begin, end);
    });
}

}  // namespace megatrain
