// Speed of the CUDA kernels alone, as JSON on standard output: microseconds a layer, GB/s of stored rows, share of the copy
// bandwidth measured first.   bench_cuda_attn [depth …] [--tokens N] [--only TEXT …] [--kernel NAME] [--expand HOW] [--by-warp] [--cold]
//
// --only: rows whose "model path format" contains one of the texts. --tokens: so many alone, in place of one and of 512.
// --kernel: the kernel of that name in place of the planned one; rows that it does not take are left out. --expand units, chunks: as for rows
// that are decoded so, where the plan says warpgroups.
// --cold: a copy of 64 MiB before every layer, as a layer's weights displace caches, its own time taken off.
// --by-warp: no products by warpgroups, as on GPUs that are not of compute capability 9.0.
// Decode of one token. Layers are cycled so that the rows of one pass exceed the L2 cache several times; rows are written by
// the store kernel from normal values. Times: median of 5 replays of one captured graph over all layers.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>

#include "check.h"
#include "cuda/cuda_case.h"
#include "ops/cuda/kernels/expand/layout.h"

namespace {

using lkv::Format;
using lkv::LatentAttnParams;
using lkv::RowLayout;
using lkv::RowPlan;
using lkv::SegmentSpec;
using lkv::test::cuda_check;
using lkv::test::DeviceBuffer;

struct Shape {
    const char* model;
    const char* path;
    int n_head, n_kv;
    int k_group, k_rank;  // rank 0: full
    int v_group, v_rank;
    bool rebuild;
    bool rope = true;      // of keys that are rebuilt
    bool prefill = false;  // only
    std::vector<SegmentSpec> k_plan{},
        v_plan{};  // of every group, as `convert` writes it by default; empty: one format
};

constexpr int head_dim = 128;

int width_of(const std::vector<SegmentSpec>& plan) {
    int width = 0;
    for (const SegmentSpec& segment : plan) width += segment.width;
    return width;
}

// Radians per position of RoPE's planes: Llama-3.1's, or Llama-2's.
std::vector<float> rope_freqs(const std::string& model) {
    const bool scaled = model == "8B";
    std::vector<float> freqs;
    for (int i = 0; i < head_dim / 2; i++) {
        const double freq = std::pow(scaled ? 500000.0 : 10000.0, -2.0 * i / head_dim);
        // a wave of 2048 positions stays as it is, one of 8192 is eight times as long
        const double smooth = std::clamp((8192.0 * freq / 6.283185307179586 - 1.0) / 3.0, 0.0, 1.0);
        freqs.push_back(static_cast<float>(scaled ? freq * (smooth + (1.0 - smooth) / 8.0) : freq));
    }
    return freqs;
}

using enum Format;
// Rows of eight heads of 128 at 28, 14 and 8.5 % of f16.
const std::vector<SegmentSpec> k_28 = {{q8, 128}, {q8, 256}, {q4, 128}, {q4, 256}, {q2, 128}};
const std::vector<SegmentSpec> v_28 = {{q8, 192}, {q4, 192}, {q4, 256}, {q2, 192}, {q1, 64}};
const std::vector<SegmentSpec> k_14 = {{q8, 64}, {q4, 128}, {q4, 128}, {q2, 128}, {q2, 128}, {q2, 64}, {q1, 128}};
const std::vector<SegmentSpec> v_14 = {{q4, 128}, {q4, 128}, {q2, 128}, {q2, 128}, {q1, 128}, {q1, 128}};
// The same of four.
const std::vector<SegmentSpec> k_14_of_4 = {{q8, 32}, {q4, 128}, {q2, 128}, {q1, 64}, {q1, 32}};
const std::vector<SegmentSpec> v_14_of_4 = {{q4, 128}, {q2, 128}, {q1, 128}};
// Rows whose group has the scales, as `convert` writes them by default, of the same bytes.
const std::vector<SegmentSpec> k_rows_of_4 = {{n6, 32}, {n4, 96}, {n3, 64}, {n2, 160}, {n1, 160}};
const std::vector<SegmentSpec> v_rows_of_4 = {{n4, 32}, {n3, 96}, {n2, 192}, {n1, 160}};
const std::vector<SegmentSpec> k_8 = {{q4, 64}, {q4, 128}, {q2, 64}, {q2, 128}, {q1, 128}};
const std::vector<SegmentSpec> v_8 = {{q4, 64}, {q2, 64}, {q2, 128}, {q1, 128}, {q1, 128}};

const std::vector<Shape> shapes = {
    {"8B", "plan 28 %", 32, 8, 8, 1024, 8, 1024, false, true, false, k_28, v_28},
    {"8B", "plan 14 %", 32, 8, 8, 1024, 8, 1024, false, true, false, k_14, v_14},
    {"8B", "plan 14 % of four", 32, 8, 4, 512, 4, 512, false, true, false, k_14_of_4, v_14_of_4},
    {"8B", "rows 14 % of four", 32, 8, 4, 512, 4, 512, false, true, false, k_rows_of_4, v_rows_of_4},
    {"8B", "plan 8.5 %", 32, 8, 8, 1024, 8, 1024, false, true, false, k_8, v_8},
    {"7B", "plan 14 %", 32, 32, 8, 1024, 8, 1024, false, true, false, k_14, v_14},
    {"8B", "full/full", 32, 8, 1, 0, 1, 0, false},
    {"8B", "rotated 64/latent 64 per head", 32, 8, 1, 64, 1, 64, false},
    {"8B", "rotated 512/latent 512 joint", 32, 8, 8, 512, 8, 512, false},
    {"8B", "rotated 512/latent 512 joint, expanded", 32, 8, 8, 512, 8, 512, true, false, true},
    {"8B", "rebuild 64/latent 64 per head", 32, 8, 1, 64, 1, 64, true},
    {"8B", "rebuild 128/latent 128 of 2 heads", 32, 8, 2, 128, 2, 128, true},
    {"8B", "rebuild 256/latent 256 of 4 heads", 32, 8, 4, 256, 4, 256, true},
    {"7B", "full/full", 32, 32, 1, 0, 1, 0, false},
    {"1.5B", "full/full", 12, 2, 1, 0, 1, 0, false},
    {"7B", "rotated 64/latent 64 per head", 32, 32, 1, 64, 1, 64, false},
    {"7B", "rotated 1024/latent 1024 joint", 32, 32, 32, 1024, 32, 1024, false},
    {"7B", "rotated 2048/latent 2048 joint", 32, 32, 32, 2048, 32, 2048, false},
    {"7B", "rebuild 64/latent 64 per head", 32, 32, 1, 64, 1, 64, true},
};

struct Forced {
    std::string kernel;
    std::string expand;
};

// The plan of the kernel that is asked for.
lkv::cuda::Plan plan_of(const lkv::cuda::Request& request, const Forced& forced) {
    using namespace lkv::cuda;
    Plan plan = plan_attention(request, {});
    if (!forced.kernel.empty() && plan.kernel->name != forced.kernel) {
        Plan other{};
        static_cast<Problem&>(other) = plan;
        other.unit = plan.rebuild != 0 ? 1 : std::gcd(plan.k_group, plan.v_group);
        other.least_tiles = 1;
        other.kind = common_kind(request.params, plan.k_blocks, plan.v_blocks);
        const char* reason = "there is no such kernel";
        for (const Kernel* kernel : all_kernels()) {
            if (kernel->name != forced.kernel) continue;
            other.kernel = kernel;
            reason = kernel->takes(request, other);
        }
        if (reason != nullptr) throw std::invalid_argument(reason);
        plan = other;
        plan.items = plan.n_kv / plan.unit;
    }
    if (!forced.expand.empty() && plan.kernel->name == std::string("expand")) {
        auto own = plan.as<ExpandPlan>();
        own.by = forced.expand == "units" ? ExpandBy::units : ExpandBy::chunks;
        plan.keep(own);
    }
    return plan;
}

std::vector<float> normals(size_t n, float deviation) {
    std::mt19937 random(5);
    std::normal_distribution<float> normal(0.0f, deviation);
    std::vector<float> x(n);
    for (float& v : x) v = normal(random);
    return x;
}

// Seconds of one pass of `work`, which enqueues on the stream.
double graph_seconds(cudaStream_t stream, const std::function<void()>& work) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    cuda_check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "a capture");
    work();
    cuda_check(cudaStreamEndCapture(stream, &graph), "a capture");
    cuda_check(cudaGraphInstantiate(&exec, graph, 0), "a graph");
    cudaEvent_t begin = nullptr;
    cudaEvent_t end = nullptr;
    cudaEventCreate(&begin);
    cudaEventCreate(&end);
    std::vector<float> ms;
    for (int i = 0; i < 7; i++) {
        cudaEventRecord(begin, stream);
        cuda_check(cudaGraphLaunch(exec, stream), "a replay");
        cudaEventRecord(end, stream);
        cuda_check(cudaEventSynchronize(end), "a replay");
        float t = 0;
        cudaEventElapsedTime(&t, begin, end);
        if (i >= 2) ms.push_back(t);
    }
    std::sort(ms.begin(), ms.end());
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    return ms[ms.size() / 2] * 1e-3;
}

