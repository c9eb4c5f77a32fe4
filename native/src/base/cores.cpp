#include "base/cores.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <set>
#include <string>
#include <thread>

#ifdef __linux__
#include <sched.h>
#endif

namespace lkv {
namespace {

int logical_cores() { return std::max(1, static_cast<int>(std::thread::hardware_concurrency())); }

#ifdef __linux__
// Cores of this process's processors; 0 where the system does not say.
int physical_cores() {
    cpu_set_t may;
    if (sched_getaffinity(0, sizeof may, &may) != 0) {
        return 0;
    }
    std::set<std::string> cores;  // each by the list of its threads
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (CPU_ISSET(cpu, &may)) {
            std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list");
            std::string threads;
            if (!std::getline(file, threads)) {
                return 0;
            }
            cores.insert(threads);
        }
    }
    return static_cast<int>(cores.size());
}

// The limit of the control group (cgroup v2): "QUOTA PERIOD" in microseconds, or "max PERIOD"; 0: no limit.
int quota() {
    std::ifstream file("/sys/fs/cgroup/cpu.max");
    double allowed = 0;
    double period = 0;
    return file >> allowed >> period && period > 0 ? static_cast<int>(std::ceil(allowed / period)) : 0;
}
#else
int physical_cores() { return 0; }
int quota() { return 0; }
#endif

}  // namespace

int usable_cores() {
    const int cores = physical_cores();
    const int limit = quota();
    const int found = cores > 0 ? cores : logical_cores();
    return limit > 0 ? std::min(found, limit) : found;
}

}  // namespace lkv
