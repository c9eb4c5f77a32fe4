// A case of attn_case.h on the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "attn/attn_case.h"
#include "ops/cuda/attend.h"
#include "ops/cuda/pack.h"
#include "ops/cuda/rows/rows.h"
#include "ops/cuda/rows/tables.h"

namespace lkv::test {

inline void cuda_check(cudaError_t error, const char* what) {
    if (error != cudaSuccess) {
        throw std::runtime_error(std::string("[cuda] expected ") + what + " to work; got " + cudaGetErrorString(error));
    }
}

class DeviceBuffer {
public:
    DeviceBuffer() = default;
    explicit DeviceBuffer(size_t bytes) : bytes_(bytes) {
        cuda_check(cudaMalloc(&data_, bytes == 0 ? 16 : bytes), "cudaMalloc");
    }
    template <class T>
    explicit DeviceBuffer(const std::vector<T>& host) : DeviceBuffer(host.size() * sizeof(T)) {
        upload(host.data(), bytes_);
    }
    DeviceBuffer(DeviceBuffer&& other) noexcept : data_(other.data_), bytes_(other.bytes_) { other.data_ = nullptr; }
    DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~DeviceBuffer() { cudaFree(data_); }

    void upload(const void* host, size_t bytes) {
        cuda_check(cudaMemcpy(data_, host, bytes, cudaMemcpyHostToDevice), "an upload");
    }
    template <class T>
    std::vector<T> download() const {
        std::vector<T> host(bytes_ / sizeof(T));
        cuda_check(cudaMemcpy(host.data(), data_, host.size() * sizeof(T), cudaMemcpyDeviceToHost), "a download");
        return host;
    }
    template <class T>
    T* as() const {
        return static_cast<T*>(data_);
    }
    size_t bytes() const { return bytes_; }

private:
    void* data_ = nullptr;
    size_t bytes_ = 0;
};

inline cuda::Device device_limits() {
    cuda::Device of{};
    cuda_check(cuda::describe_device(of), "a device");
    return of;
}

// Everything of a case but its plan; memory lives as long as this.
class DeviceCase {
public:
    cuda::Plan args;
    bool keeps_parts = false;  // memory for maxima and sums even where results are all

    // apart: tokens may read the slots of their own sequences alone. beside: multiprocessors that another kernel takes
    explicit DeviceCase(const LatentAttnParams& p, const cuda::Device& device = device_limits(), bool apart = false,
                        int beside = 0) {
        cuda::FindStepsArgs find{};
        int capacity = 0;
        for (int r = 0; r < p.n_regions; r++) {
            capacity += p.regions[r].n_slots;
            find.capacity += (p.regions[r].n_slots + step_slots - 1) / step_slots;
        }
        cuda::Problem problem{};
        if (apart) {
            const auto n = static_cast<size_t>(p.n_tokens);
            find.begins = keep(std::vector<int32_t>(n, -1));
            find.ends = keep(std::vector<int32_t>(n, -1));
            find.steps = keep(std::vector<int32_t>(n * static_cast<size_t>(find.capacity), -1));
            problem.own = {nullptr, find.ends, find.steps, find.capacity};
        }
        args = cuda::plan_attention({p, capacity, device, beside}, problem);
        args.q = keep(p.q, static_cast<size_t>(p.n_tokens) * static_cast<size_t>(p.n_head * p.q_width));
        args.q_pos = keep(p.q_pos, static_cast<size_t>(p.n_tokens));
        args.q_seq = keep(p.q_seq, static_cast<size_t>(p.n_tokens));
        args.alibi_slopes = keep(p.alibi_slopes, static_cast<size_t>(p.n_head));
        if (p.k_b != nullptr) {
            args.k_b = keep(
                cuda::pack_rows(p.k_b, static_cast<size_t>(p.n_kv) * static_cast<size_t>(p.k_rank_max * p.head_dim)));
            args.k_bias = keep(p.k_bias, static_cast<size_t>(p.n_kv * p.head_dim));
            args.k_norm = keep(p.k_norm, static_cast<size_t>(p.head_dim));
            std::vector<uint64_t> phases;
            if (p.rope_freqs != nullptr) phases = cuda::pack_phases(p.rope_freqs, p.n_rot / 2);
            if (!phases.empty()) args.phases = keep(phases);
            if (args.kernel->pack_keys != nullptr) {
                args.packed = keep(args.kernel->pack_keys(
                    {p.k_b, p.n_kv, p.k_rank_max, p.head_dim, args.k_blocks, args.n_rot, p.rope_neox}));
            }
        }
        if (p.v_b != nullptr) {
            const auto n = static_cast<size_t>(p.n_kv) * static_cast<size_t>(p.v_rank_max * p.head_dim);
            args.v_b = keep(cuda::pack_rows(p.v_b, n));
        }
        std::vector<int32_t> n_slots;
        for (int r = 0; r < p.n_regions; r++) {
            const RegionView& from = p.regions[r];
            const auto n = static_cast<size_t>(from.n_slots);
            cuda::RegionArgs& to = args.regions[r];
            to.k_block = in_token_blocks(from.k) ? token_block_slots : 1;
            to.k_rows = keep_rows(from.k_rows, n, from.k_page);
            to.v_rows = keep_rows(from.v_rows, n, from.v_page);
            to.k_page = from.k_page;
            to.v_page = from.v_page;
            to.pos = keep(from.pos, n);
            to.seq = keep(from.seq, n);
            to.k_row_bytes = static_cast<uint32_t>(from.k.row_bytes);
            to.v_row_bytes = static_cast<uint32_t>(from.v.row_bytes);
            const cuda::RegionTables tables = cuda::region_tables(from.k, from.v, args.k_blocks, args.v_blocks);
            to.k_groups = keep(tables.k_groups);
            to.v_groups = keep(tables.v_groups);
            to.chunks = keep(tables.chunks);
            n_slots.push_back(from.n_slots);
        }
        args.n_slots = keep(n_slots);
        if (apart) {
            find.q_seq = args.q_seq;
            for (int r = 0; r < p.n_regions; r++) find.seq[r] = args.regions[r].seq;
            find.n_slots = args.n_slots;
            find.n_regions = p.n_regions;
            cuda_check(cuda::find_own_steps(find, p.n_tokens, nullptr), "finding own steps");
        }
        args.whole = cuda::whole_region(p.n_kv, p.head_dim, [this](const auto& host) { return keep(host); });
        args.context = capacity + 64 * p.n_regions;
        out_ =
            DeviceBuffer(static_cast<size_t>(p.n_tokens) * static_cast<size_t>(p.n_head * p.head_dim) * sizeof(float));
        args.out = out_.as<float>();
    }

