// What the executor asks ggml-cuda for, of ggml's CPU: a session on the emulated GPU runs our kernels there and all other nodes here, on
// memory of one device.
#include "ggml-cuda.h"

#include <cuda_runtime_api.h>

#include <array>
#include <memory>
#include <string>

#include "ggml-backend-impl.h"
#include "ggml-cpu.h"
#include "runtime/cuda/ggml/stream.h"

namespace {

struct Backend {
    ggml_backend_t cpu;
    EmulatedStream stream;
};
Backend& of(ggml_backend_t backend) { return *static_cast<Backend*>(backend->context); }

constexpr size_t alignment = 128;

struct Memory {
    int device;
    std::string name;
};

ggml_backend_buffer_i buffer_interface() {
    ggml_backend_buffer_i i{};
    i.free_buffer = [](ggml_backend_buffer_t buffer) { emulated::free(buffer->context); };
    i.get_base = [](ggml_backend_buffer_t buffer) { return buffer->context; };
    i.memset_tensor = [](ggml_backend_buffer_t, ggml_tensor* tensor, uint8_t value, size_t offset, size_t size) {
        cudaMemset(static_cast<char*>(tensor->data) + offset, value, size);
    };
    i.set_tensor = [](ggml_backend_buffer_t, ggml_tensor* tensor, const void* data, size_t offset, size_t size) {
        cudaMemcpy(static_cast<char*>(tensor->data) + offset, data, size, cudaMemcpyHostToDevice);
    };
    i.get_tensor = [](ggml_backend_buffer_t, const ggml_tensor* tensor, void* data, size_t offset, size_t size) {
        cudaMemcpy(data, static_cast<const char*>(tensor->data) + offset, size, cudaMemcpyDeviceToHost);
    };
    i.clear = [](ggml_backend_buffer_t buffer, uint8_t value) { cudaMemset(buffer->context, value, buffer->size); };
    return i;
}

ggml_backend_buffer_type memory_of(int device) {
    ggml_backend_buffer_type type{};
    type.context = new Memory{device, "emulated GPU " + std::to_string(device)};
    type.iface.get_name = [](ggml_backend_buffer_type_t t) { return static_cast<Memory*>(t->context)->name.c_str(); };
    type.iface.alloc_buffer = [](ggml_backend_buffer_type_t t, size_t size) {
        void* const at = emulated::allocate((size + alignment - 1) / alignment * alignment,
                                            static_cast<Memory*>(t->context)->device);
        if (at == nullptr) return ggml_backend_buffer_t{};
        return ggml_backend_buffer_init(t, buffer_interface(), at, size);
    };
    type.iface.get_alignment = [](ggml_backend_buffer_type_t) { return alignment; };
    return type;
}

}  // namespace

ggml_backend_t ggml_backend_cuda_init(int device) {
    ggml_backend_t const cpu = ggml_backend_cpu_init();
    auto* const backend = new ggml_backend{};
    backend->device = cpu->device;
    backend->context = new Backend{cpu, {device}};
    backend->iface.get_name = [](ggml_backend_t) { return "emulated GPU"; };
    backend->iface.free = [](ggml_backend_t b) {
        ggml_backend_free(of(b).cpu);
        delete &of(b);
        delete b;
    };
    backend->iface.graph_compute = [](ggml_backend_t b, ggml_cgraph* graph) {
        emulated::close_others(of(b).stream.device);
        emulated::continue_chain(of(b).stream.device);  // as ggml-cuda's kernels do
        return ggml_backend_graph_compute(of(b).cpu, graph);
    };
    return backend;
}

ggml_backend_buffer_type_t ggml_backend_cuda_buffer_type(int device) {
    static std::array<ggml_backend_buffer_type, emulated::n_devices> types{memory_of(0), memory_of(1)};
    return &types[static_cast<size_t>(device)];
}

void ggml_backend_cuda_get_device_memory(int, size_t* free, size_t* total) { *free = *total = size_t{1} << 30; }

namespace lkv::cuda {

cudaStream_t stream_of(ggml_backend_t backend) { return &of(backend).stream; }
cudaError_t give_priority(ggml_backend_t) { return cudaSuccess; }
void multiply_in_f32(ggml_backend_t) {}
bool waits(const ggml_tensor*) { return false; }

}  // namespace lkv::cuda
