// How many threads are worth starting.
#pragma once

namespace lkv {

// Physical cores that this process may run on, no more than its container's share of processor time; at least 1. A second thread of
// a core shares its vector units, which a matrix product fills alone.
int usable_cores();

}  // namespace lkv
