// How many CPUs this process may keep busy.
#pragma once

namespace megatrain {

// Those the calling thread may run on, and no more than its cgroup's quota pays for. At least 1.
int usable_cpus() noexcept;

}  // namespace megatrain
