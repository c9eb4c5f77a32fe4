#include "runtime/pipeline_stage.h"

#include "base/error.h"
#include "ggml-cpu.h"

namespace lkv {

PipelineStage::PipelineStage(const LayerRun& layers)
    : run(layers), gpu(layers.on_gpu() ? open_gpu(layers.gpu) : nullptr) {}

void PipelineStage::set_input(ggml_tensor* tensor, const void* data, size_t bytes) const {
    if (tensor == nullptr || tensor->data == nullptr)
        return;  // no node reads positions in a last layer that only stores latents
    if (on_gpu()) {
        gpu->set(tensor, data, bytes);
    } else {
        ggml_backend_tensor_set(tensor, data, 0, bytes);
    }
}

void PipelineStage::get_result(const ggml_tensor* tensor, float* data) const {
    if (on_gpu()) {
        gpu->finish(tensor, data, tensor == nullptr ? 0 : ggml_nbytes(tensor));
    } else if (tensor != nullptr) {
        ggml_backend_tensor_get(tensor, data, 0, ggml_nbytes(tensor));
    }
}

void PipelineStage::hand_to(const PipelineStage& next) const {
    const ggml_tensor* const hidden = graph->hidden_out;
    if (on_gpu()) {
        gpu->send(hidden, *next.gpu, next.graph->hidden_in);
    } else {
        next.set_input(next.graph->hidden_in, hidden->data, ggml_nbytes(hidden));
    }
}

void PipelineStage::compute(ggml_backend_t cpu) const {
    if (!on_gpu()) ggml_backend_cpu_set_n_threads(cpu, shape.n_threads);
    const ggml_status status = on_gpu() ? gpu->compute(graph->nodes) : ggml_backend_graph_compute(cpu, graph->nodes);
    if (status != GGML_STATUS_SUCCESS) {
        fail("compute", "expected the graph to run; got ", ggml_status_to_string(status));
    }
}

void PipelineStage::abandon() const noexcept {
    try {
        get_result(nullptr, nullptr);
    } catch (const Error&) {
    }
}

std::vector<PipelineStage> open_stages(const std::vector<LayerRun>& runs) {
    std::vector<PipelineStage> stages;
    for (const LayerRun& run : runs) stages.emplace_back(run);
    return stages;
}

std::vector<CacheDevice*> devices_of(const std::vector<PipelineStage>& stages) {
    std::vector<CacheDevice*> devices;
    for (const PipelineStage& stage : stages) devices.push_back(stage.gpu.get());
    return devices;
}

}  // namespace lkv