    // Poisoned first: what the kernels do not write stays NaN.
    std::vector<float> run() {
        prepare();
        cuda_check(cuda::attend(args, nullptr), "attend");
        cuda_check(cudaDeviceSynchronize(), "attention");
        return out_.download<float>();
    }

    // With full rows beside these latents.
    std::vector<float> run_beside(DeviceCase& full) {
        full.args.leaves = cuda::Leaves::parts;
        full.prepare();
        prepare();
        full.args.sharing = args.sharing = cuda::shared_out(full.args, args, device_limits());
        cuda_check(cuda::attend(full.args, nullptr), "full rows");
        cuda_check(cuda::begin_beside(args, nullptr), "the latents beside them");
        cuda_check(cuda::end_beside(args, full.args, nullptr), "both");
        cuda_check(cudaDeviceSynchronize(), "attention");
        return out_.download<float>();
    }

    void prepare() {
        const bool parts = args.n_split > 1 || args.v_b != nullptr || args.chunk != 0 ||
                           args.leaves != cuda::Leaves::results || keeps_parts;
        if (parts) {
            partial_ = DeviceBuffer(cuda::partial_floats(args) * sizeof(float));
            partial_ml_ = DeviceBuffer(cuda::partial_ml_floats(args) * sizeof(float));
            cuda_check(cudaMemset(partial_.as<void>(), 0xff, partial_.bytes()), "a memset");
            cuda_check(cudaMemset(partial_ml_.as<void>(), 0xff, partial_ml_.bytes()), "a memset");
        }
        args.done = keep(std::vector<uint32_t>(static_cast<size_t>(cuda::merge_counters(args.n_head, args.n_kv)), 0));
        args.partial = parts ? partial_.as<float>() : nullptr;
        args.partial_ml = parts ? partial_ml_.as<float>() : nullptr;
        cuda_check(cudaMemset(out_.as<void>(), 0xff, out_.bytes()), "a memset");
    }

    template <class T>
    T* keep(const std::vector<T>& host) {
        kept_.emplace_back(host);
        return kept_.back().template as<T>();
    }
    template <class T>
    const T* keep(const T* host, size_t n) {
        return host == nullptr ? nullptr : keep(std::vector<T>(host, host + n));
    }

private:
    // storage is a multiple of 16 bytes
    // Whole pages. host: slot 0
    const uint8_t* keep_rows(const uint8_t* host, size_t n_slots, int64_t page) {
        const auto n_pages = static_cast<int64_t>((n_slots + page_slots - 1) / page_slots);
        const int64_t before = page < 0 && n_pages > 0 ? (n_pages - 1) * -page : 0;
        const std::vector<uint8_t> rows(host - before, host - before + n_pages * std::abs(page));
        return keep(rows) + before;
    }

    std::vector<DeviceBuffer> kept_;
    DeviceBuffer out_;
    DeviceBuffer partial_;
    DeviceBuffer partial_ml_;
};

}  // namespace lkv::test
