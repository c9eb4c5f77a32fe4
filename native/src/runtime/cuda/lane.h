// One of ggml-cuda's backends and the stream it works on.
#pragma once

#include "ggml-cpp.h"
#include "ggml-cuda.h"
#include "ops/cuda/gpu/device_memory.h"
#include "runtime/cuda/ggml/stream.h"

namespace lkv::cuda {

class Lane {
public:
    // device: the current one. first: its thread blocks go before those of other lanes
    explicit Lane(int device, bool first = false) : backend_(ggml_backend_cuda_init(device)) {
        if (backend_ == nullptr) fail("cuda", "expected device ", device, " to start; got an error of ggml-cuda");
        if (first) check(give_priority(backend_.get()), "a stream of high priority");
        stream_ = stream_of(backend_.get());
        check(cudaEventCreateWithFlags(&reached_, cudaEventDisableTiming), "an event");
    }
    Lane(const Lane&) = delete;
    Lane& operator=(const Lane&) = delete;
    ~Lane() { cudaEventDestroy(reached_); }

    ggml_backend_t backend() const { return backend_.get(); }
    cudaStream_t stream() const { return stream_; }

    // What is launched here from now on waits for all that was launched on the other by now.
    cudaError_t wait_for(const Lane& other) {
        const cudaError_t error = cudaEventRecord(other.reached_, other.stream_);
        return error == cudaSuccess ? cudaStreamWaitEvent(stream_, other.reached_, 0) : error;
    }

private:
    ggml_backend_ptr backend_;
    cudaStream_t stream_ = nullptr;
    cudaEvent_t reached_ = nullptr;
};

}  // namespace lkv::cuda