double copy_bandwidth(cudaStream_t stream) {
    constexpr size_t bytes = size_t{4} << 30;
    const DeviceBuffer a(bytes);
    const DeviceBuffer b(bytes);
    cuda_check(cudaMemset(a.as<void>(), 0x5a, bytes), "a memset");
    const double s = graph_seconds(stream, [&] {
        for (int i = 0; i < 4; i++) {
            cuda_check(cudaMemcpyAsync(b.as<void>(), a.as<void>(), bytes, cudaMemcpyDeviceToDevice, stream), "a copy");
        }
    });
    return 4 * 2.0 * bytes / s;
}

class Bench {
public:
    Bench(const Shape& shape, Format format, int depth, int n_tokens, const lkv::cuda::Device& device,
          const Forced& forced, cudaStream_t stream)
        : shape_(shape), n_slots_(depth), n_tokens_(n_tokens), stream_(stream) {
        LatentAttnParams p{};
        p.n_tokens = n_tokens;
        p.n_head = shape.n_head;
        p.n_kv = shape.n_kv;
        p.head_dim = head_dim;
        p.k_group = shape.k_group;
        p.v_group = shape.v_group;
        p.scale = 0.088388f;
        int k_width = shape.k_rank > 0 ? shape.k_rank : head_dim;
        int v_width = shape.v_rank > 0 ? shape.v_rank : head_dim;
        const auto rows_of = [&](const std::vector<SegmentSpec>& plan, int group, int width) {
            const int n_groups = shape.n_kv / group;
            return plan.empty() ? RowPlan::uniform(n_groups, width, format)
                                : RowPlan(std::vector(static_cast<size_t>(n_groups), plan));
        };
        if (!shape.k_plan.empty()) k_width = width_of(shape.k_plan);
        if (!shape.v_plan.empty()) v_width = width_of(shape.v_plan);
        p.q_width = shape.rebuild ? head_dim : k_width;
        const RowPlan k_plan = rows_of(shape.k_plan, shape.k_group, k_width);
        const RowPlan v_plan = rows_of(shape.v_plan, shape.v_group, v_width);
        const RowLayout k = k_plan.view();
        const RowLayout v = v_plan.view();
        layer_bytes_ = static_cast<size_t>(depth) * static_cast<size_t>(k.row_bytes + v.row_bytes);
        n_layers_ = static_cast<int>(std::clamp<size_t>((size_t{400} << 20) / layer_bytes_ + 1, 2, 64));
        p.n_regions = 1;
        p.regions[0].n_slots = depth;
        p.regions[0].k = k;
        p.regions[0].v = v;

        std::vector<float> factor;
        std::vector<float> freqs;
        if (shape.rebuild) {
            factor = normals(static_cast<size_t>(shape.n_kv * k_width * head_dim), 0.1f);
            freqs = rope_freqs(shape.model);
            if (shape.rope) p.rope_freqs = freqs.data();
            p.k_b = factor.data();
            p.k_rank_max = k_width;
            p.n_rot = head_dim;
            p.rope_mscale = 1.0f;
            p.rope_neox = true;
        }
        p.v_rank_max = shape.v_rank > 0 ? v_width : 0;
        const std::vector<float> v_factor =
            normals(static_cast<size_t>(shape.n_kv) * static_cast<size_t>(p.v_rank_max * head_dim), 0.1f);
        if (shape.v_rank > 0) p.v_b = v_factor.data();
        lkv::cuda::Plan args = plan_of({p, depth, device}, forced);
        args.q = keep(normals(static_cast<size_t>(n_tokens * p.n_head * p.q_width), 1.0f));
        std::vector<int32_t> q_pos;
        for (int i = 0; i < n_tokens; i++) q_pos.push_back(depth - n_tokens + i);
        args.q_pos = keep(q_pos);
        args.q_seq = keep(std::vector<int32_t>(static_cast<size_t>(n_tokens), 0));
        args.n_slots = keep(std::vector<int32_t>{depth});
        if (shape.rebuild) {
            args.k_b = keep(lkv::cuda::pack_rows(factor.data(), factor.size()));
            const std::vector<uint64_t> phases = lkv::cuda::pack_phases(freqs.data(), head_dim / 2);
            args.phases = keep(phases);
            if (args.kernel->pack_keys != nullptr) {
                args.packed = keep(args.kernel->pack_keys(
                    {factor.data(), p.n_kv, k_width, head_dim, args.k_blocks, args.n_rot, true}));
            }
        }
        if (shape.v_rank > 0) {
            args.v_b = keep(lkv::cuda::pack_rows(v_factor.data(), v_factor.size()));
        }
        std::vector<int32_t> pos(static_cast<size_t>(depth));
        std::iota(pos.begin(), pos.end(), 0);
        const int32_t* const pos_data = keep(pos);
        const uint64_t* const seq_data = keep(std::vector<uint64_t>(static_cast<size_t>(depth), 1));
        const lkv::cuda::RegionTables tables = lkv::cuda::region_tables(k, v, args.k_blocks, args.v_blocks);
        const auto* const k_groups = keep(tables.k_groups);
        const auto* const v_groups = keep(tables.v_groups);
        const auto* const chunks = keep(tables.chunks);
        args.out = space(static_cast<size_t>(n_tokens * p.n_head * head_dim) * 4).as<float>();
        args.done = keep(std::vector<uint32_t>(static_cast<size_t>(lkv::cuda::merge_counters(p.n_head, p.n_kv)), 0));
        args.whole = lkv::cuda::whole_region(shape.n_kv, head_dim, [this](const auto& host) { return keep(host); });
        args.context = (depth + 63) / 64 * 64;
        if (args.n_split > 1 || args.v_b != nullptr || args.chunk != 0) {
            args.partial = space(lkv::cuda::partial_floats(args) * 4).as<float>();
            args.partial_ml = space(lkv::cuda::partial_ml_floats(args) * 4).as<float>();
        }
        const auto n_segments = [](const RowLayout& row) {
            const lkv::GroupLayout& last = row.groups[row.n_groups - 1];
            return last.first_segment + last.n_segments;
        };
        k_segments_ = keep(std::vector<lkv::SegmentLayout>(k.segments, k.segments + n_segments(k)));
        v_segments_ = keep(std::vector<lkv::SegmentLayout>(v.segments, v.segments + n_segments(v)));
        const int width = std::max(k.width, v.width);
        constexpr int batch = 2048;
        const float* const values = keep(normals(static_cast<size_t>(batch * width), 1.0f));
        const int32_t* const region = keep(std::vector<int32_t>(static_cast<size_t>(depth), 0));
        const int32_t* const slot = pos_data;
        for (int l = 0; l < n_layers_; l++) {
            args.regions[0] = {space(static_cast<size_t>(depth) * static_cast<size_t>(k.row_bytes)).as<uint8_t>(),
                               space(static_cast<size_t>(depth) * static_cast<size_t>(v.row_bytes)).as<uint8_t>(),
                               pos_data,
                               seq_data,
                               k_groups,
                               v_groups,
                               chunks,
                               bytes_of_page(k.row_bytes),
                               bytes_of_page(v.row_bytes),
                               static_cast<uint32_t>(k.row_bytes),
                               static_cast<uint32_t>(v.row_bytes),
                               1};
            layers_.push_back(args);
            lkv::cuda::StoreArgs store{};
            store.latents = {values, values, width, width};
            store.with_k = store.with_v = 1;
            store.targets[0] = {0,
                                const_cast<uint8_t*>(args.regions[0].k_rows),
                                const_cast<uint8_t*>(args.regions[0].v_rows),
                                k_segments_,
                                v_segments_,
                                args.regions[0].k_page,
                                args.regions[0].v_page,
                                k.row_bytes,
                                v.row_bytes,
                                n_segments(k),
                                n_segments(v)};
            for (int first = 0; first < depth; first += batch) {
                store.region = region + first;
                store.slot = slot + first;
                cuda_check(lkv::cuda::store_rows(store, std::min(batch, depth - first), stream), "store_rows");
            }
            store.region = region;
            store.slot = slot;
            stores_.push_back(store);
        }
        cuda_check(cudaStreamSynchronize(stream), "storing");
    }

