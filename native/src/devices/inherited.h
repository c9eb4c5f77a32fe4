// CUDA in a child of fork().
#pragma once

#include "base/error.h"
#include "base/forks.h"

namespace lkv::cuda {

// Errors: Error in a child of fork(), which inherits the addresses of CUDA's memory but not the context.
inline void refuse_inherited() {
    static const int forks_before = forks();
    if (forks() != forks_before) {
        fail("gpu",
             "expected the process that began to use the GPU; got a child forked from it, where CUDA does not run; ",
             "start the child anew (multiprocessing: \"spawn\"), or fork before the first model on a GPU");
    }
}

}  // namespace lkv::cuda
