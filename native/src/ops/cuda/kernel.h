// What an attention kernel is to everybody else. A kernel is a folder in kernels/ and a line in kernels.cpp.
#pragma once

#include <cuda_runtime_api.h>

#include <cstring>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "ops/cuda/gpu/device.h"
#include "ops/cuda/softmax/cut.h"
#include "ops/latent_attn.h"

namespace lkv::cuda {

struct Kernel;

// A problem and how a kernel cuts the work. The kernel's own plan is known to its folder alone.
struct Plan : CutProblem {
    const Kernel* kernel = nullptr;
    const uint32_t* packed = nullptr;  // what the kernel made of K's factor (Kernel::pack_keys), on the device
    int32_t items = 0;                 // work items that are launched
    int32_t chunk =
        0;  // slots that are taken at once, a multiple of chunk_step; launches then depend on `context`. 0: all
    int32_t context = 0;  // slots of the tiles in use, at least; set before a launch

    template <class Own>
    Own as() const {
        static_assert(std::is_trivially_copyable_v<Own> && sizeof(Own) <= sizeof own_);
        Own own;
        std::memcpy(&own, own_, sizeof own);
        return own;
    }
    template <class Own>
    void keep(const Own& own) {
        static_assert(std::is_trivially_copyable_v<Own> && sizeof(Own) <= sizeof own_);
        std::memcpy(own_, &own, sizeof own);
    }

private:
    unsigned char own_[128] = {};
};
constexpr int chunk_step = 128;

// What a plan is made for.
struct Request {
    const LatentAttnParams& params;  // shapes and row layouts; no row is read
    int capacity;                    // slots of all regions
    const Device& device;
    int beside = 0;        // multiprocessors that another problem's kernel takes at the same time
    bool windows = false;  // full rows that leave parts once there are latents beside them
};

// B of K on the host, and which dimensions are turned.
struct KeyFactor {
    const float* k_b;  // [n_kv, rank, head_dim]
    int n_kv, rank, head_dim;
    int k_blocks;
    int n_rot;
    bool neox;
};

struct Kernel {
    const char* name;
    // Null: `plan`, which comes with the problem, is the kernel's. Else the reason against it, and `plan` is spoilt. Errors:
    // std::invalid_argument where no kernel can take the shape.
    const char* (*takes)(const Request& request, Plan& plan);
    // Leaves results or parts, as the plan says.
    cudaError_t (*launch)(const Plan& plan, cudaStream_t stream);
    bool takes_caps = false;    // scores with a soft cap
    bool takes_blocks = false;  // K in blocks of tokens
    bool rotates = false;       // results of a single part by Problem::v_hadamard
    int widest_head = 256;      // head_dim, at most

    // The rest is null for most kernels.

    // In place of softmax/'s merging: what a launch left, with the parts of `full` rows beside it unless that is null. Such a launch need not
    // wait for those parts.
    cudaError_t (*finish)(const Plan& plan, const CutProblem* full, cudaStream_t stream) = nullptr;
    // Floats of Cut::partial, where these are not parts_floats.
    size_t (*sums_floats)(const Plan& plan) = nullptr;
    // Attention in a few thread blocks, see warm_up() in attend.h.
    std::optional<Plan> (*warm_up)(const Plan& plan) = nullptr;
    // K's factor in the order that the kernel reads.
    std::vector<uint32_t> (*pack_keys)(const KeyFactor& factor) = nullptr;
};

// The kernels in the order in which they are asked.
const std::vector<const Kernel*>& all_kernels();

// Query rows of a work item.
inline int rows_of(const CutProblem& p) { return p.n_tokens * p.unit * (p.n_head / p.n_kv); }
// Work items of one group of K and V.
int items_of_group(const Plan& plan);
// The plan for few items and parts.
Plan warm_up_plan(const Plan& plan, int items, int parts);

}  // namespace lkv::cuda
