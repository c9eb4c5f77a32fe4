// Products by four warps at once (wgmma, compute capability 9.0's own code, sm_90a): both operands lie in shared memory, and operand b
// is read once for 64 rows instead of once for 16, which is what mma.sync waits for where b is large.
#pragma once

#include <cstdint>

namespace lkv::cuda {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool has_warpgroup_products = true;
#else
constexpr bool has_warpgroup_products = false;
#endif

// Where an operand lies: 8 x 8 matrices of 128 bytes, row after row (a) or column after column (b) of 8 channels; bytes from 8 channels to
// the next 8, and from 8 rows or columns to the next 8.
class Operand {
public:
    // from one lane, so that the compiler keeps it in a uniform register, where the products want it
    __device__ explicit Operand(uint32_t shared_address, uint32_t next_rows = 256, uint32_t next_channels = 128)
        : low_(__shfl_sync(0xffffffffu, (shared_address & 0x3ffffu) >> 4 | next_channels >> 4 << 16, 0)),
          high_(next_rows >> 4) {}
    // bytes: a multiple of 16
    __device__ uint64_t at(uint32_t bytes) const { return uint64_t{low_ + (bytes >> 4)} | uint64_t{high_} << 32; }

private:
    uint32_t low_;
    uint32_t high_;
};

// Before products that read registers written since the last ones.
__device__ inline void warpgroup_begin() {
    if constexpr (has_warpgroup_products) asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// After products that are waited for together.
__device__ inline void warpgroup_commit() {
    if constexpr (has_warpgroup_products) asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Until all products of this warp are done with what they read.
__device__ inline void warpgroup_wait_all() {
    if constexpr (has_warpgroup_products) asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// Until all but the last n groups are.
template <int n>
__device__ inline void warpgroup_wait_but() {
    if constexpr (has_warpgroup_products) asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(n) : "memory");
}
// After a wait: products wrote these registers, or read them, until then, which the compiler does not know.
template <int n>
__device__ __forceinline__ void hold(float (&d)[n]) {
#pragma unroll
    for (int i = 0; i < n; i++) asm volatile("" : "+f"(d[i])::"memory");
}
template <int n>
__device__ __forceinline__ void hold(uint32_t (&a)[n][4]) {
#pragma unroll
    for (int i = 0; i < 4 * n; i++) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
}

// The same, naming operands a in registers: products read them until then, which the compiler does not know. Left out, they are written
// over while products run.
__device__ inline void warpgroup_wait_all(uint32_t (&a)[2][2][4]) {
#define LKV_A(k, m) "+r"(a[k][m][0]), "+r"(a[k][m][1]), "+r"(a[k][m][2]), "+r"(a[k][m][3])
    if constexpr (has_warpgroup_products) {
        asm volatile("wgmma.wait_group.sync.aligned 0;"
                     : LKV_A(0, 0), LKV_A(0, 1), LKV_A(1, 0), LKV_A(1, 1)
                     :
                     : "memory");
    }
#undef LKV_A
}
__device__ inline void warpgroup_wait_all(uint32_t (&a)[2][4]) {
#define LKV_A(k) "+r"(a[k][0]), "+r"(a[k][1]), "+r"(a[k][2]), "+r"(a[k][3])
    if constexpr (has_warpgroup_products)
        asm volatile("wgmma.wait_group.sync.aligned 0;" : LKV_A(0), LKV_A(1) : : "memory");
#undef LKV_A
}

// The instructions spell out the registers of d, as operands and by number.
#define LKV_FOUR(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define LKV_SIXTEEN(i) LKV_FOUR(i), LKV_FOUR((i) + 4), LKV_FOUR((i) + 8), LKV_FOUR((i) + 12)
#define LKV_OPERANDS LKV_SIXTEEN(0), LKV_SIXTEEN(16), LKV_SIXTEEN(32), LKV_SIXTEEN(48)
#define LKV_NUMBERS                                                                    \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// Until all products of this warp are there, which are in d: not read before.
__device__ inline void warpgroup_wait(float (&d)[64]) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.wait_group.sync.aligned 0;" : LKV_OPERANDS : : "memory");
#endif
}

// d[64 x 128] (+)= a[64 x 16] · b[16 x 128], f16 in, f32 out. A warp has 16 rows; d[4n + e]: columns 8n … 8n + 7 as mma's c[e]. a: in registers,
// of each warp its own 16 rows as mma's operand a; b: as its rows come, 8 x 8 matrices of eight channels, 16 bytes of columns each; the next
// eight channels beside them, the next eight columns next_rows further. add: false writes d.
__device__ inline void warpgroup_mma(float (&d)[64], const uint32_t (&a)[4], uint64_t b, bool add) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile(
        "{.reg .pred add; setp.ne.b32 add, %69, 0; "
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" LKV_NUMBERS
        "}, {%64, %65, %66, %67}, %68, add, 1, 1, 1;}"
        : LKV_OPERANDS
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
#endif
}

#define LKV_HALF_OPERANDS LKV_SIXTEEN(0), LKV_SIXTEEN(16)
#define LKV_HALF_NUMBERS                                                     \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"

// The same for 64 columns.
__device__ inline void warpgroup_mma(float (&d)[32], const uint32_t (&a)[4], uint64_t b, bool add) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile(
        "{.reg .pred add; setp.ne.b32 add, %37, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" LKV_HALF_NUMBERS
        "}, {%32, %33, %34, %35}, %36, add, 1, 1, 1;}"
        : LKV_HALF_OPERANDS
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
#endif
}

// The same where b lies as its columns come: 8 x 8 matrices of eight columns, 16 bytes of channels each.
__device__ inline void warpgroup_mma_columns(float (&d)[32], const uint32_t (&a)[4], uint64_t b, bool add) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile(
        "{.reg .pred add; setp.ne.b32 add, %37, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" LKV_HALF_NUMBERS
        "}, {%32, %33, %34, %35}, %36, add, 1, 1, 0;}"
        : LKV_HALF_OPERANDS
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
#endif
}

// The same for 32 columns.
__device__ inline void warpgroup_mma_columns(float (&d)[16], const uint32_t (&a)[4], uint64_t b, bool add) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile(
        "{.reg .pred add; setp.ne.b32 add, %21, 0; "
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "{%16, %17, %18, %19}, %20, add, 1, 1, 0;}"
        : LKV_SIXTEEN(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
#endif
}

#undef LKV_HALF_NUMBERS
#undef LKV_HALF_OPERANDS
#undef LKV_NUMBERS
#undef LKV_OPERANDS
#undef LKV_SIXTEEN
#undef LKV_FOUR

}  // namespace lkv::cuda
