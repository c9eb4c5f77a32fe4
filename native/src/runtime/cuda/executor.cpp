// How our ops run beside ggml's on one GPU. Ordinary nodes go to ggml-cuda as views of the graph, our nodes launch on ggml-cuda's
// own stream in between; nothing is copied between backends and nothing waits. What is called from outside enters the device first.
// In small graphs what leads to K, to V and to the queries runs at the same time, on three streams (branches.h).
// The second run of such a graph is recorded, and every later one is a single launch of the recording.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/log.h"
#include "ggml-impl.h"
#include "ops/cuda/attend.h"
#include "runtime/branches.h"
#include "runtime/cuda/attention.h"
#include "runtime/cuda/delta_nets.h"
#include "runtime/cuda/device_storage.h"
#include "runtime/cuda/ggml/stream.h"
#include "runtime/cuda/host_copies.h"
#include "runtime/cuda/lane.h"
#include "runtime/cuda/own_products.h"
#include "runtime/cuda/recording.h"
#include "runtime/cuda/slots/chooser.h"
#include "runtime/cuda/slots/masses.h"
#include "runtime/cuda/warm_up.h"
#include "runtime/gpu.h"

namespace lkv {
namespace {

using cuda::attention_of;
using cuda::check;
using cuda::DeviceMemory;
using cuda::Lane;

constexpr size_t largest_pinned = size_t{8} << 20;

// C calls what returns these: errors are logged and returned, never thrown.
ggml_status started(cudaError_t error, const ggml_tensor* node) {
    if (error == cudaSuccess) return GGML_STATUS_SUCCESS;
    log(LogLevel::error, "[cuda] expected ", node->name, " to start; got ", cudaGetErrorString(error));
    return GGML_STATUS_FAILED;
}

// K in f32, `width` channels a row, into blocks.
cuda::BlockArgs of_latents(const float* rows, int width, const int32_t* from, const cuda::RowTarget& to,
                           const int32_t* to_slot) {
    const auto row_bytes = int64_t{width} * static_cast<int64_t>(sizeof(float));
    return {reinterpret_cast<const uint8_t*>(rows), bytes_of_page(row_bytes), row_bytes, nullptr, 0, from, to, to_slot};
}

// A recording of the whole step cannot contain ggml-cuda's recordings of its parts.
struct NoGraphsOfGgml {
    NoGraphsOfGgml() { setenv("GGML_CUDA_DISABLE_GRAPHS", "1", 0); }
};

int64_t n_tokens_of(const Graph& graph) {
    return (graph.hidden_in != nullptr ? graph.hidden_in : graph.embeddings)->ne[1];
}

// What attention to one layer's rows before compression reads.
struct ExactLayer {
    const KvCache* cache;
    cuda::StepInputs inputs;
    cuda::LayerTables layers;
    cuda::Chooser chooser;  // of nothing
    cuda::Attention attention;

    ExactLayer(const KvCache& rows, const cuda::Device& device)
        : cache(&rows), chooser(layers, inputs, device), attention(layers, inputs, chooser, device) {}
};

class CudaGpu final : public Gpu {
public:
    explicit CudaGpu(int device);
    ~CudaGpu() override {
        cudaSetDevice(id_);  // whose memory is freed
        cudaStreamSynchronize(main_.stream());
    }