    // between: what runs before every layer, or nothing
    double attention_us(const std::function<void()>& between) {
        return layer_us(layers_, between, [&](const auto& args) { return lkv::cuda::attend(args, stream_); });
    }
    // without what merges the parts; 0 for kernels without a merge of their own
    double mla_us(const std::function<void()>& between) {
        if (args().kernel->finish == nullptr) return 0.0;
        return layer_us(layers_, between, [&](const auto& args) { return args.kernel->launch(args, stream_); });
    }
    double store_us(const std::function<void()>& between) {
        return layer_us(stores_, between,
                        [&](const auto& args) { return lkv::cuda::store_rows(args, n_tokens_, stream_); });
    }
    size_t layer_bytes() const { return layer_bytes_; }
    const lkv::cuda::Plan& args() const { return layers_.front(); }

private:
    template <class Layers, class Launch>
    double layer_us(const Layers& layers, const std::function<void()>& between, const Launch& launch) {
        const auto pass = [&](bool with_layers) {
            return graph_seconds(stream_, [&] {
                for (const auto& args : layers) {
                    if (between) between();
                    if (with_layers) cuda_check(launch(args), "a layer");
                }
            });
        };
        const double alone = between ? pass(false) : 0.0;
        return 1e6 / n_layers_ * (pass(true) - alone);
    }

