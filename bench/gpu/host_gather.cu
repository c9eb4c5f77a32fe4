// How fast a GPU gathers chosen rows out of the host's pinned memory: one decoded token of a cache whose middle lies there.
//
//     nvcc -O3 -std=c++17 -arch=native bench/gpu/host_gather.cu -o host_gather && ./host_gather > host_gather.json
//
// Every layer has n rows of `row` bytes; a launch per layer reads a seeded share of them, in ascending order, singly or in runs, into
// the GPU's memory, warps taking rows in 16-byte words straight over PCIe. Beside it: the same rows gathered out of the GPU's own
// memory, and a layer's rows copied whole by the copy engine. Contents are checked before anything is timed. Prints JSON.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

namespace {

void check(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return;
    fprintf(stderr, "error: [host_gather] expected %s; got %s\n", what, cudaGetErrorString(error));
    exit(2);
}

// Word w of row i.
__host__ __device__ uint32_t word(int64_t i, int w) {
    return static_cast<uint32_t>(i) * 2654435761u ^ static_cast<uint32_t>(w) * 40503u;
}

__global__ void fill(uint4* rows, int64_t n, int words) {
    for (int64_t at = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; at < n * words;
         at += int64_t{gridDim.x} * blockDim.x) {
        const int64_t i = at / words;
        const int w = static_cast<int>(at % words) * 4;
        rows[at] = {word(i, w), word(i, w + 1), word(i, w + 2), word(i, w + 3)};
    }
}

__global__ void gather(const uint4* rows, const int32_t* chosen, int n_chosen, int words, uint4* out) {
    const int64_t total = int64_t{n_chosen} * words;
    for (int64_t at = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; at < total;
         at += int64_t{gridDim.x} * blockDim.x) {
        const int64_t i = at / words;
        out[at] = rows[int64_t{chosen[i]} * words + at % words];
    }
}

struct Case {
    int64_t tokens;
    int row;  // bytes
    double share;
    int unit;  // rows that lie side by side
};

std::vector<int32_t> choose(const Case& c, unsigned seed) {
    const int64_t units = c.tokens / c.unit;
    const auto n = std::max<int64_t>(1, static_cast<int64_t>(c.share * static_cast<double>(units)));
    std::mt19937 random(seed);
    std::vector<int32_t> all(static_cast<size_t>(units));
    for (size_t i = 0; i < all.size(); i++) all[i] = static_cast<int32_t>(i);
    for (int64_t i = 0; i < n; i++) {
        std::swap(all[static_cast<size_t>(i)],
                  all[static_cast<size_t>(i + random() % static_cast<uint64_t>(units - i))]);
    }
    std::sort(all.begin(), all.begin() + n);
    std::vector<int32_t> rows;
    for (int64_t i = 0; i < n; i++) {
        for (int u = 0; u < c.unit; u++) rows.push_back(all[static_cast<size_t>(i)] * c.unit + u);
    }
    return rows;
}

constexpr int layers = 32;
constexpr int block = 256;

class Bench {
public:
    explicit Bench(size_t bytes) {
        check(cudaHostAlloc(&host_, bytes, cudaHostAllocMapped), "pinned memory");
        check(cudaMalloc(&device_, bytes), "as much memory on the GPU");
        check(cudaMalloc(&out_, bytes / layers), "memory on the GPU for a layer's rows");
        check(cudaEventCreate(&begin_), "an event");
        check(cudaEventCreate(&end_), "an event");
        check(cudaStreamCreate(&stream_), "a stream");
        check(cudaDeviceGetAttribute(&processors_, cudaDevAttrMultiProcessorCount, 0), "a GPU");
    }

