// The CPUs that this process may use. A container often has a quota of CPU time while it sees every CPU of the machine;
// once the quota is used up, all of its threads are stopped for the rest of the period.
//
// Files are read with C functions, so that nothing here depends on the process's C++ library.
#include "pool.h"

#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "megatrain.h"

namespace megatrain {
namespace {

constexpr int kPath = 4096;

// CPU time over wall time, or 0 without a limit. `group` is the directory of a cgroup.
double limit_v2(const char* group) {
    char path[kPath], text[128];
    if (std::snprintf(path, sizeof path, "%s/cpu.max", group) >= kPath) return 0.0;
    std::FILE* file = std::fopen(path, "re");
    if (file == nullptr) return 0.0;
    double quota = 0.0, period = 0.0;  // the quota may also be "max"
    const bool found = std::fgets(text, sizeof text, file) && std::sscanf(text, "%lf %lf", &quota, &period) == 2;
    std::fclose(file);
    return found && quota > 0.0 && period > 0.0 ? quota / period : 0.0;
}

double number_in(const char* group, const char* name) {
    char path[kPath];
    if (std::snprintf(path, sizeof path, "%s/%s", group, name) >= kPath) return 0.0;
    std::FILE* file = std::fopen(path, "re");
    if (file == nullptr) return 0.0;
    double number = 0.0;
    const bool found = std::fscanf(file, "%lf", &number) == 1;
    std::fclose(file);
    return found ? number : 0.0;
}

double limit_v1(const char* group) {
    const double quota = number_in(group, "cpu.cfs_quota_us"), period = number_in(group, "cpu.cfs_period_us");
    return quota > 0.0 && period > 0.0 ? quota / period : 0.0;  // no limit is written as -1
}

// The tightest limit of a group and its ancestors. A container may see its own group as the root of the mount but read
// a path of the host: the directories of that path are then missing, and only the root has a limit.
double tightest(const char* mount, const char* group, double (*limit)(const char*)) {
    char path[kPath];
    if (std::snprintf(path, sizeof path, "%s%s", mount, group) >= kPath) return 0.0;
    const size_t root = std::strlen(mount);
    double lowest = 0.0;
    for (;;) {
        const double here = limit(path);
        if (here > 0.0 && (lowest == 0.0 || here < lowest)) lowest = here;
        char* cut = std::strrchr(path, '/');
        if (std::strlen(path) <= root || cut == nullptr) return lowest;
        *std::max(cut, path + root) = '\0';
    }
}

bool lists(const char* controllers, const char* wanted) {
    const size_t length = std::strlen(wanted);
    for (const char* at = controllers; (at = std::strstr(at, wanted)) != nullptr; at += length) {
        if ((at == controllers || at[-1] == ',') && (at[length] == ',' || at[length] == '\0')) return true;
    }
    return false;
}

double quota_under(const char* root) {
    char path[kPath], line[kPath], mount[kPath];
    if (std::snprintf(path, sizeof path, "%s/proc/self/cgroup", root) >= kPath) return 0.0;
    std::FILE* file = std::fopen(path, "re");
    if (file == nullptr) return 0.0;
    double lowest = 0.0;
    while (std::fgets(line, sizeof line, file) != nullptr) {  // hierarchy:controllers:group
        line[std::strcspn(line, "\n")] = '\0';
        char* controllers = std::strchr(line, ':');
        char* group = controllers ? std::strchr(controllers + 1, ':') : nullptr;
        if (group == nullptr) continue;
        *controllers++ = *group++ = '\0';
        const bool unified = *controllers == '\0';
        if (!unified && !lists(controllers, "cpu")) continue;
        if (std::strcmp(group, "/") == 0) ++group;
        // The usual mount points; v1 combines controllers in one directory, and links to it.
        for (const char* mounted : {unified ? "" : "/cpu", unified ? "/unified" : "/cpu,cpuacct"}) {
            if (std::snprintf(mount, sizeof mount, "%s/sys/fs/cgroup%s", root, mounted) >= kPath) continue;
            const double here = tightest(mount, group, unified ? limit_v2 : limit_v1);
            if (here > 0.0 && (lowest == 0.0 || here < lowest)) lowest = here;
        }
    }
    std::fclose(file);
    return lowest;
}

int rounded_up(double quota) {
    const int whole = static_cast<int>(quota);
    return quota > whole ? whole + 1 : whole;
}

}  // namespace

int usable_cpus() noexcept {
    cpu_set_t masks[16];  // 16384 CPUs; the call fails when the kernel's mask is longer than ours
    CPU_ZERO_S(sizeof masks, masks);
    if (sched_getaffinity(0, sizeof masks, masks) != 0) return 1;
    const int allowed = std::max(1, CPU_COUNT_S(sizeof masks, masks));
    static const int paid = mt_cpu_quota("");  // read once: too slow for every update
    return paid > 0 ? std::min(allowed, paid) : allowed;
}

}  // namespace megatrain

int mt_cpu_quota(const char* root) { return megatrain::rounded_up(megatrain::quota_under(root)); }