    std::string name() const override { return ggml_backend_dev_description(ggml_backend_get_device(main_.backend())); }
    std::unique_ptr<CacheStorage> allocate(size_t bytes) override {
        enter();
        return std::make_unique<cuda::DeviceStorage>(bytes, id_, main_.stream());
    }
    void attach(const Model& model, const KvCache& cache, const Ropes& ropes, const GraphConstants& constants,
                const LayerRun& run) override {
        enter();
        if (model.weights() == GGML_TYPE_F32) {
            for (const Lane* lane : {&main_, &v_lane_, &q_lane_}) cuda::multiply_in_f32(lane->backend());
        }
        inputs_.attach(cache);
        warm_up_.attach(cache, model.hparams());
        layers_.attach(model, cache, ropes, constants, run, inputs_);
        chooser_.attach(model, cache, constants);
        masses_.attach(cache);
    }
    void attach_exact(const Model& model, const KvCache& rows, const LayerCacheSpec& spec, int layer,
                      const Ropes& ropes, const GraphConstants& constants) override {
        enter();
        exact_ = std::make_unique<ExactLayer>(rows, device_);
        exact_->inputs.attach(rows);
        exact_->layers.attach_alone(model, rows, spec, layer, ropes, constants, exact_->inputs);
    }
    void detach_exact() override {
        enter();
        cudaStreamSynchronize(main_.stream());
        exact_.reset();
    }
    void set(ggml_tensor* tensor, const void* data, size_t bytes) override {
        enter();
        check(cudaMemcpyAsync(tensor->data, data, bytes, cudaMemcpyHostToDevice, main_.stream()), "a copy of an input");
    }
    void send(const ggml_tensor* tensor, Gpu& other, ggml_tensor* to) override;
    void finish(const ggml_tensor* tensor, void* data, size_t bytes) override;
    std::shared_ptr<const StateCopy> copy(std::span<const StateTensors::Piece> pieces) override {
        enter();
        return copies_.copy(pieces, id_, main_.stream());
    }
    void reserve_copies(size_t n, size_t bytes) override {
        enter();
        copies_.reserve(n, bytes);
    }
    void take_masses(KvCache& cache) override {
        enter();
        masses_.take(cache, main_.stream());
    }
    uint64_t rows_read() override {
        enter();
        return chooser_.rows_read();
    }
    void begin(const KvCache& cache, const BatchSlots& batch) override {
        enter();
        (is_exact(&cache) ? exact_->inputs : inputs_).begin(cache, batch, main_.stream());
        if (!is_exact(&cache)) chooser_.begin(cache, batch, main_.stream());
    }
    void prepare(const Graph& graph) override;
    ggml_status compute(ggml_cgraph* graph) override;
    void move_rows(const KvCache& cache, int from, int to, std::span<const RowMove> slots) override;
    void write_token_blocks(const KvCache& cache, int layer, const float* rows,
                            std::span<const RowMove> moves) override;

private:
    void enter() const { cuda::enter(id_); }
    bool is_exact(const KvCache* cache) const { return exact_ != nullptr && exact_->cache == cache; }
    cuda::Attention& attention_to(const KvCache* cache) { return is_exact(cache) ? exact_->attention : attention_; }
    // Nodes first … end - 1, each by who takes it.
    ggml_status run(ggml_cgraph* graph, int first, int end, const Lane& lane);
    ggml_status run_ours(const ggml_tensor* node);  // on the main stream, rows beside it
    cudaError_t run_store(const ggml_tensor* dst, const AttentionNode& node);
    cudaError_t stage_keys(const ggml_tensor* dst, const AttentionNode& node);
    cudaError_t encode(const cuda::Layer& layer, const cuda::RowTarget& to, const int32_t* list, int n);
    cudaError_t join();
    ggml_status warm_up(const ggml_tensor* node);
    ggml_status run_branches(ggml_cgraph* graph, const LayerRoles& layer);
    ggml_status begin(ggml_cgraph* graph, const LayerRoles& layer, int queries);
    ggml_status enqueue(ggml_cgraph* graph);
    ggml_status enqueue_nodes(ggml_cgraph* graph);

    int id_;                  // entered before the lanes begin
    NoGraphsOfGgml setting_;  // before the lanes, which read it
    Lane main_{id_, true};
    Lane v_lane_{id_, true};
    Lane q_lane_{id_};
    Lane warm_up_lane_{id_, true};
    bool unjoined_ = false;  // a store that the main stream has not waited for
    cuda::Device device_{};

    cuda::StepInputs inputs_;
    cuda::LayerTables layers_;
    cuda::OwnProducts products_{layers_, inputs_, device_};
    cuda::Chooser chooser_{layers_, inputs_, device_};
    cuda::Attention attention_{layers_, inputs_, chooser_, device_};
    cuda::Masses masses_{layers_, inputs_, attention_, device_};
    cuda::WarmUp warm_up_;
    std::unique_ptr<ExactLayer> exact_;  // while a prompt is prefilled lazily
    std::set<int> peers_;                // devices that something was sent to
    std::unique_ptr<cuda::PinnedMemory> result_;
    size_t result_bytes_ = 0;
    cuda::HostCopies copies_;

