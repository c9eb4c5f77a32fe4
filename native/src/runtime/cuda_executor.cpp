// How our ops run inside ggml on the GPU: a backend that wraps ggml-cuda's. Ordinary nodes go to ggml-cuda as views of the
// graph, our nodes launch on ggml-cuda's own stream in between; nothing is copied between backends and nothing waits.
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
#include "ggml-backend-impl.h"
#include "ggml-cuda.h"
#include "ggml-impl.h"
#include "ops/cuda/device_memory.h"
#include "ops/cuda/early_start.h"
#include "ops/cuda/launch.h"
#include "ops/cuda/plan.h"
#include "ops/cuda/product.h"
#include "ops/cuda/shared_plan.h"
#include "ops/cuda/turn.h"
#include "runtime/branches.h"
#include "runtime/ggml_stream.h"
#include "runtime/gpu.h"

namespace lkv {
namespace {

using cuda::check;
using cuda::DeviceMemory;

constexpr size_t largest_pinned = size_t{8} << 20;

class DeviceStorage : public CacheStorage {
public:
    DeviceStorage(size_t bytes, cudaStream_t stream) : memory_(bytes), stream_(stream) {
        check(cudaMemset(memory_.as<void>(), 0, bytes), "clearing the cache");
    }
    uint8_t* data() const override { return memory_.as<uint8_t>(); }
    uint8_t* load(std::vector<uint8_t>& copy) const override {
        copy.resize(memory_.bytes());
        check(cudaStreamSynchronize(stream_), "the stream");
        check(cudaMemcpy(copy.data(), data(), copy.size(), cudaMemcpyDeviceToHost), "a copy of the cache");
        return copy.data();
    }
    void store(const std::vector<uint8_t>& copy) override {
        check(cudaStreamSynchronize(stream_), "the stream");
        check(cudaMemcpy(data(), copy.data(), copy.size(), cudaMemcpyHostToDevice), "a copy to the cache");
    }

private:
    DeviceMemory memory_;
    cudaStream_t stream_;
};

// Pinned host memory, so that copies do not stall the stream.
class PinnedMemory {
public:
    explicit PinnedMemory(size_t bytes) { check(cudaMallocHost(&data_, bytes), "pinned memory"); }
    PinnedMemory(const PinnedMemory&) = delete;
    PinnedMemory& operator=(const PinnedMemory&) = delete;
    ~PinnedMemory() { cudaFreeHost(data_); }
    template <class T>
    T* as() const {
        return static_cast<T*>(data_);
    }

private:
    void* data_ = nullptr;
};

// One of ggml-cuda's backends and the stream it works on.
class Lane {
public:
    // first: its thread blocks go before those of other lanes
    explicit Lane(bool first = false) : backend_(ggml_backend_cuda_init(0)) {
        if (backend_ == nullptr) fail("cuda", "expected device 0 to start; got an error of ggml-cuda");
        if (first) check(cuda::give_priority(backend_.get()), "a stream of high priority");
        stream_ = cuda::stream_of(backend_.get());
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

class CudaGpu final : public Gpu {
public:
    CudaGpu() {
        // a recording of the whole step cannot contain ggml-cuda's recordings of its parts
        setenv("GGML_CUDA_DISABLE_GRAPHS", "1", 0);
        main_.emplace(true);
        v_lane_.emplace(true);
        q_lane_.emplace();
        rehearsal_lane_.emplace(true);
        stream_ = main_->stream();
        check(cuda::describe_device(device_), "a device query");
        wrapper_ = *main_->backend();
        static uint8_t guid[16] = {'l', 'a', 't', 'e', 'n', 't', 'k', 'v', '-', 'c', 'u', 'd', 'a'};
        wrapper_.guid = &guid;
        wrapper_.context = this;
        wrapper_.iface = {};
        wrapper_.iface.get_name = [](ggml_backend_t) { return "latentkv-cuda"; };
        wrapper_.iface.free = [](ggml_backend_t) {};
        wrapper_.iface.synchronize = [](ggml_backend_t b) {
            ggml_backend_synchronize(static_cast<CudaGpu*>(b->context)->main_->backend());
        };
        wrapper_.iface.graph_compute = [](ggml_backend_t b, ggml_cgraph* graph) {
            return static_cast<CudaGpu*>(b->context)->compute(graph);
        };
    }

    ~CudaGpu() override {
        cudaStreamSynchronize(stream_);
        drop_recording();
    }

    std::string name() const override {
        return ggml_backend_dev_description(ggml_backend_get_device(main_->backend()));
    }
    ggml_backend_t backend() override { return &wrapper_; }

    std::unique_ptr<CacheStorage> allocate(size_t bytes) override {
        return std::make_unique<DeviceStorage>(bytes, stream_);
    }

    void attach(const Model& model, const KvCache& cache, const Rope& rope, const GraphConstants& constants) override {
        const HParams& h = model.hparams();
        std::vector<int32_t> one_slot(cuda::max_regions, 0);  // of every region that has any
        for (int r = 0; r < cache.n_regions(); r++) {
            const auto capacity = static_cast<size_t>(cache.cells(r).capacity());
            capacity_ += cache.cells(r).capacity();
            one_slot[static_cast<size_t>(r)] = std::min(1, static_cast<int>(cache.cells(r).capacity()));
            pos_.emplace_back(capacity * sizeof(int32_t));
            seq_.emplace_back(capacity * sizeof(uint64_t));
        }
        cells_version_ = ~uint64_t{0};
        const auto words = batch_words(std::max(cache.options().n_ubatch, 1));
        batch_ = DeviceMemory(words * sizeof(int32_t));
        for (auto& pinned : pinned_) pinned = std::make_unique<PinnedMemory>(words * sizeof(int32_t));
        n_ubatch_ = cache.options().n_ubatch;
        if (!constants.alibi_slopes.empty()) slopes_ = DeviceMemory::of(constants.alibi_slopes);
        std::vector<uint64_t> phases;
        if (!rope.freqs.empty()) {
            phases = cuda::pack_phases(rope.freqs.data(), static_cast<int>(rope.freqs.size()));
            phases_ = DeviceMemory::of(phases);
            rope_ = {h.n_rot, h.block.rope_pairing == RopePairing::neox, rope.mscale};
        }
        if (device_.specialized) {
            angles_ = DeviceMemory::of(
                cuda::pack_angles(phases, cuda::all_turned_tiles(h.head_dim, phases.empty() ? 0 : h.n_rot)));
            rebuilt_angles_ = DeviceMemory::of(cuda::pack_angles(phases, cuda::rebuilt_tiles));
        }
        const std::vector<uint32_t> none_done(static_cast<size_t>(cuda::merge_counters(h.n_head, h.n_kv)), 0);
        done_ = DeviceMemory::of(none_done);
        rehearsal_.done = DeviceMemory::of(none_done);
        rehearsal_.n_slots = DeviceMemory::of(one_slot);
        expanded_ = cuda::expanded_region(h.n_kv, h.head_dim, [this]<class T>(const std::vector<T>& host) {
            expanded_tables_.push_back(DeviceMemory::of(host));
            return expanded_tables_.back().template as<T>();
        });
        layers_.resize(static_cast<size_t>(h.n_layer));
        for (int il = 0; il < h.n_layer; il++) attach_layer(model, cache, rope, il);
    }

    void set(ggml_tensor* tensor, const void* data, size_t bytes) override {
        check(cudaMemcpyAsync(tensor->data, data, bytes, cudaMemcpyHostToDevice, stream_), "a copy of an input");
    }

    void finish(const ggml_tensor* tensor, void* data, size_t bytes) override {
        if (tensor == nullptr) {
            check(cudaStreamSynchronize(stream_), "the stream");
            return;
        }
        // through pinned memory: 10 against 100 us for the logits of 128256 tokens; longer ones hide behind a prefill
        if (bytes > largest_pinned) {
            check(cudaStreamSynchronize(stream_), "the stream");
            check(cudaMemcpy(data, tensor->data, bytes, cudaMemcpyDeviceToHost), "a copy of a result");
            return;
        }
        if (result_ == nullptr || bytes > result_bytes_) {
            result_ = std::make_unique<PinnedMemory>(bytes);
            result_bytes_ = bytes;
        }
        check(cudaMemcpyAsync(result_->as<void>(), tensor->data, bytes, cudaMemcpyDeviceToHost, stream_),
              "a copy of a result");
        check(cudaStreamSynchronize(stream_), "the stream");
        std::memcpy(data, result_->as<void>(), bytes);
    }

    void begin(const KvCache& cache, const BatchSlots& batch) override {
        const auto n = batch.pos.size();
        // two host buffers in turn: the last copy from this one was waited for a step ago
        next_pinned_ ^= 1;
        auto* const to = pinned_[next_pinned_]->as<int32_t>();
        for (int r = 0; r < cuda::max_regions; r++) to[r] = r < cache.n_regions() ? cache.cells(r).end() : 0;
        context_ = 0;
        for (int r = 0; r < cuda::max_regions; r++) context_ += cuda::round_up(to[r], cuda::expand_tile);
        int32_t* const fields = to + cuda::max_regions;
        for (size_t i = 0; i < n; i++) {
            fields[i] = batch.pos[i];
            fields[static_cast<size_t>(n_ubatch_) + i] = batch.seq[i];
            fields[2 * static_cast<size_t>(n_ubatch_) + i] = batch.slots[i].region;
            fields[3 * static_cast<size_t>(n_ubatch_) + i] = batch.slots[i].slot;
        }
        check(cudaMemcpyAsync(batch_.as<void>(), to, batch_words(n_ubatch_) * sizeof(int32_t), cudaMemcpyHostToDevice,
                              stream_),
              "a copy of the batch");
        if (cache.cells_version() != cells_version_) {
            cells_version_ = cache.cells_version();
            for (int r = 0; r < cache.n_regions(); r++) {
                const Cells& cells = cache.cells(r);
                const auto end = static_cast<size_t>(cells.end());
                const auto index = static_cast<size_t>(r);
                check(cudaMemcpyAsync(pos_[index].as<void>(), cells.pos_data(), end * sizeof(int32_t),
                                      cudaMemcpyHostToDevice, stream_),
                      "a copy of positions");
                check(cudaMemcpyAsync(seq_[index].as<void>(), cells.seq_data(), end * sizeof(uint64_t),
                                      cudaMemcpyHostToDevice, stream_),
                      "a copy of sequences");
            }
        } else {
            cuda::ClaimArgs claim{};
            claim.q_pos = q_pos();
            claim.q_seq = q_seq();
            claim.region = region();
            claim.slot = slot();
            for (size_t r = 0; r < pos_.size(); r++) {
                claim.pos[r] = pos_[r].as<int32_t>();
                claim.seq[r] = seq_[r].as<uint64_t>();
            }
            check(cuda::claim_slots(claim, static_cast<int>(n), stream_), "claiming slots");
        }
    }

    void prepare(const Graph& graph) override {
        drop_recording();
        const ggml_backend_dev_t device = ggml_backend_get_device(main_->backend());
        for (int i = 0; i < ggml_graph_n_nodes(graph.nodes); i++) {
            const ggml_tensor* const node = ggml_graph_node(graph.nodes, i);
            if (node->op != GGML_OP_CUSTOM && !ggml_backend_dev_supports_op(device, node)) {
                fail("gpu", "expected ", ggml_op_name(node->op), " of ", node->name,
                     " on the GPU; got ggml-cuda without it", "; use -ngl 0");
            }
        }
        size_t partial = 0;
        size_t partial_ml = 0;
        for (const AttentionNode& node : graph.attention) {
            if (node.params.n_tokens == 0) continue;  // the last layer of a graph without outputs only stores
            const cuda::AttnArgs& args = plan(node);
            partial = std::max(partial, cuda::partial_floats(args));
            partial_ml = std::max(partial_ml, cuda::partial_ml_floats(args));
        }
        if (partial * sizeof(float) > partial_.bytes() || partial_ml * sizeof(float) > partial_ml_.bytes()) {
            check(cudaStreamSynchronize(stream_), "the stream");
            partial_ = DeviceMemory(partial * sizeof(float));
            partial_ml_ = DeviceMemory(partial_ml * sizeof(float));
        }
        // a prefill graph runs once or twice, and its launches hide behind its work
        recordable_ = !graph.attention.empty() && graph.attention.front().params.n_tokens <= small_batch;
        branches_ = recordable_ ? find_branches(graph.nodes) : std::vector<Branches>{};
        positions_ = graph.positions;
        turned_.clear();
        if (recordable_) find_turned(graph.nodes);
        if (!branches_.empty()) prepare_rehearsal(graph, partial * sizeof(float), partial_ml * sizeof(float));
    }

    void move_rows(const KvCache& cache, int from, int to, std::span<const std::pair<int, int>> slots) override {
        std::vector<int32_t> columns;
        for (const auto& pair : slots) columns.push_back(pair.first);
        for (const auto& pair : slots) columns.push_back(pair.second);
        const DeviceMemory list = DeviceMemory::of(columns);
        for (size_t il = 0; il < layers_.size(); il++) {
            const Layer& layer = layers_[il];
            cuda::MoveArgs args{};
            args.from = layer.targets[from];
            args.to = layer.targets[to];
            args.from_slot = list.as<int32_t>();
            args.to_slot = list.as<int32_t>() + slots.size();
            args.k_width = cache.k_layout(from, static_cast<int>(il)).width;
            args.v_width = cache.v_layout(from, static_cast<int>(il)).width;
            check(cuda::move_rows(args, static_cast<int>(slots.size()), stream_), "moving rows");
        }
        check(cudaStreamSynchronize(stream_), "moving rows");
    }

private:
    struct Layer {
        cuda::RowTarget targets[cuda::max_regions] = {};
        cuda::RegionArgs regions[cuda::max_regions] = {};
        cuda::AttnArgs constant{};  // pointers that no batch changes
        std::vector<DeviceMemory> memory;
        std::map<int, cuda::AttnArgs> plans;  // by number of tokens
        bool fitted = false;                  // whether storing rows takes long
    };

    static size_t batch_words(int n_ubatch) { return cuda::max_regions + 4 * static_cast<size_t>(n_ubatch); }
    const int32_t* n_slots() const { return batch_.as<int32_t>(); }
    const int32_t* q_pos() const { return batch_.as<int32_t>() + cuda::max_regions; }
    const int32_t* q_seq() const { return q_pos() + n_ubatch_; }
    const int32_t* region() const { return q_pos() + 2 * n_ubatch_; }
    const int32_t* slot() const { return q_pos() + 3 * n_ubatch_; }

    template <class T>
    static const T* keep(Layer& layer, const std::vector<T>& host) {
        layer.memory.push_back(DeviceMemory::of(host));
        return layer.memory.back().template as<T>();
    }

    static const SegmentLayout* keep_segments(Layer& layer, const RowLayout& row, int32_t& n) {
        n = 0;
        for (int g = 0; g < row.n_groups; g++) n += row.groups[g].n_segments;
        return keep(layer, std::vector<SegmentLayout>(row.segments, row.segments + n));
    }

    void attach_layer(const Model& model, const KvCache& cache, const Rope& rope, int il) {
        const HParams& h = model.hparams();
        const LayerWeights& weights = model.layers()[static_cast<size_t>(il)];
        Layer& layer = layers_[static_cast<size_t>(il)];
        LatentAttnParams p{};
        p.n_regions = cache.n_regions();
        for (int r = 0; r < p.n_regions; r++) p.regions[r] = cache.view(r, il);
        const int k_blocks = cuda::side_blocks(p, &RegionView::k);
        const int v_blocks = cuda::side_blocks(p, &RegionView::v);
        for (int r = 0; r < p.n_regions; r++) {
            const RegionView& view = p.regions[r];
            const cuda::RegionTables tables = cuda::region_tables(view.k, view.v, k_blocks, v_blocks);
            const auto index = static_cast<size_t>(r);
            layer.regions[r] = {view.k_rows,
                                view.v_rows,
                                pos_[index].as<int32_t>(),
                                seq_[index].as<uint64_t>(),
                                keep(layer, tables.k_groups),
                                keep(layer, tables.v_groups),
                                keep(layer, tables.chunks),
                                static_cast<uint32_t>(view.k.row_bytes),
                                static_cast<uint32_t>(view.v.row_bytes)};
            cuda::RowTarget& target = layer.targets[r];
            target.k_rows = const_cast<uint8_t*>(view.k_rows);
            target.v_rows = const_cast<uint8_t*>(view.v_rows);
            target.k_segments = keep_segments(layer, view.k, target.n_k_segments);
            target.v_segments = keep_segments(layer, view.v, target.n_v_segments);
            layer.fitted = layer.fitted || has_format(view.k, format_is_fitted) || has_format(view.v, format_is_fitted);
            target.k_row_bytes = view.k.row_bytes;
            target.v_row_bytes = view.v.row_bytes;
        }
        factors_.insert({weights.attn_k_e, weights.attn_q_e});
        cuda::AttnArgs& a = layer.constant;
        if (!weights.k_b.empty()) {
            const int rank = model.cache_spec().layers[static_cast<size_t>(il)].k.rank_max();
            const auto pack = [&](const std::vector<int>& dims) {
                return keep(layer, cuda::pack_k_b(weights.k_b.data(), h.n_kv, rank, h.head_dim, k_blocks, dims));
            };
            const bool rebuild = model.cache_spec().layers[static_cast<size_t>(il)].k_path == KPath::rebuild;
            if (rebuild) a.k_b = pack(cuda::dims_in_order(h.head_dim));
            const std::vector<int> by_plane = cuda::dims_by_plane(
                h.head_dim, rope.freqs.empty() || !rebuild ? 0 : h.n_rot, h.block.rope_pairing == RopePairing::neox);
            a.k_b_planes = pack(by_plane);
            if (rebuild && device_.specialized && cuda::has_specialized_shape(k_blocks, v_blocks)) {
                a.k_b_cores = keep(layer, cuda::pack_k_b_cores(weights.k_b.data(), h.n_kv, rank, h.head_dim,
                                                               cuda::decode_blocks(k_blocks, v_blocks), by_plane));
            }
            a.k_bias = weights.k_bias.empty() ? nullptr : keep(layer, weights.k_bias);
            a.k_norm = weights.k_norm.empty() ? nullptr : keep(layer, weights.k_norm);
            a.phases = phases_.as<uint64_t>();
            a.angles = angles_.as<uint16_t>();
            a.rebuilt_angles = rebuilt_angles_.as<uint16_t>();
        }
        if (!weights.v_b.empty()) {
            a.v_b = keep(layer, cuda::pack_v_b(weights.v_b.data(), weights.v_b.size()));
            if (!weights.k_b.empty()) {
                const int rank = model.cache_spec().layers[static_cast<size_t>(il)].v.rank_max();
                a.v_b_planes = keep(layer, cuda::pack_k_b(weights.v_b.data(), h.n_kv, rank, h.head_dim, v_blocks,
                                                          cuda::dims_by_plane(h.head_dim, 0, true)));
            }
        }
        a.expanded = expanded_;
        a.alibi_slopes = slopes_.as<float>();
        a.done = done_.as<uint32_t>();
    }

    const cuda::AttnArgs& plan(const AttentionNode& node) {
        Layer& layer = layers_[static_cast<size_t>(node.layer)];
        const auto found = layer.plans.find(node.params.n_tokens);
        if (found != layer.plans.end()) return found->second;
        cuda::AttnArgs args = layer.constant;
        try {
            cuda::plan_attention(node.params, capacity_, device_, args);
        } catch (const std::invalid_argument& e) {
            throw Error(e.what());
        }
        std::copy_n(layer.regions, cuda::max_regions, args.regions);
        args.n_slots = n_slots();
        args.q_pos = q_pos();
        args.q_seq = q_seq();
        return layer.plans.emplace(node.params.n_tokens, args).first->second;
    }

    // K's rows, V's, or both
    cudaError_t store(const ggml_tensor* dst, const AttentionNode& node, bool with_k, bool with_v,
                      cudaStream_t stream) {
        const ggml_tensor* const k = dst->src[0];
        const ggml_tensor* const v = dst->src[1];
        cuda::StoreArgs args{};
        if (with_k) args.k = static_cast<const float*>(k->data);
        if (with_v) args.v = static_cast<const float*>(v->data);
        args.k_stride = static_cast<int64_t>(k->nb[1] / sizeof(float));
        args.v_stride = static_cast<int64_t>(v->nb[1] / sizeof(float));
        args.region = region();
        args.slot = slot();
        std::copy_n(layers_[static_cast<size_t>(node.layer)].targets, cuda::max_regions, args.targets);
        return cuda::store_rows(args, static_cast<int>(k->ne[1]), stream);
    }

    // Rows are stored beside the products that make the queries.
    cudaError_t run_store(const ggml_tensor* dst, const AttentionNode& node) {
        cudaError_t error = v_lane_->wait_for(*main_);
        if (error == cudaSuccess) error = store(dst, node, true, true, v_lane_->stream());
        unjoined_ = true;
        return error;
    }

    cudaError_t join() {
        if (!unjoined_) return cudaSuccess;
        unjoined_ = false;
        return main_->wait_for(*v_lane_);
    }

    cudaError_t run_attention(const ggml_tensor* dst, const AttentionNode& node) {
        const cudaError_t error = join();
        if (error != cudaSuccess) return error;
        cuda::AttnArgs args = plan(node);
        args.q = static_cast<const float*>(dst->src[0]->data);
        args.out = static_cast<float*>(dst->data);
        args.context = context_;
        if (args.n_split > 1 || args.v_b != nullptr || args.expand != 0) {
            args.partial = partial_.as<float>();
            args.partial_ml = partial_ml_.as<float>();
        }
        return cuda::attend(args, stream_);
    }

    // Whose memory a tensor names.
    static const ggml_tensor* owner_of(const ggml_tensor* tensor) {
        return tensor->view_src != nullptr ? tensor->view_src : tensor;
    }

    // The latents' factors E_k and E_q times a few tokens; everything else is ggml-cuda's.
    std::optional<cuda::ProductArgs> product_of(const ggml_tensor* node) const {
        if (node->op != GGML_OP_MUL_MAT) return std::nullopt;
        const ggml_tensor* const w = node->src[0];
        const ggml_tensor* const x = node->src[1];
        if (!factors_.contains(owner_of(w))) return std::nullopt;
        const int64_t columns = x->ne[1] * x->ne[2] / w->ne[2];
        const bool taken = w->type == GGML_TYPE_F16 && x->type == GGML_TYPE_F32 && ggml_is_contiguous(x) &&
                           ggml_is_contiguous(node) && x->ne[3] == 1 && w->ne[0] % 8 == 0 && w->nb[1] % 16 == 0 &&
                           w->nb[2] % 16 == 0 && reinterpret_cast<uintptr_t>(w->data) % 16 == 0 &&
                           reinterpret_cast<uintptr_t>(x->data) % 16 == 0 && columns <= cuda::product_columns &&
                           cuda::product_shared_bytes(w->ne[0], columns) <= device_.shared_bytes;
        if (!taken) return std::nullopt;
        cuda::ProductArgs args{};
        args.w = static_cast<const uint16_t*>(w->data);
        args.x = static_cast<const float*>(x->data);
        args.y = static_cast<float*>(node->data);
        args.w_row = static_cast<int64_t>(w->nb[1] / sizeof(uint16_t));
        args.w_matrix = static_cast<int64_t>(w->nb[2] / sizeof(uint16_t));
        args.n_in = static_cast<int32_t>(w->ne[0]);
        args.n_out = static_cast<int32_t>(w->ne[1]);
        args.n_matrices = static_cast<int32_t>(w->ne[2]);
        args.n_columns = static_cast<int32_t>(columns);
        const ggml_tensor* const rope = owner_of(x);
        if (turned_.contains(rope)) {
            args.x = static_cast<const float*>(rope->src[0]->data);
            args.turn = *turn_of(rope);
        }
        return args;
    }

    // How the heads of one token are turned by the model's RoPE, if `rope` does that.
    std::optional<cuda::RopeTurn> turn_of(const ggml_tensor* rope) const {
        if (rope->op != GGML_OP_ROPE || rope->src[1] != positions_) return std::nullopt;
        const ggml_tensor* const from = rope->src[0];
        const int32_t mode = ggml_get_op_params_i32(rope, 2);
        const bool taken = phases_.bytes() > 0 && rope->ne[2] == 1 && rope->ne[3] == 1 && from->type == GGML_TYPE_F32 &&
                           ggml_is_contiguous(from) && reinterpret_cast<uintptr_t>(from->data) % 16 == 0 &&
                           rope->ne[0] % 4 == 0 && rope->ne[0] <= cuda::max_turned && rope_.n_rot <= cuda::max_rot &&
                           mode == (rope_.neox ? GGML_ROPE_TYPE_NEOX : GGML_ROPE_TYPE_NORMAL);
        if (!taken) return std::nullopt;
        return cuda::RopeTurn{phases_.as<uint64_t>(), q_pos(),     static_cast<int32_t>(rope->ne[0]), rope_.n_rot,
                              rope_.neox ? 1 : 0,     rope_.mscale};
    }

    // RoPE of the one token whose heads this product takes, or null.
    const ggml_tensor* rope_of(const ggml_tensor* product) const {
        const ggml_tensor* const x = product->src[1];
        const ggml_tensor* const rope = owner_of(x);
        const bool whole = x->data == rope->data && ggml_nelements(x) == ggml_nelements(rope);
        return whole && turn_of(rope) && x->ne[0] % rope->ne[0] == 0 ? rope : nullptr;
    }

    // RoPE of one token by a kernel that lets what follows be set up: ggml-cuda's of neighbouring dimensions does not, and attention's
    // thread blocks would come when it ends.
    std::optional<cuda::TurnArgs> turning(const ggml_tensor* node) const {
        const std::optional<cuda::RopeTurn> turn = turn_of(node);
        if (!turn || !ggml_is_contiguous(node) || reinterpret_cast<uintptr_t>(node->data) % 16 != 0)
            return std::nullopt;
        return cuda::TurnArgs{*turn, static_cast<const float*>(node->src[0]->data), static_cast<float*>(node->data),
                              static_cast<int32_t>(node->ne[1])};
    }

    // A launch less on the way to K and to the queries: 8B, rotated 64 at depth 0 322 to 329 tokens/s without, 325 to 335 with it.
    void find_turned(ggml_cgraph* graph) {
        std::map<const ggml_tensor*, int> uses;
        for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
            const ggml_tensor* const node = ggml_graph_node(graph, i);
            if (is_view(node)) continue;
            for (const ggml_tensor* src : node->src) {
                if (src != nullptr) uses[owner_of(src)]++;
            }
            const std::optional<cuda::ProductArgs> product = product_of(node);
            const ggml_tensor* const rope = product ? rope_of(node) : nullptr;
            if (rope != nullptr) turned_.insert(rope);
        }
        std::erase_if(turned_, [&](const ggml_tensor* rope) { return uses[rope] != 1; });
    }

    static const AttentionNode& attention_of(const ggml_tensor* node, ggml_custom_op_t* function = nullptr) {
        ggml_custom_op_params params;
        std::memcpy(&params, node->op_params, sizeof params);
        if (function != nullptr) *function = params.fun;
        return *static_cast<const AttentionNode*>(params.userdata);
    }

    // C calls these three: errors are logged and returned, never thrown.
    static ggml_status started(cudaError_t error, const ggml_tensor* node) {
        if (error == cudaSuccess) return GGML_STATUS_SUCCESS;
        log(LogLevel::error, "[cuda] expected ", node->name, " to start; got ", cudaGetErrorString(error));
        return GGML_STATUS_FAILED;
    }

    ggml_status run(ggml_cgraph* graph, int first, int end, const Lane& lane) {
        const auto ordinary = [&](int from, int to) {
            if (from == to) return GGML_STATUS_SUCCESS;
            ggml_cgraph view = ggml_graph_view(graph, from, to);
            return ggml_backend_graph_compute_async(lane.backend(), &view);
        };
        for (int i = first; i < end; i++) {
            ggml_tensor* const node = ggml_graph_node(graph, i);
            const std::optional<cuda::ProductArgs> product = product_of(node);
            const bool turned = turned_.contains(node);
            const std::optional<cuda::TurnArgs> turn = turning(node);
            if (node->op != GGML_OP_CUSTOM && !product && !turned && !turn) continue;
            ggml_status status = ordinary(first, i);
            if (status != GGML_STATUS_SUCCESS) return status;
            first = i + 1;
            if (turned) continue;
            if (turn) {
                status = started(cuda::turn_heads(*turn, lane.stream()), node);
            } else if (product) {
                status = started(cuda::multiply(*product, lane.stream()), node);
            } else {
                ggml_custom_op_t function = nullptr;
                const AttentionNode& attention = attention_of(node, &function);
                status = started(
                    function == gpu_store_node ? run_store(node, attention) : run_attention(node, attention), node);
            }
            if (status != GGML_STATUS_SUCCESS) return status;
        }
        return ordinary(first, end);
    }

    // What a rehearsal reads and writes in place of the real ones.
    struct Rehearsal {
        DeviceMemory q;
        DeviceMemory out;
        DeviceMemory partial;
        DeviceMemory partial_ml;
        DeviceMemory done;
        DeviceMemory n_slots;
    };

    // partial, partial_ml: bytes that this graph needs
    void prepare_rehearsal(const Graph& graph, size_t partial, size_t partial_ml) {
        size_t q = 0;
        size_t out = 0;
        for (const AttentionNode& node : graph.attention) {
            const auto rows = static_cast<size_t>(node.params.n_tokens) * static_cast<size_t>(node.params.n_head);
            q = std::max(q, rows * static_cast<size_t>(node.params.q_width));
            out = std::max(out, rows * static_cast<size_t>(node.params.head_dim));
        }
        // a graph of another batch comes with every prompt: memory that is large enough stays
        if (q * sizeof(float) > rehearsal_.q.bytes()) rehearsal_.q = DeviceMemory::of(std::vector<float>(q, 1.0f));
        const auto grow = [](DeviceMemory& memory, size_t bytes) {
            if (bytes > memory.bytes()) memory = DeviceMemory(bytes);
        };
        grow(rehearsal_.out, out * sizeof(float));
        grow(rehearsal_.partial, partial);
        grow(rehearsal_.partial_ml, partial_ml);
    }

    // The layer's attention on one slot a region, whose result nobody reads, beside the last product of the layer before: the real one
    // would wait for its kernels' instructions (8B, joint of 512: 307 tokens/s without, 331 with it; rebuild of 256 for four heads: 329
    // and 343; full f16: 361 and 369; with all thread blocks, later: 312, 328 and 370).
    ggml_status rehearse(const ggml_tensor* node) {
        cudaError_t error = rehearsal_lane_->wait_for(*main_);
        if (error == cudaSuccess) {
            cuda::AttnArgs args = cuda::rehearsal(plan(attention_of(node)));
            args.q = rehearsal_.q.as<float>();
            args.out = rehearsal_.out.as<float>();
            args.partial = rehearsal_.partial.as<float>();
            args.partial_ml = rehearsal_.partial_ml.as<float>();
            args.done = rehearsal_.done.as<uint32_t>();
            args.n_slots = rehearsal_.n_slots.as<int32_t>();
            error = cuda::attend(args, rehearsal_lane_->stream());
        }
        return started(error, node);
    }

    // V's rows and the queries on streams of their own, beside K's rows; all have joined behind it. Where storing takes long K and V go
    // first: their few thread blocks would wait for the queries', which fill the GPU (q4 rows of joint latents at depth 0: 328 tokens/s
    // so, 322 with the queries first; q8 ones 333 and 336, full f16 rows 368 and 375).
    ggml_status run_branches(ggml_cgraph* graph, const Branches& layer) {
        const ggml_tensor* const rows = ggml_graph_node(graph, layer.store);
        const AttentionNode& node = attention_of(rows);
        const auto store_side = [&](ggml_status status, bool is_k, const Lane& lane) {
            if (status != GGML_STATUS_SUCCESS) return status;
            return started(store(rows, node, is_k, !is_k, lane.stream()), rows);
        };
        ggml_status status = started(v_lane_->wait_for(*main_), rows);
        if (status == GGML_STATUS_SUCCESS) status = started(q_lane_->wait_for(*main_), rows);
        const bool queries_first = !layers_[static_cast<size_t>(node.layer)].fitted;
        const auto queries = [&] { return run(graph, layer.store + 1, layer.attention, *q_lane_); };
        if (status == GGML_STATUS_SUCCESS && queries_first) status = queries();
        if (status == GGML_STATUS_SUCCESS) {
            status = store_side(run(graph, layer.v, layer.store, *v_lane_), false, *v_lane_);
        }
        if (status == GGML_STATUS_SUCCESS && !queries_first) status = queries();
        if (status == GGML_STATUS_SUCCESS) status = store_side(run(graph, layer.k, layer.v, *main_), true, *main_);
        if (status == GGML_STATUS_SUCCESS) status = started(main_->wait_for(*v_lane_), rows);
        if (status == GGML_STATUS_SUCCESS) status = started(main_->wait_for(*q_lane_), rows);
        return status;
    }

    // Of a failure nothing is left under way: what comes next, reused memory too, waits for the main stream only.
    ggml_status enqueue(ggml_cgraph* graph) {
        const ggml_status status = enqueue_nodes(graph);
        cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
        if (status != GGML_STATUS_SUCCESS && cudaStreamIsCapturing(stream_, &capture) == cudaSuccess &&
            capture == cudaStreamCaptureStatusNone) {
            cudaStreamSynchronize(v_lane_->stream());
            cudaStreamSynchronize(q_lane_->stream());
            cudaStreamSynchronize(rehearsal_lane_->stream());
            unjoined_ = false;
        }
        return status;
    }

    ggml_status enqueue_nodes(ggml_cgraph* graph) {
        int first = 0;
        for (const Branches& layer : branches_) {
            ggml_status status = run(graph, first, layer.ahead, *main_);
            if (status == GGML_STATUS_SUCCESS) status = rehearse(ggml_graph_node(graph, layer.attention));
            if (status == GGML_STATUS_SUCCESS) status = run(graph, layer.ahead, layer.k, *main_);
            if (status == GGML_STATUS_SUCCESS) status = run_branches(graph, layer);
            if (status != GGML_STATUS_SUCCESS) return status;
            first = layer.attention;
        }
        const ggml_status status = run(graph, first, ggml_graph_n_nodes(graph), *main_);
        if (!branches_.empty() && status == GGML_STATUS_SUCCESS && main_->wait_for(*rehearsal_lane_) != cudaSuccess) {
            return GGML_STATUS_FAILED;
        }
        return status == GGML_STATUS_SUCCESS && join() != cudaSuccess ? GGML_STATUS_FAILED : status;
    }

    ggml_status compute(ggml_cgraph* graph) {
        if (recording_ != nullptr && recorded_ == graph) {
            return cudaGraphLaunch(recording_, stream_) == cudaSuccess ? GGML_STATUS_SUCCESS : GGML_STATUS_FAILED;
        }
        // the first run warms ggml-cuda's pools up: nothing may be allocated while recording
        if (!recordable_ || seen_ != graph) {
            seen_ = graph;
            return enqueue(graph);
        }
        cudaError_t error = record(graph, true);
        if (error != cudaSuccess) {
            log(LogLevel::warning, "[cuda] expected to let a recorded step's kernels start early; got ",
                cudaGetErrorString(error), "; they start when those before them end");
            error = record(graph, false);
        }
        if (error != cudaSuccess) {
            log(LogLevel::warning, "[cuda] expected to record the step; got ", cudaGetErrorString(error),
                "; every step is launched node by node");
            recordable_ = false;
            return enqueue(graph);
        }
        return cudaGraphLaunch(recording_, stream_) == cudaSuccess ? GGML_STATUS_SUCCESS : GGML_STATUS_FAILED;
    }

    cudaError_t record(ggml_cgraph* graph, bool early) {
        cudaError_t error = cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed);
        if (error != cudaSuccess) return error;
        const ggml_status status = enqueue(graph);
        cudaGraph_t recorded = nullptr;
        error = cudaStreamEndCapture(stream_, &recorded);
        if (error == cudaSuccess && status != GGML_STATUS_SUCCESS) error = cudaErrorUnknown;
        if (error == cudaSuccess && early) error = cuda::start_early(recorded);
        cudaGraphExec_t exec = nullptr;
        if (error == cudaSuccess) {
            error = cudaGraphInstantiate(&exec, recorded, cudaGraphInstantiateFlagUseNodePriority);
        }
        if (recorded != nullptr) cudaGraphDestroy(recorded);
        if (error != cudaSuccess) {
            cudaGetLastError();  // not the next caller's
            return error;
        }
        recording_ = exec;
        recorded_ = graph;
        return cudaSuccess;
    }

