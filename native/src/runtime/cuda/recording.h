// A graph's step as one launch: recorded when it runs for the second time, with kernels that start early (ops/cuda/early_start.h).
#pragma once

#include <cuda_runtime_api.h>

#include "base/log.h"
#include "ggml-backend.h"
#include "ops/cuda/step/early_start.h"

namespace lkv::cuda {

// What a recorded step's launches are for, see Attention.
struct RecordedFor {
    int slots;
    int ring_slots;
    int variant;

    bool operator==(const RecordedFor&) const = default;
};

class Recording {
public:
    Recording() = default;
    Recording(const Recording&) = delete;
    Recording& operator=(const Recording&) = delete;
    ~Recording() { drop(); }

    // Forgets the recorded graph.
    void drop() {
        destroy();
        recorded_ = nullptr;
        seen_ = nullptr;
    }

    bool has(const ggml_cgraph* graph, const RecordedFor& of) const {
        return step_ != nullptr && recorded_ == graph && of_ == of;
    }
    // Whether the graph runs for the first time, which warms ggml-cuda's pools up: nothing may be allocated while recording.
    bool is_first(const ggml_cgraph* graph) {
        if (seen_ == graph) return false;
        seen_ = graph;
        return true;
    }

    ggml_status launch(cudaStream_t stream) const {
        return cudaGraphLaunch(step_, stream) == cudaSuccess ? GGML_STATUS_SUCCESS : GGML_STATUS_FAILED;
    }

    // enqueue(): launches the whole step on the stream, or on others that join it. False: nothing is recorded, with a warning.
    template <class Enqueue>
    bool record(const ggml_cgraph* graph, const RecordedFor& of, cudaStream_t stream, Enqueue&& enqueue) {
        destroy();
        of_ = of;
        cudaError_t error = record(graph, stream, enqueue, true);
        if (error != cudaSuccess) {
            log(LogLevel::warning, "[cuda] expected to let a recorded step's kernels start early; got ",
                cudaGetErrorString(error), "; they start when those before them end");
            error = record(graph, stream, enqueue, false);
        }
        if (error != cudaSuccess) {
            log(LogLevel::warning, "[cuda] expected to record the step; got ", cudaGetErrorString(error),
                "; every step is launched node by node");
        }
        return error == cudaSuccess;
    }

private:
    void destroy() {
        if (step_ != nullptr) cudaGraphExecDestroy(step_);
        step_ = nullptr;
    }

    template <class Enqueue>
    cudaError_t record(const ggml_cgraph* graph, cudaStream_t stream, Enqueue&& enqueue, bool early) {
        cudaError_t error = cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed);
        if (error != cudaSuccess) return error;
        const ggml_status status = enqueue();
        cudaGraph_t recorded = nullptr;
        error = cudaStreamEndCapture(stream, &recorded);
        if (error == cudaSuccess && status != GGML_STATUS_SUCCESS) error = cudaErrorUnknown;
        if (error == cudaSuccess && early) error = start_early(recorded);
        cudaGraphExec_t exec = nullptr;
        if (error == cudaSuccess) {
            error = cudaGraphInstantiate(&exec, recorded, cudaGraphInstantiateFlagUseNodePriority);
        }
        if (recorded != nullptr) cudaGraphDestroy(recorded);
        if (error != cudaSuccess) {
            cudaGetLastError();  // not the next caller's
            return error;
        }
        step_ = exec;
        recorded_ = graph;
        return cudaSuccess;
    }

    const ggml_cgraph* seen_ = nullptr;
    const ggml_cgraph* recorded_ = nullptr;
    cudaGraphExec_t step_ = nullptr;
    RecordedFor of_{};
};

}  // namespace lkv::cuda