    std::map<int, DeviceMemory> moving_;  // the last lists of rows that move, by cells of their layers
    DeviceMemory encoding_;               // of one layer's rows that leave the recent window
    const ggml_tensor* begun_ = nullptr;  // the attention whose full rows and latents run already

    bool recordable_ = false;
    std::vector<LayerRoles> branches_;  // of the prepared graph
    cuda::Recording recording_;
};

CudaGpu::CudaGpu(int device) : id_(cuda::enter(device)) { check(cuda::describe_device(device_), "a device query"); }

// What is sent waits for the run, and the other's stream for what is sent. Where devices see each other's memory it crosses at once,
// else CUDA takes it through the host.
void CudaGpu::send(const ggml_tensor* tensor, Gpu& other, ggml_tensor* to) {
    enter();
    auto& receiver = static_cast<CudaGpu&>(other);
    if (peers_.insert(receiver.id_).second) {
        int sees = 0;
        check(cudaDeviceCanAccessPeer(&sees, id_, receiver.id_), "a device query");
        const cudaError_t error = sees == 0 ? cudaSuccess : cudaDeviceEnablePeerAccess(receiver.id_, 0);
        if (error == cudaErrorPeerAccessAlreadyEnabled) {
            cudaGetLastError();  // not the next caller's
        } else {
            check(error, "access to another GPU's memory");
        }
    }
    check(cudaMemcpyPeerAsync(to->data, receiver.id_, tensor->data, id_, ggml_nbytes(tensor), main_.stream()),
          "a copy to another GPU");
    check(receiver.main_.wait_for(main_), "an event");
}

void CudaGpu::finish(const ggml_tensor* tensor, void* data, size_t bytes) {
    enter();
    inputs_.end(main_.stream());
    if (tensor == nullptr) {
        check(cudaStreamSynchronize(main_.stream()), "the stream");
        return;
    }
    // through pinned memory: 10 against 100 us for the logits of 128256 tokens; longer ones hide behind a prefill
    if (bytes > largest_pinned) {
        check(cudaStreamSynchronize(main_.stream()), "the stream");
        check(cudaMemcpy(data, tensor->data, bytes, cudaMemcpyDeviceToHost), "a copy of a result");
        return;
    }
    if (result_ == nullptr || bytes > result_bytes_) {
        result_ = std::make_unique<cuda::PinnedMemory>(bytes);
        result_bytes_ = bytes;
    }
    check(cudaMemcpyAsync(result_->as<void>(), tensor->data, bytes, cudaMemcpyDeviceToHost, main_.stream()),
          "a copy of a result");
    check(cudaStreamSynchronize(main_.stream()), "the stream");
    std::memcpy(data, result_->as<void>(), bytes);
}

void CudaGpu::prepare(const Graph& graph) {
    enter();
    recording_.drop();
    bool one_waits = false;
    const ggml_backend_dev_t device = ggml_backend_get_device(main_.backend());
    for (int i = 0; i < ggml_graph_n_nodes(graph.nodes); i++) {
        const ggml_tensor* const node = ggml_graph_node(graph.nodes, i);
        if (node->op != GGML_OP_CUSTOM && !ggml_backend_dev_supports_op(device, node)) {
            fail("gpu", "expected ", ggml_op_name(node->op), " of ", node->name,
                 " on the GPU; got ggml-cuda without it", "; use -ngl 0");
        }
        one_waits = one_waits || cuda::waits(node);
    }
    const bool lazy = !graph.writers.empty();
    if (lazy) attention_.find_rotations(graph);
    const cuda::PartBytes parts = (lazy ? exact_->attention : attention_).prepare(graph, main_.stream());
    masses_.prepare(graph, main_.stream());
    // a prefill graph runs once or twice, and its launches hide behind its work
    recordable_ = !lazy && !graph.attention.empty() && n_tokens_of(graph) <= recorded_batch && !one_waits;
    const bool small = recordable_ && n_tokens_of(graph) <= small_batch;
    branches_ = small ? concurrent_layers(graph.nodes, graph.roles.layers) : std::vector<LayerRoles>{};
    products_.prepare(graph, small);
    if (!branches_.empty()) warm_up_.prepare(graph, parts);
}

// [n] slots that rows leave, [n] that they go to, [n] their region
DeviceMemory list_of(std::span<const RowMove> moves, int to) {
    if (moves.empty()) return {};
    std::vector<int32_t> list;
    for (const RowMove& move : moves) list.push_back(move.from);
    for (const RowMove& move : moves) list.push_back(move.to);
    list.insert(list.end(), moves.size(), to);
    return DeviceMemory::of(list);
}

void CudaGpu::move_rows(const KvCache& cache, int from, int to, std::span<const RowMove> slots) {
    enter();
    check(cudaStreamSynchronize(main_.stream()), "the stream");  // nobody reads the last lists
    moving_.clear();
    for (int il = layers_.run().first_layer; il < layers_.run().end_layer; il++) {
        if (!cache.rows().has_rows(il)) continue;
        const cuda::Layer& layer = layers_[il];
        const auto [found, is_new] = moving_.try_emplace(layer.cells);
        if (is_new) {
            found->second = from == to ? list_of(slots, to) : list_of(cache.placement().moves_of(il, slots), to);
        }
        const auto* const list = found->second.as<int32_t>();
        const auto n = static_cast<int>(found->second.bytes() / (3 * sizeof(int32_t)));
        if (n == 0) continue;
        if (layer.splits && from != to) {
            check(encode(layer, layer.targets[to], list, n), "encoding rows");
            continue;
        }
        cuda::MoveArgs args{};
        args.from = layer.targets[from];
        args.to = layer.targets[to];
        args.from_slot = list;
        args.to_slot = list + n;
        args.k_width = cache.rows().k_layout(from, il).width;
        args.v_width = cache.rows().v_layout(from, il).width;
        check(cuda::move_rows(args, n, main_.stream()), "moving rows");
        if (!layer.in_token_blocks || from == to) continue;
        const cuda::BlockArgs blocks{
            args.from.k_rows, args.from.k_page, args.from.k_row_bytes, args.from.k_segments, args.from.n_k_segments,
            args.from_slot,   args.to,          args.to_slot};
        check(cuda::store_blocks(blocks, n, main_.stream()), "storing blocks");
    }
}

void CudaGpu::write_token_blocks(const KvCache& cache, int layer, const float* rows, std::span<const RowMove> moves) {
    if (moves.empty()) return;
    enter();
    const int middle = cache.placement().middle();
    const DeviceMemory slots = list_of(moves, middle);
    const auto n = static_cast<int>(moves.size());
    const cuda::BlockArgs args = of_latents(rows, cache.rows().k_layout(middle, layer).width, slots.as<int32_t>(),
                                            layers_[layer].targets[middle], slots.as<int32_t>() + n);
    check(cuda::store_blocks(args, n, main_.stream()), "storing blocks");
    check(cudaStreamSynchronize(main_.stream()), "storing blocks");
}

// list: list_of()
cudaError_t CudaGpu::encode(const cuda::Layer& layer, const cuda::RowTarget& to, const int32_t* list, int n) {
    cuda::EncodeArgs args{layer.encoders[0], layer.encoders[1], list, n};
    size_t bytes = 0;
    const auto place = [&](size_t size) {
        const size_t at = bytes;
        bytes += (size + 255) / 256 * 256;
        return at;
    };
    const auto rows = static_cast<size_t>(n);
    size_t x[2];
    size_t z[2];
    for (const int side : {0, 1}) {
        x[side] = place(rows * static_cast<size_t>(layer.encoders[side].width) * sizeof(uint16_t));
        z[side] = place(rows * static_cast<size_t>(layer.encoders[side].n_out) * sizeof(float));
    }
    if (bytes > encoding_.bytes()) {
        const cudaError_t error = cudaStreamSynchronize(main_.stream());
        if (error != cudaSuccess) return error;
        encoding_ = DeviceMemory(bytes);
    }
    auto* const memory = encoding_.as<uint8_t>();
    for (const int side : {0, 1}) {
        cuda::EncodeSide& of = side == 0 ? args.k : args.v;
        of.x = reinterpret_cast<uint16_t*>(memory + x[side]);
        of.z = reinterpret_cast<float*>(memory + z[side]);
    }
    const cudaError_t error = cuda::encode_rows(args, main_.stream());
    if (error != cudaSuccess) return error;
    cuda::StoreArgs store{};
    store.with_k = store.with_v = 1;
    store.latents = {args.k.z, args.v.z, args.k.n_out, args.v.n_out};
    store.slot = list + n;
    store.region = list + 2 * n;
    std::copy_n(layer.targets, max_regions, store.targets);
    const cudaError_t stored = cuda::store_rows(store, n, main_.stream());
    if (stored != cudaSuccess || !layer.in_token_blocks) return stored;
    const cuda::BlockArgs blocks = of_latents(args.k.z, args.k.n_out, nullptr, to, store.slot);
    return cuda::store_blocks(blocks, n, main_.stream());
}

ggml_status CudaGpu::run(ggml_cgraph* graph, int first, int end, const Lane& lane) {
    const auto ordinary = [&](int from, int to) {
        if (from == to) return GGML_STATUS_SUCCESS;
        ggml_cgraph view = ggml_graph_view(graph, from, to);
        return ggml_backend_graph_compute_async(lane.backend(), &view);
    };
    for (int i = first; i < end; i++) {
        const ggml_tensor* const node = ggml_graph_node(graph, i);
        const std::optional<cuda::HeadsProductArgs> heads = products_.heads_product_of(node);
        const std::optional<cuda::ProductArgs> product = products_.product_of(node);
        const bool left_out = products_.turned(node) || products_.swaps(node) || attention_.stores_rotated(node);
        const std::optional<cuda::TurnArgs> turn = products_.turning(node);
        if (node->op != GGML_OP_CUSTOM && !heads && !product && !left_out && !turn) continue;
        ggml_status status = ordinary(first, i);
        if (status != GGML_STATUS_SUCCESS) return status;
        first = i + 1;
        if (left_out) continue;
        if (heads) {
            status = started(cuda::multiply_heads(*heads, lane.stream()), node);
        } else if (turn) {
            status = started(cuda::turn_heads(*turn, lane.stream()), node);
        } else if (product) {
            status = started(cuda::multiply(*product, lane.stream()), node);
        } else {
            status = run_ours(node);
        }
        if (status != GGML_STATUS_SUCCESS) return status;
    }
    return ordinary(first, end);
}

ggml_status CudaGpu::run_ours(const ggml_tensor* node) {
    ggml_custom_op_t function = nullptr;
    const AttentionNode& attention = attention_of(node, &function);
    if (function == gpu_delta_net_node) {
        return started(cuda::delta_net(cuda::delta_net_args(node), main_.stream()), node);
    }
    if (function == gpu_store_node) return started(run_store(node, attention), node);
    cuda::Attention& kernels = attention_to(attention.cache);
    cudaError_t error = join();
    if (function == gpu_mass_node) {
        if (error == cudaSuccess) error = masses_.add_up(node, attention, main_.stream());
        return started(error, node);
    }
    if (error == cudaSuccess && begun_ != node) {
        const bool beside = attention.full && attention.latents && node->ne[2] <= recorded_batch;
        if (beside) error = v_lane_.wait_for(main_);
        // of many tokens the latents' kernel, which takes longer, leaves multiprocessors idle
        if (error == cudaSuccess && beside) error = kernels.begin_latents(node, attention, main_.stream());
        if (error == cudaSuccess) {
            error = kernels.attend_full(node, attention, (beside ? v_lane_ : main_).stream());
        }
        if (error == cudaSuccess && !beside) error = kernels.begin_latents(node, attention, main_.stream());
        if (error == cudaSuccess && beside) error = main_.wait_for(v_lane_);
    }
    begun_ = nullptr;
    if (error == cudaSuccess) error = kernels.end_latents(node, attention, main_.stream());
    return started(error, node);
}

// Rows are stored beside the products that make the queries. Those of a lazy prefill go to two caches, and only the second store's sources
// live until they are attended to.
cudaError_t CudaGpu::run_store(const ggml_tensor* dst, const AttentionNode& node) {
    if (exact_ != nullptr) {
        const cudaError_t error = attention_to(node.cache).store(dst, node, true, true, main_.stream());
        return error == cudaSuccess && !is_exact(node.cache) ? stage_keys(dst, node) : error;
    }
    cudaError_t error = v_lane_.wait_for(main_);
    if (error == cudaSuccess) error = attention_.store(dst, node, true, true, v_lane_.stream());
    unjoined_ = true;
    return error;
}

// Keys that go to a block wait until it is complete.
cudaError_t CudaGpu::stage_keys(const ggml_tensor* dst, const AttentionNode& node) {
    if (node.batch->k_staged == nullptr) return cudaSuccess;
    const ggml_tensor* const k = dst->src[node.latent_source];
    return cudaMemcpyAsync(node.batch->k_staged, k->data, ggml_nbytes(k), cudaMemcpyDeviceToDevice, main_.stream());
}

cudaError_t CudaGpu::join() {
    if (!unjoined_) return cudaSuccess;
    unjoined_ = false;
    return main_.wait_for(v_lane_);
}

// The layer's attention on one slot a region, whose result nobody reads, beside the last product of the layer before: the real one
// would wait for its kernels' instructions (8B, joint of 512: 307 tokens/s without, 331 with it; rebuild of 256 for four heads: 329
// and 343; full f16: 361 and 369; with all thread blocks, later: 312, 328 and 370).
ggml_status CudaGpu::warm_up(const ggml_tensor* node) {
    cudaError_t error = warm_up_lane_.wait_for(main_);
    for (const bool full : {true, false}) {
        const cuda::Plan* const plan = attention_.plan(attention_of(node), full);
        if (error == cudaSuccess && plan != nullptr) error = warm_up_.run(*plan, warm_up_lane_.stream());
        if (error == cudaSuccess && plan != nullptr && attention_.chooses(*plan)) {
            const int layer = attention_of(node).row_layer;
            error = warm_up_.choose(*plan, chooser_, layer, warm_up_lane_.stream());
        }
    }
    return started(error, node);
}

// V's rows and the queries on streams of their own, beside K's rows; all have joined after it. Where storing takes long K and V go
// first: their few thread blocks would wait for the queries', which fill the GPU (q4 rows of joint latents at depth 0: 328 tokens/s
// so, 322 with the queries first; q8 ones 333 and 336, full f16 rows 368 and 375). In files with exact windows tokens enter in f16: a default
// file at 14 % has 289, 263 and 237 tokens/s at depth 0, 4096 and 16384 with K and V first, 296, 271 and 240 with the queries.
ggml_status CudaGpu::run_branches(ggml_cgraph* graph, const LayerRoles& layer) {
    const ggml_tensor* const rows = ggml_graph_node(graph, layer.store);
    const AttentionNode& node = attention_of(rows);
    const auto store_side = [&](ggml_status status, bool is_k, const Lane& lane) {
        if (status != GGML_STATUS_SUCCESS) return status;
        return started(attention_.store(rows, node, is_k, !is_k, lane.stream()), rows);
    };
    ggml_status status = started(v_lane_.wait_for(main_), rows);
    if (status == GGML_STATUS_SUCCESS) status = started(q_lane_.wait_for(main_), rows);
    const bool queries_first = !layers_[node.layer].fitted;
    // the products that make the latents' queries turn them themselves: the queries of full rows are turned beside those
    const bool apart = layer.rope < layer.latent_q && products_.turned_by_products(ggml_graph_node(graph, layer.rope));
    const int own_end = apart ? layer.rope : layer.latent_q;
    const auto queries = [&] { return run(graph, layer.store + 1, own_end, q_lane_); };
    if (status == GGML_STATUS_SUCCESS && queries_first) status = queries();
    if (status == GGML_STATUS_SUCCESS) {
        status = store_side(run(graph, layer.v, layer.store, v_lane_), false, v_lane_);
    }
    if (status == GGML_STATUS_SUCCESS && !queries_first) status = queries();
    if (status == GGML_STATUS_SUCCESS) status = store_side(run(graph, layer.k, layer.v, main_), true, main_);
    if (status == GGML_STATUS_SUCCESS) status = started(main_.wait_for(v_lane_), rows);
    if (status == GGML_STATUS_SUCCESS) status = started(main_.wait_for(q_lane_), rows);
    if (status == GGML_STATUS_SUCCESS && attention_of(ggml_graph_node(graph, layer.attention)).full)
        status = begin(graph, layer, own_end);
    return status;
}

// Full rows are attended to on the main stream, latents after their queries beside that. Not before K and V are stored: the MLA kernel
// takes whole multiprocessors, and set up early it would keep the products that make K and V from them.
ggml_status CudaGpu::begin(ggml_cgraph* graph, const LayerRoles& layer, int queries) {
    const ggml_tensor* const dst = ggml_graph_node(graph, layer.attention);
    const AttentionNode& node = attention_of(dst);
    begun_ = dst;
    ggml_status status = run(graph, layer.latent_q, layer.attention, q_lane_);
    if (status == GGML_STATUS_SUCCESS) status = started(q_lane_.wait_for(main_), dst);
    if (status == GGML_STATUS_SUCCESS) status = run(graph, queries, layer.latent_q, main_);
    if (status == GGML_STATUS_SUCCESS) status = started(attention_.attend_full(dst, node, main_.stream()), dst);
    if (status == GGML_STATUS_SUCCESS) status = started(attention_.begin_latents(dst, node, q_lane_.stream()), dst);
    return status == GGML_STATUS_SUCCESS ? started(main_.wait_for(q_lane_), dst) : status;
}

// A failure leaves nothing under way: what comes next, reused memory too, waits for the main stream only.
ggml_status CudaGpu::enqueue(ggml_cgraph* graph) {
    const ggml_status status = enqueue_nodes(graph);
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    if (status != GGML_STATUS_SUCCESS && cudaStreamIsCapturing(main_.stream(), &capture) == cudaSuccess &&
        capture == cudaStreamCaptureStatusNone) {
        cudaStreamSynchronize(v_lane_.stream());
        cudaStreamSynchronize(q_lane_.stream());
        cudaStreamSynchronize(warm_up_lane_.stream());
        unjoined_ = false;
    }
    return status;
}

ggml_status CudaGpu::enqueue_nodes(ggml_cgraph* graph) {
    int first = 0;
    for (const LayerRoles& layer : branches_) {
        ggml_status status = run(graph, first, layer.ahead, main_);
        if (status == GGML_STATUS_SUCCESS) status = warm_up(ggml_graph_node(graph, layer.attention));
        if (status == GGML_STATUS_SUCCESS) status = run(graph, layer.ahead, layer.k, main_);
        if (status == GGML_STATUS_SUCCESS) status = run_branches(graph, layer);
        if (status != GGML_STATUS_SUCCESS) return status;
        first = layer.attention;
    }
    const ggml_status status = run(graph, first, ggml_graph_n_nodes(graph), main_);
    if (!branches_.empty() && status == GGML_STATUS_SUCCESS && main_.wait_for(warm_up_lane_) != cudaSuccess) {
        return GGML_STATUS_FAILED;
    }
    return status == GGML_STATUS_SUCCESS && join() != cudaSuccess ? GGML_STATUS_FAILED : status;
}

ggml_status CudaGpu::compute(ggml_cgraph* graph) {
    enter();
    const cuda::RecordedFor of{attention_.launched_slots(false), attention_.launched_slots(true), attention_.variant()};
    if (recording_.has(graph, of)) return recording_.launch(main_.stream());
    if (!recordable_ || recording_.is_first(graph)) return enqueue(graph);
    if (!recording_.record(graph, of, main_.stream(), [&] { return enqueue(graph); })) {
        recordable_ = false;
        return enqueue(graph);
    }
    return recording_.launch(main_.stream());
}

}  // namespace

std::unique_ptr<Gpu> open_gpu(int gpu) { return std::make_unique<CudaGpu>(gpu); }

}  // namespace lkv