    void drop_recording() {
        if (recording_ != nullptr) cudaGraphExecDestroy(recording_);
        recording_ = nullptr;
        recorded_ = nullptr;
        seen_ = nullptr;
    }

    // made after the setting that they read: no recordings of ggml-cuda's own
    std::optional<Lane> main_;
    std::optional<Lane> v_lane_;
    std::optional<Lane> q_lane_;
    std::optional<Lane> rehearsal_lane_;
    Rehearsal rehearsal_;
    ggml_backend wrapper_{};
    cudaStream_t stream_ = nullptr;  // of main_
    bool unjoined_ = false;          // a store that the main stream has not waited for
    cuda::Device device_{};

    std::vector<Layer> layers_;
    std::set<const ggml_tensor*> factors_;    // E_k and E_q
    const ggml_tensor* positions_ = nullptr;  // of the graph's tokens
    std::set<const ggml_tensor*> turned_;     // RoPE that the only product to read it does itself
    struct {
        int32_t n_rot = 0;
        bool neox = false;
        float mscale = 1.0F;
    } rope_;
    std::vector<DeviceMemory> pos_;  // per region
    std::vector<DeviceMemory> seq_;
    uint64_t cells_version_ = 0;
    int capacity_ = 0;
    int context_ = 0;  // slots of the tiles in use, see AttnArgs::context
    DeviceMemory slopes_;
    DeviceMemory phases_;
    DeviceMemory angles_;  // tables of the specialized kernel, see AttnArgs
    DeviceMemory rebuilt_angles_;

