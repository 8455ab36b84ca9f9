// Threads that stay: work is cut into parts, and whoever is free takes the next. How many can be busy at once.
#pragma once

#include <cstddef>

namespace megatrain {

// CPUs that this process may keep busy: those the calling thread may run on, and no more than its cgroup's quota pays
// for. At least 1.
int usable_cpus() noexcept;

// Calls work(context, part) once for each part in [0, parts), on the calling thread and on at most threads - 1 others.
// Returns the first error that a call returned, or 0; parts that nobody has begun by then are left out. Callers on
// several threads share the pool; a forked child has a pool of its own.
int run_parts(size_t parts, int threads, int (*work)(void* context, size_t part) noexcept, void* context) noexcept;

}  // namespace megatrain