    template <class T>
    T* keep(const std::vector<T>& host) {
        kept_.emplace_back(host);
        return kept_.back().template as<T>();
    }
    const DeviceBuffer& space(size_t bytes) {
        kept_.emplace_back(bytes);
        return kept_.back();
    }

    Shape shape_;
    int n_slots_;
    int n_tokens_;
    cudaStream_t stream_;
    size_t layer_bytes_ = 0;
    int n_layers_ = 0;
    std::vector<DeviceBuffer> kept_;
    std::vector<lkv::cuda::Plan> layers_;
    std::vector<lkv::cuda::StoreArgs> stores_;
    const lkv::SegmentLayout* k_segments_ = nullptr;
    const lkv::SegmentLayout* v_segments_ = nullptr;
};

}  // namespace

int main(int argc, char** argv) {
    std::vector<int> depths;
    std::vector<std::string> only;
    int only_tokens = 0;
    bool cold = false;
    Forced forced;
    lkv::cuda::Device device = lkv::test::device_limits();
    for (int i = 1; i < argc; i++) {
        const std::string arg = argv[i];
        if ((arg == "--only" || arg == "--tokens" || arg == "--kernel" || arg == "--expand") && i + 1 == argc) {
            std::fprintf(stderr, "[bench] expected a value after %s; got none\n", argv[i]);
            return 1;
        }
        if (arg == "--cold") {
            cold = true;
        } else if (arg == "--by-warp") {
            device.warpgroups = false;
        } else if (arg == "--only") {
            only.emplace_back(argv[++i]);
        } else if (arg == "--kernel") {
            forced.kernel = argv[++i];
        } else if (arg == "--expand") {
            forced.expand = argv[++i];
        } else if (arg == "--tokens") {
            only_tokens = std::atoi(argv[++i]);
        } else {
            depths.push_back(std::atoi(argv[i]));
        }
    }
    const auto wanted = [&](const Shape& shape, Format format) {
        const std::string name = std::string(shape.model) + " " + shape.path + " " + lkv::format_name(format);
        const auto names = [&](const std::string& text) { return name.find(text) != std::string::npos; };
        return only.empty() || std::any_of(only.begin(), only.end(), names);
    };
    if (depths.empty()) depths = {4096, 16384, 65536};
    cudaStream_t stream = nullptr;
    cuda_check(cudaStreamCreate(&stream), "a stream");
    cudaDeviceProp properties{};
    cuda_check(cudaGetDeviceProperties(&properties, 0), "a device");
    const double copy = copy_bandwidth(stream);
    std::printf("{\n  \"device\": \"%s\",\n  \"copy_gb_per_s\": %.0f,\n  \"rows\": [", properties.name, copy / 1e9);
    std::fprintf(stderr, "%s, copy %.0f GB/s\n", properties.name, copy / 1e9);
    constexpr size_t weight_bytes = size_t{64} << 20;
    const DeviceBuffer weights(2 * weight_bytes);
    std::function<void()> between;
    if (cold) {
        between = [&] {
            auto* const to = weights.as<uint8_t>();
            cuda_check(cudaMemcpyAsync(to, to + weight_bytes, weight_bytes, cudaMemcpyDeviceToDevice, stream),
                       "a copy");
        };
    }
    const char* separator = "\n";
    for (const int n_tokens : only_tokens != 0 ? std::vector{only_tokens} : std::vector{1, 512}) {
        for (const Shape& shape : shapes) {
            for (const int depth : depths) {
                if (n_tokens > 1 && depth != 16384) continue;
                if (n_tokens == 1 && shape.prefill) continue;
                for (const Format format :
                     {Format::f16, Format::q8_0, Format::q4_0, Format::q8, Format::q4, Format::q5}) {
                    const bool stock = format == Format::q8_0 || format == Format::q4_0;
                    if (n_tokens > 1 && format != Format::f16 && format != Format::q4 && !stock) continue;
                    if (stock && shape.k_rank > 0) continue;
                    if (!wanted(shape, format)) continue;
                    if (!shape.k_plan.empty() && format != Format::f16) continue;
                    try {
                        Bench bench(shape, format, depth, n_tokens, device, forced, stream);
                        const double us = bench.attention_us(between);
                        const double mla = bench.mla_us(between);
                        const double store = bench.store_us(between);
                        const double floor = static_cast<double>(bench.layer_bytes()) / copy * 1e6;
                        const auto& a = bench.args();
                        std::printf(
                            "%s    {\"model\": \"%s\", \"path\": \"%s\", \"format\": \"%s\", \"tokens\": %d, "
                            "\"depth\": %d, \"attention_us\": %.2f, \"mla_us\": %.2f, \"store_us\": %.2f, "
                            "\"row_bytes_floor_us\": %.2f, "
                            "\"gb_per_s\": %.0f, \"share_of_copy\": %.3f, \"kernel\": \"%s\", \"tile\": %d, \"parts\": "
                            "%d}",
                            separator, shape.model, shape.path, lkv::format_name(format), n_tokens, depth, us, mla,
                            store, floor, static_cast<double>(bench.layer_bytes()) / us * 1e-3, floor / us,
                            a.kernel->name, a.tile, a.n_split);
                        std::fprintf(stderr,
                                     "%-3s %-34s %-4s %4d tok %6d  %9.1f us (mla %.1f)  floor %7.1f  %5.1f %%  store "
                                     "%6.1f  %s t%d p%d\n",
                                     shape.model, shape.path, lkv::format_name(format), n_tokens, depth, us, mla, floor,
                                     100 * floor / us, store, a.kernel->name, a.tile, a.n_split);
                        separator = ",\n";
                    } catch (const std::invalid_argument& e) {
                        std::fprintf(stderr, "%-3s %-34s %-4s: %s\n", shape.model, shape.path, lkv::format_name(format),
                                     e.what());
                    }
                }
            }
        }
    }
    std::printf("\n  ]\n}\n");
    return 0;
}
