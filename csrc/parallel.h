// Cutting a range of bytes among threads.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <new>
#include <system_error>

#include "pool.h"

namespace megatrain {

// Below this a thread costs more to wake than it saves.
constexpr size_t kBytesPerPart = size_t{1} << 20;
// Enough that whoever is done early finds more to do.
constexpr size_t kPartsPerThread = 8;

// Cuts [0, bytes) into parts, each start a multiple of `grain` after the address `origin` is taken into account, and
// calls work(begin, end) for each, on the calling thread and on the pool's. What it throws becomes an error code.
template <typename Work>
int in_parallel(uintptr_t origin, size_t bytes, size_t grain, int threads, Work work) noexcept {
    if (threads < 1) return EINVAL;
    if (bytes == 0) return 0;
    if (origin == 0) return EFAULT;

    const size_t wanted = std::min<size_t>(threads, usable_cpus());
    struct Cut {
        size_t bytes, grain, lead, parts;
        Work& work;

        size_t start(size_t part) const {
            if (part == 0) return 0;
            if (part == parts) return bytes;
            const size_t even = bytes / parts * part;
            const size_t down = (even + lead) / grain * grain;
            return down < lead ? 0 : down - lead;
        }
    };
    const size_t most = wanted == 1 ? 1 : wanted * kPartsPerThread;
    Cut cut{bytes, grain, origin % grain, std::clamp<size_t>(bytes / kBytesPerPart, 1, most), work};
    const auto call = [](void* context, size_t part) noexcept -> int {
        const Cut& cut = *static_cast<Cut*>(context);
        const size_t begin = cut.start(part), end = cut.start(part + 1);
        try {
            if (begin < end) cut.work(begin, end);
        } catch (const std::system_error& failure) {
            return failure.code().value();
        } catch (const std::bad_alloc&) {
            return ENOMEM;
        }
        return 0;
    };
    return run_parts(cut.parts, static_cast<int>(wanted), call, &cut);
}

}  // namespace megatrain