    void run(const Case& c, bool last) {
        const int words = c.row / 16;
        const int64_t layer = c.tokens * words;
        fill<<<processors_ * 8, block, 0, stream_>>>(device_, c.tokens * layers, words);
        check(
            cudaMemcpyAsync(host_, device_, static_cast<size_t>(layer) * layers * 16, cudaMemcpyDeviceToHost, stream_),
            "a copy");
        std::vector<int32_t> all;
        int n = 0;
        for (int l = 0; l < layers; l++) {
            const std::vector<int32_t> rows = choose(c, 1 + static_cast<unsigned>(l));
            n = static_cast<int>(rows.size());
            all.insert(all.end(), rows.begin(), rows.end());
        }
        int32_t* chosen = nullptr;
        check(cudaMalloc(&chosen, all.size() * sizeof(int32_t)), "memory for indices");
        check(cudaMemcpyAsync(chosen, all.data(), all.size() * sizeof(int32_t), cudaMemcpyHostToDevice, stream_),
              "a copy");
        const auto from = [&](const uint4* rows, int blocks) {
            return timed([&](int l) {
                gather<<<blocks, block, 0, stream_>>>(rows + l * layer, chosen + int64_t{l} * n, n, words, out_);
            });
        };
        from(host_, processors_ * 8);
        verify(all, n, words, c.tokens);
        double host = 1e30;
        for (const int per : {1, 2, 4, 8, 16}) host = std::min(host, from(host_, processors_ * per));
        const double device = from(device_, processors_ * 8);
        const double copy = timed(
            [&](int l) {
                check(cudaMemcpyAsync(out_, host_ + l * layer, static_cast<size_t>(layer) * 16, cudaMemcpyHostToDevice,
                                      stream_),
                      "a copy");
            },
            2);
        check(cudaFree(chosen), "to free indices");
        const double bytes = double(n) * c.row * layers;
        printf(
            "  {\"tokens\": %lld, \"row\": %d, \"share\": %g, \"unit\": %d, \"bytes\": %.0f, \"host_ms\": %.4f, "
            "\"host_gbs\": %.2f, "
            "\"device_ms\": %.4f, \"whole_copy_ms\": %.4f, \"whole_gbs\": %.2f}%s\n",
            static_cast<long long>(c.tokens), c.row, c.share, c.unit, bytes, host, bytes / host / 1e6, device, copy,
            double(layer) * 16 * layers / copy / 1e6, last ? "" : ",");
        fflush(stdout);
    }

private:
    // Milliseconds of all layers, the median of some runs.
    template <class PerLayer>
    double timed(PerLayer per_layer, int runs = 7) {
        std::vector<float> times;
        for (int r = 0; r < runs; r++) {
            check(cudaEventRecord(begin_, stream_), "to record");
            for (int l = 0; l < layers; l++) per_layer(l);
            check(cudaEventRecord(end_, stream_), "to record");
            check(cudaEventSynchronize(end_), "the kernels to end");
            float ms = 0;
            check(cudaEventElapsedTime(&ms, begin_, end_), "a time");
            times.push_back(ms);
        }
        std::sort(times.begin(), times.end());
        return times[times.size() / 2];
    }

    // What the last layer's launch left.
    void verify(const std::vector<int32_t>& all, int n, int words, int64_t tokens) {
        std::vector<uint4> got(static_cast<size_t>(n) * words);
        check(cudaMemcpy(got.data(), out_, got.size() * 16, cudaMemcpyDeviceToHost), "a copy");
        for (int i = 0; i < n; i++) {
            const int64_t row = (layers - 1) * tokens + all[static_cast<size_t>(layers - 1) * n + i];
            for (int w = 0; w < words; w++) {
                const uint4 x = got[static_cast<size_t>(i) * words + w];
                if (x.x != word(row, 4 * w) || x.w != word(row, 4 * w + 3)) {
                    fprintf(stderr, "error: [host_gather] expected row %lld as it was written; got another\n",
                            static_cast<long long>(row));
                    exit(1);
                }
            }
        }
    }

    uint4* host_ = nullptr;
    uint4* device_ = nullptr;
    uint4* out_ = nullptr;
    cudaEvent_t begin_{}, end_{};
    cudaStream_t stream_{};
    int processors_ = 0;
};

}  // namespace

int main() {
    cudaDeviceProp gpu{};
    check(cudaGetDeviceProperties(&gpu, 0), "a GPU");
    std::vector<Case> cases;
    // 496: what the default 8B row (568 bytes) has beside the first segment of K, 512 with room; 368: beside the first two
    for (const double share : {0.01, 0.02, 0.05, 0.1, 0.2}) cases.push_back({131072, 496, share, 1});
    for (const int row : {64, 128, 256, 368, 512}) cases.push_back({131072, row, 0.05, 1});
    for (const int row : {368, 496, 512}) cases.push_back({131072, row, 0.05, 16});
    for (const int unit : {1, 16}) cases.push_back({524288, 496, 0.05, unit});
    Bench bench(size_t{524288} * 512 * layers);
    printf("{\"gpu\": \"%s\", \"layers\": %d, \"cases\": [\n", gpu.name, layers);
    for (size_t i = 0; i < cases.size(); i++) bench.run(cases[i], i + 1 == cases.size());
    printf("]}\n");
}