    // [n_slots of 3 regions | pos | seq | region | slot], each of the last four n_ubatch long
    DeviceMemory batch_;
    std::unique_ptr<PinnedMemory> pinned_[2];
    int next_pinned_ = 0;
    std::unique_ptr<PinnedMemory> result_;
    size_t result_bytes_ = 0;
    int n_ubatch_ = 0;

    DeviceMemory partial_;
    DeviceMemory partial_ml_;
    DeviceMemory done_;
    std::vector<DeviceMemory> expanded_tables_;
    cuda::RegionArgs expanded_{};  // of every layer

    bool recordable_ = false;
    std::vector<Branches> branches_;  // of the prepared graph
    const ggml_cgraph* seen_ = nullptr;
    const ggml_cgraph* recorded_ = nullptr;
    cudaGraphExec_t recording_ = nullptr;
};

}  // namespace

ggml_backend_buffer_type_t gpu_memory(std::string& why) {
    int n_devices = 0;
    const cudaError_t error = cudaGetDeviceCount(&n_devices);
    if (error != cudaSuccess || n_devices == 0) {
        why = error == cudaSuccess ? "no device" : cudaGetErrorString(error);
        return nullptr;
    }
    return ggml_backend_cuda_buffer_type(0);
}

std::unique_ptr<Gpu> open_gpu() { return std::make_unique<CudaGpu>(); }

}  // namespace lkv
