// A persistent thread pool: work is split into parts, and free threads take the next part.
#pragma once

#include <cstddef>

namespace megatrain {

// CPUs that this process may use: the calling thread's affinity, capped by the cgroup's quota. At least 1.
int usable_cpus() noexcept;

// Calls work(context, part) for each part in [0, parts), on the calling thread and on at most threads - 1 others.
// Returns the first error of a call, or 0; after an error no further part is started. Callers on several threads share
// the pool; a forked child gets a new one.
int run_parts(size_t parts, int threads, int (*work)(void* context, size_t part) noexcept, void* context) noexcept;

}  // namespace megatrain
