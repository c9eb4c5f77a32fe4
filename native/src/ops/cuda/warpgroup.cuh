// Products by four warps at once (wgmma, compute capability 9.0's own code, sm_90a): each warp keeps 16 rows of operand a in
// registers, and operand b is read from shared memory once for all 64 rows instead of once for 16, which is what mma.sync waits
// for where b is large.
#pragma once

#include <cstdint>

namespace lkv::cuda {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool has_warpgroup_products = true;
#else
constexpr bool has_warpgroup_products = false;
#endif

// Where operand b lies: 8 x 8 matrices of 128 bytes, row after row of 8 channels; the two of 16 channels beside each other, then
// the next 8 columns of the product. `at`, the same in all lanes, counts in units of 16 bytes.
class OperandB {
public:
    __device__ explicit OperandB(const void* at)
        // from one lane, so that the compiler keeps it in a uniform register
        : low_(__shfl_sync(0xffffffffu, (static_cast<uint32_t>(__cvta_generic_to_shared(at)) & 0x3ffffu) >> 4, 0) |
               next_channels >> 4 << 16) {}
    __device__ uint64_t at(int units) const {
        return uint64_t{low_ + static_cast<uint32_t>(units)} | uint64_t{next_columns >> 4} << 32;
    }

private:
    static constexpr uint32_t next_channels = 128;  // bytes
    static constexpr uint32_t next_columns = 256;
    uint32_t low_;
};

// Before products that read registers written since the last ones.
__device__ inline void warpgroup_begin() {
    if constexpr (has_warpgroup_products) asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// Until all products of this warp are there.
__device__ inline void warpgroup_finish() {
    if constexpr (has_warpgroup_products) {
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    }
}

// d[64 x 64] (+)= a[64 x 16] · b[16 x 64], f16 in, f32 out. A warp has 16 rows; a as mma's; d[4n + e]: columns 8n … 8n + 7 as
// mma's c[e]. add: false writes d.
__device__ inline void warpgroup_mma(float (&d)[32], const uint32_t (&a)[4], uint64_t b, bool add) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile(
        "{\n"
        ".reg .pred add;\n"
        "setp.ne.b32 add, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, add, 1, 1, 0;\n"
        "}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
          "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
          "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
#endif
}

// A barrier of one warpgroup, `warp` / 4.
__device__ inline void warpgroup_sync(int warp) { asm volatile("bar.sync %0, 128;" ::"r"(1 + warp / 4) : "memory"); }

}  // namespace lkv::cuda
