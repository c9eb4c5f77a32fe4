// Multiprocessors that are kept for readers.
#pragma once

#include <cuda_runtime_api.h>

namespace consumer {

// A stream before those of the program, whose kernels run on `n` multiprocessors and nowhere else, as evenly over the
// chip's clusters (GPCs) as the driver numbers them. n: even.
//
// Left to the scheduler, a burst of readers went where room was when it began, which the program's last work decided. A cluster
// passes only so many bytes: on an H100 24 readers read 2.8 TB/s from all clusters and 1.8 TB/s from two.
cudaStream_t stream_on(int device, int n);

}  // namespace consumer
