// Cutting a range among threads.
#pragma once

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace megatrain {


// Below this a thread costs more to start than it saves.
constexpr size_t kBytesPerThread = size_t{1} << 20;

inline int usable_cpus() {
    cpu_set_t masks[16];  // 16384 CPUs; the call fails when the kernel's mask is longer than ours
    CPU_ZERO_S(sizeof masks, masks);
    if (sched_getaffinity(0, sizeof masks, masks) != 0) return 1;
    return std::max(1, CPU_COUNT_S(sizeof masks, masks));
}

// Cuts [0, bytes) into one range per thread, each start a multiple of `grain` after the address `origin`
// is taken into account, and calls work(begin, end) for each; the last range runs on the calling thread.
template <typename Work>
int in_parallel(uintptr_t origin, size_t bytes, size_t grain, int threads, Work work) noexcept {
    if (threads < 1) return EINVAL;
    if (bytes == 0) return 0;
    if (origin == 0) return EFAULT;

    const size_t wanted = std::min<size_t>(threads, usable_cpus());
    const size_t parts = std::clamp<size_t>(bytes / kBytesPerThread, 1, wanted);
    const size_t lead = origin % grain;
    const auto cut = [&](size_t part) -> size_t {
        if (part == 0) return 0;
        if (part == parts) return bytes;
        const size_t even = bytes / parts * part;
        return (even + lead) / grain * grain - lead;
    };

    int error = 0;
    std::vector<std::thread> helpers;
    try {
        helpers.reserve(parts - 1);
        for (size_t part = 0; part + 1 < parts; ++part) helpers.emplace_back(work, cut(part), cut(part + 1));
        work(cut(parts - 1), bytes);
    } catch (const std::system_error& failure) {
        error = failure.code().value();
    } catch (const std::bad_alloc&) {
        error = ENOMEM;
    }
    // A std::thread that is destroyed while joinable ends the process, and its range is still in use.
    for (std::thread& helper : helpers) helper.join();
    return error;
}

}  // namespace megatrain
