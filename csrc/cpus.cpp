// A container is often limited by a quota of CPU time while it sees every CPU of the machine. Threads beyond the quota
// are stopped for the rest of each period, all of them, in the middle of what they do.
#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>
#include <string>

#include "megatrain.h"
#include "pool.h"

namespace megatrain {
namespace {

double tighter(double one, double other) { return one > 0.0 && other > 0.0 ? std::min(one, other) : one + other; }

// CPU time over wall time that the folder of a cgroup allows (v2, else v1), or 0: no limit, written as "max" or -1.
double limit_in(const std::string& folder) {
    double quota = 0.0, period = 0.0;
    if (!(std::ifstream(folder + "/cpu.max") >> quota >> period)) {
        std::ifstream(folder + "/cpu.cfs_quota_us") >> quota;
        std::ifstream(folder + "/cpu.cfs_period_us") >> period;
    }
    return quota > 0.0 && period > 0.0 ? quota / period : 0.0;
}

// The tightest limit of a group and those above it. A container may see its own group as the root of the mount and read
// a path of the host: the folders of that path are missing, and the root is still looked at.
double tightest(const std::string& mount, const std::string& group) {
    double lowest = limit_in(mount);
    for (std::string path = mount + group; path.size() > mount.size(); path.resize(path.rfind('/'))) {
        lowest = tighter(lowest, limit_in(path));
    }
    return lowest;
}

double quota_under(const std::string& root) {
    std::ifstream groups(root + "/proc/self/cgroup");
    double lowest = 0.0;
    for (std::string line; std::getline(groups, line);) {
        std::istringstream fields(line);
        std::string hierarchy, controllers, group;
        std::getline(std::getline(fields, hierarchy, ':'), controllers, ':');
        if (!std::getline(fields, group)) continue;
        const bool unified = controllers.empty();
        if (!unified && ("," + controllers + ",").find(",cpu,") == std::string::npos) continue;
        // The usual places; the combined name of v1 is a link beside them where it is not the folder itself.
        for (const char* place : {unified ? "" : "/cpu", unified ? "/unified" : "/cpu,cpuacct"}) {
            lowest = tighter(lowest, tightest(root + "/sys/fs/cgroup" + place, group));
        }
    }
    return lowest;
}

}  // namespace

int usable_cpus() noexcept {
    cpu_set_t masks[16];  // 16384 CPUs; the call fails when the kernel's mask is longer than ours
    CPU_ZERO_S(sizeof masks, masks);
    if (sched_getaffinity(0, sizeof masks, masks) != 0) return 1;
    const int allowed = std::max(1, CPU_COUNT_S(sizeof masks, masks));
    static const int paid = mt_cpu_quota("");  // files: too slow to read for every update
    return paid > 0 ? std::min(allowed, paid) : allowed;
}

}  // namespace megatrain

int mt_cpu_quota(const char* root) { return static_cast<int>(std::ceil(megatrain::quota_under(root))); }
