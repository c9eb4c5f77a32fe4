// What a step does around attention: RoPE, products, and recorded products that start early: ops/cuda/step.
#include <map>
#include <random>
#include <set>

#include "cuda/attn/cases.h"
#include "ops/cuda/gpu/chain.cuh"
#include "ops/cuda/step/early_start.h"
#include "ops/cuda/step/heads_product.h"
#include "ops/cuda/step/product.h"

namespace lkv::test {

namespace {

// The heads of a vector turned by a position, in double.
std::vector<double> turned(const std::vector<float>& x, const std::vector<float>& freqs, int head_dim, bool neox,
                           int pos, double mscale) {
    std::vector<double> out(x.begin(), x.end());
    const size_t n = freqs.size();
    for (size_t head = 0; head < x.size(); head += static_cast<size_t>(head_dim)) {
        for (size_t i = 0; i < n; i++) {
            const size_t a = head + (neox ? i : 2 * i);
            const size_t b = head + (neox ? i + n : 2 * i + 1);
            const double angle = pos * double{freqs[i]};
            out[a] = mscale * (x[a] * std::cos(angle) - x[b] * std::sin(angle));
            out[b] = mscale * (x[b] * std::cos(angle) + x[a] * std::sin(angle));
        }
    }
    return out;
}

// RoPE frequencies of base 10000.
std::vector<float> freqs_of(int n_rot) {
    std::vector<float> freqs;
    for (int i = 0; i < n_rot / 2; i++) freqs.push_back(std::pow(10000.0F, -2.0F * i / n_rot));
    return freqs;
}

// RoPE of a token's heads and a Hadamard rotation behind it, in place too.
void turned_heads() {
    struct Shape {
        int head_dim, n_rot, n_heads;
        int hadamard = 0;
    };
    constexpr int pos = 70001;
    constexpr float mscale = 1.25F;
    for (const Shape& of :
         {Shape{128, 128, 32}, Shape{128, 64, 8}, Shape{64, 64, 3}, Shape{80, 20, 7}, Shape{96, 38, 6},
          Shape{256, 256, 2}, Shape{512, 256, 1}, Shape{128, 128, 9, 128}, Shape{128, 64, 2, 64}, Shape{96, 38, 6, 32},
          Shape{80, 20, 7, 16}, Shape{256, 256, 3, 256}, Shape{512, 256, 1, 512}, Shape{64, 64, 3, 64}}) {
        for (const bool neox : {false, true}) {
            std::mt19937 random(5);
            std::normal_distribution<float> normal;
            std::vector<float> x(static_cast<size_t>(of.head_dim * of.n_heads));
            for (float& v : x) v = normal(random);
            const std::vector<float> freqs = freqs_of(of.n_rot);
            const DeviceBuffer phases(cuda::pack_phases(freqs.data(), of.n_rot / 2));
            const DeviceBuffer device_pos(std::vector<int32_t>{pos});
            std::vector<double> want = turned(x, freqs, of.head_dim, neox, pos, mscale);
            if (of.hadamard != 0) want = times_hadamard(want, of.hadamard);
            for (const bool in_place : {false, true}) {
                const DeviceBuffer from(x);
                const DeviceBuffer to(x.size() * sizeof(float));
                cuda_check(cudaMemset(to.as<void>(), 0xff, to.bytes()), "a memset");
                const DeviceBuffer& result = in_place ? from : to;
                const cuda::TurnArgs args{
                    {phases.as<uint64_t>(), device_pos.as<int32_t>(), of.head_dim, of.n_rot, neox ? 1 : 0, mscale},
                    from.as<float>(),
                    result.as<float>(),
                    of.n_heads,
                    of.hadamard};
                cuda_check(cuda::turn_heads(args, nullptr), "turn_heads");
                cuda_check(cudaDeviceSynchronize(), "turning heads");
                const double error = relative_error(result.download<float>(), want);
                CHECK_MSG(error < 1e-5, std::to_string(of.n_heads) + " heads of " + std::to_string(of.head_dim) +
                                            " dimensions, " + std::to_string(of.n_rot) + " turned" +
                                            (of.hadamard != 0 ? ", times a Hadamard matrix" : "") +
                                            (neox ? ", by halves: " : ": ") + std::to_string(error));
            }
        }
    }
}

// y = W x for many small matrices, in double; heads of x may be turned first.
void products() {
    struct Shape {
        int n_in, n_out, n_matrices, n_columns;
        int head_dim = 0, n_rot = 0;  // n_rot > 0: turned
        bool neox = true;
    };
    for (const Shape& of : {Shape{128, 512, 8, 4},
                            Shape{1024, 512, 1, 1},
                            Shape{64, 48, 8, 1},
                            Shape{96, 33, 2, 3},
                            Shape{80, 16, 5, 8},
                            Shape{4096, 1000, 1, 2},
                            Shape{128, 2048, 32, 1},
                            Shape{128, 512, 8, 4, 128, 128},
                            Shape{1024, 512, 1, 1, 128, 128},
                            Shape{128, 512, 8, 4, 128, 128, false},
                            Shape{96, 33, 2, 3, 96, 38},
                            Shape{96, 33, 2, 3, 96, 38, false},
                            Shape{160, 24, 3, 2, 80, 20},
                            Shape{512, 64, 2, 1, 256, 256},
                            Shape{3072, 64, 1, 4},
                            Shape{1536, 64, 1, 8},
                            Shape{64, 1024, 8, 8},
                            Shape{64, 1024, 8, 4},
                            Shape{128, 512, 8, 8},
                            Shape{256, 2048, 2, 2},
                            Shape{256, 2048, 2, 8},
                            Shape{4096, 512, 1, 1}}) {
        const int n_vectors = of.n_matrices * of.n_columns;
        std::mt19937 random(7);
        std::normal_distribution<float> normal;
        std::vector<uint16_t> w(static_cast<size_t>(of.n_matrices) * static_cast<size_t>(of.n_out * of.n_in));
        std::vector<float> x(static_cast<size_t>(n_vectors * of.n_in));
        for (uint16_t& v : w) v = half_from_float(normal(random));
        for (float& v : x) v = normal(random);
        const DeviceBuffer device_w(w);
        const DeviceBuffer device_x(x);
        const DeviceBuffer y(static_cast<size_t>(n_vectors * of.n_out) * sizeof(float));
        cuda_check(cudaMemset(y.as<void>(), 0xff, y.bytes()), "a memset");
        cuda::ProductArgs args{};
        args.w = device_w.as<uint16_t>();
        args.x = device_x.as<float>();
        args.y = y.as<float>();
        args.w_row = of.n_in;
        args.w_matrix = int64_t{of.n_in} * of.n_out;
        args.n_in = of.n_in;
        args.n_out = of.n_out;
        args.n_matrices = of.n_matrices;
        args.n_columns = of.n_columns;
        constexpr int pos = 70001;
        constexpr float mscale = 1.25F;
        const std::vector<float> freqs = freqs_of(of.n_rot);
        const DeviceBuffer phases(cuda::pack_phases(freqs.data(), of.n_rot / 2));
        const DeviceBuffer device_pos(std::vector<int32_t>{pos});
        std::vector<double> vectors(x.begin(), x.end());
        if (of.n_rot > 0) {
            args.turn = {
                phases.as<uint64_t>(), device_pos.as<int32_t>(), of.head_dim, of.n_rot, of.neox ? 1 : 0, mscale};
            vectors = turned(x, freqs, of.head_dim, of.neox, pos, mscale);
        }
        cuda_check(cuda::multiply(args, nullptr), "multiply");
        cuda_check(cudaDeviceSynchronize(), "products");
        std::vector<double> want;
        for (int i = 0; i < n_vectors; i++) {
            const uint16_t* const matrix = w.data() + args.w_matrix * (i / of.n_columns);
            for (int r = 0; r < of.n_out; r++) {
                double sum = 0;
                for (int d = 0; d < of.n_in; d++) {
                    sum +=
                        double{half_to_float(matrix[r * of.n_in + d])} * vectors[static_cast<size_t>(i * of.n_in + d)];
                }
                want.push_back(sum);
            }
        }
        const double error = relative_error(y.download<float>(), want);
        CHECK_MSG(error < 1e-5, "products of " + std::to_string(of.n_in) + " channels" +
                                    (of.n_rot > 0 ? ", turned: " : ": ") + std::to_string(error));
    }
}

// Heads of several tokens times their groups' matrices: rows and vectors that fill no thread block, channels of several turns.
void products_of_heads() {
    struct Shape {
        int n_in, n_out, n_matrices, heads_of_matrix, n_tokens;
    };
    for (const Shape& of : {Shape{128, 192, 2, 6, 9}, Shape{64, 40, 4, 1, 2}, Shape{96, 65, 3, 2, 3},
                            Shape{32, 16, 1, 5, 64}, Shape{512, 70, 2, 1, 7}, Shape{288, 33, 2, 3, 5}}) {
        std::mt19937 random(8);
        std::normal_distribution<float> normal;
        const int n_heads = of.n_matrices * of.heads_of_matrix;
        std::vector<uint16_t> w(static_cast<size_t>(of.n_matrices) * static_cast<size_t>(of.n_out * of.n_in));
        std::vector<float> x(static_cast<size_t>(of.n_tokens * n_heads) * static_cast<size_t>(of.n_in));
        for (uint16_t& v : w) v = half_from_float(normal(random));
        for (float& v : x) v = normal(random);
        const DeviceBuffer device_w(w);
        const DeviceBuffer device_x(x);
        const DeviceBuffer y(static_cast<size_t>(of.n_tokens * n_heads) * static_cast<size_t>(of.n_out) *
                             sizeof(float));
        cuda_check(cudaMemset(y.as<void>(), 0xff, y.bytes()), "a memset");
        cuda_check(cuda::multiply_heads(
                       {device_w.as<uint16_t>(), device_x.as<float>(), y.as<float>(), of.n_in,
                        int64_t{of.n_in} * of.n_out, of.n_in, of.n_out, of.n_matrices, of.heads_of_matrix, of.n_tokens},
                       nullptr),
                   "multiply_heads");
        cuda_check(cudaDeviceSynchronize(), "products of heads");
        std::vector<double> want;
        for (int i = 0; i < of.n_tokens * n_heads; i++) {
            const uint16_t* const matrix =
                w.data() + static_cast<ptrdiff_t>(of.n_in) * of.n_out * (i % n_heads / of.heads_of_matrix);
            for (int r = 0; r < of.n_out; r++) {
                double sum = 0;
                for (int d = 0; d < of.n_in; d++) {
                    sum += double{half_to_float(matrix[r * of.n_in + d])} *
                           double{x[static_cast<size_t>(i) * static_cast<size_t>(of.n_in) + static_cast<size_t>(d)]};
                }
                want.push_back(sum);
            }
        }
        const double error = relative_error(y.download<float>(), want);
        CHECK_MSG(error < 1e-5, "heads of " + std::to_string(of.n_in) + " channels: " + std::to_string(error));
    }
}

#if CUDART_VERSION >= 12030
// Which of a recording's products, by their results, depends on which, and how.
std::map<std::pair<int, int>, cudaGraphEdgeData> dependencies(cudaGraph_t graph, const std::vector<DeviceBuffer>& y) {
    cuda::Edges edges;
    cuda_check(cuda::edges_of(graph, edges), "dependencies");
    const auto product_of = [&](cudaGraphNode_t node) {
        cudaKernelNodeParams kernel{};
        cuda_check(cudaGraphKernelNodeGetParams(node, &kernel), "a kernel's arguments");
        const float* const to_y = static_cast<const cuda::ProductArgs*>(kernel.kernelParams[0])->y;
        const auto found =
            std::find_if(y.begin(), y.end(), [&](const auto& of) { return of.template as<float>() == to_y; });
        return static_cast<int>(found - y.begin());
    };
    std::map<std::pair<int, int>, cudaGraphEdgeData> of;
    for (size_t i = 0; i < edges.from.size(); i++) {
        of[{product_of(edges.from[i]), product_of(edges.to[i])}] = edges.data[i];
    }
    return of;
}
#endif

// Products on two streams, recorded: what depends on what is the same with and without what start_early leaves out.
//
//   0 -> 1 -> 2 on one stream, 0 -> 3 -> 4 on the other; 5 takes 4's result, waits for both and, needlessly, for 1
void recorded_steps() {
    constexpr int n = 256;
    constexpr int n_products = 6;
    constexpr int input_of[n_products] = {-1, 0, 1, 0, 3, 4};
    std::mt19937 random(11);
    std::normal_distribution<float> normal(0.0F, 1.0F / 16);
    std::vector<uint16_t> w(size_t{n} * n);
    std::vector<float> x(n);
    for (uint16_t& v : w) v = half_from_float(normal(random));
    for (float& v : x) v = 16 * normal(random);
    const DeviceBuffer device_w(w);
    const DeviceBuffer device_x(x);
    std::vector<DeviceBuffer> y;
    for (int i = 0; i < n_products; i++) y.emplace_back(n * sizeof(float));
    const auto product = [&](int i, cudaStream_t stream) {
        cuda::ProductArgs args{};
        args.w = device_w.as<uint16_t>();
        args.x = input_of[i] < 0 ? device_x.as<float>() : y[static_cast<size_t>(input_of[i])].as<float>();
        args.y = y[static_cast<size_t>(i)].as<float>();
        args.w_row = args.n_in = args.n_out = n;
        args.n_matrices = args.n_columns = 1;
        cuda_check(cuda::multiply(args, stream), "multiply");
    };
    for (int i = 0; i < n_products; i++) product(i, nullptr);
    cuda_check(cudaDeviceSynchronize(), "products in order");
    std::vector<std::vector<float>> want;
    for (const DeviceBuffer& of : y) {
        want.push_back(of.download<float>());
        cuda_check(cudaMemset(of.as<void>(), 0xff, of.bytes()), "a memset");
    }
    cuda_check(cudaDeviceSynchronize(), "memsets");

    cudaStream_t streams[2];
    cudaEvent_t events[3];
    int lowest = 0;
    int highest = 0;
    cuda_check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "priorities");
    cuda_check(cudaStreamCreateWithPriority(&streams[0], cudaStreamNonBlocking, highest), "a stream");
    cuda_check(cudaStreamCreateWithPriority(&streams[1], cudaStreamNonBlocking, lowest), "a stream");
    for (cudaEvent_t& event : events) cuda_check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "an event");
    const auto wait = [&](int from, int to, cudaEvent_t event) {
        cuda_check(cudaEventRecord(event, streams[from]), "an event");
        cuda_check(cudaStreamWaitEvent(streams[to], event, 0), "a wait");
    };
    cuda_check(cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeRelaxed), "recording");
    product(0, streams[0]);
    wait(0, 1, events[0]);
    product(1, streams[0]);
    cuda_check(cudaEventRecord(events[1], streams[0]), "an event");
    product(2, streams[0]);
    product(3, streams[1]);
    product(4, streams[1]);
    wait(1, 0, events[2]);
    cuda_check(cudaStreamWaitEvent(streams[0], events[1], 0), "a needless wait");
    product(5, streams[0]);
    cudaGraph_t graph = nullptr;
    cuda_check(cudaStreamEndCapture(streams[0], &graph), "a recording");
    cuda_check(cuda::start_early(graph), "start_early");
    cudaGraphExec_t step = nullptr;
    cuda_check(cudaGraphInstantiate(&step, graph, cudaGraphInstantiateFlagUseNodePriority), "an instance");
    for (int again = 0; again < 3; again++) {
        for (const DeviceBuffer& of : y) cuda_check(cudaMemset(of.as<void>(), 0xff, of.bytes()), "a memset");
        cuda_check(cudaDeviceSynchronize(), "memsets");
        cuda_check(cudaGraphLaunch(step, streams[0]), "a step");
        cuda_check(cudaStreamSynchronize(streams[0]), "a step");
        for (size_t i = 0; i < y.size(); i++) {
            CHECK_MSG(y[i].download<float>() == want[i], "recorded product " + std::to_string(i) + " differs");
        }
    }
#if CUDART_VERSION >= 12030
    const std::set<std::pair<int, int>> expected = {{0, 1}, {1, 2}, {0, 3}, {3, 4}, {2, 5}, {4, 5}};
    std::set<std::pair<int, int>> left;
    for (const auto& [products, edge] : dependencies(graph, y)) {
        left.insert(products);
        if (!cuda::device_chains()) continue;
        CHECK(edge.type == cudaGraphDependencyTypeProgrammatic);
        // the last product, of a higher priority than the other stream's, waits for what that lets start
        CHECK(edge.from_port == (products == std::pair(4, 5) ? cudaGraphKernelNodePortProgrammatic
                                                             : cudaGraphKernelNodePortLaunchCompletion));
    }
    CHECK(left == expected);
#endif
    cudaGraphExecDestroy(step);
    cudaGraphDestroy(graph);
    for (cudaEvent_t event : events) cudaEventDestroy(event);
    for (cudaStream_t stream : streams) cudaStreamDestroy(stream);
}

}  // namespace

Cases step_cases() {
    return {{"turned_heads", turned_heads},
            {"products", products},
            {"products_of_heads", products_of_heads},
            {"recorded_steps", recorded_steps}};
}

}  // namespace lkv::test
