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

// Where an operand lies: 8 x 8 matrices of 128 bytes, row after row (a) or column after column (b) of 8 channels; the two of 16
// channels beside each other, then the next 8 rows or columns.
class Operand {
public:
    // from one lane, so that the compiler keeps it in a uniform register, where the products want it
    __device__ explicit Operand(uint32_t shared_address, uint32_t next_rows = 256)
        : low_(__shfl_sync(0xffffffffu, (shared_address & 0x3ffffu) >> 4 | next_channels >> 4 << 16, 0)),
          high_(next_rows >> 4) {}
    // bytes: a multiple of 16
    __device__ uint64_t at(uint32_t bytes) const { return uint64_t{low_ + (bytes >> 4)} | uint64_t{high_} << 32; }

private:
    static constexpr uint32_t next_channels = 128;  // bytes
    uint32_t low_;
    uint32_t high_;
};

// Before products that read registers written since the last ones.
__device__ inline void warpgroup_begin() {
    if constexpr (has_warpgroup_products) asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// Behind products that are waited for together.
__device__ inline void warpgroup_commit() {
    if constexpr (has_warpgroup_products) asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Until all products of this warp are done with what they read.
__device__ inline void warpgroup_wait_all() {
    if constexpr (has_warpgroup_products) asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
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
#define LKV_OPERANDS_44 LKV_SIXTEEN(0), LKV_SIXTEEN(16), LKV_FOUR(32), LKV_FOUR(36), LKV_FOUR(40)
#define LKV_OPERANDS_48 LKV_OPERANDS_44, LKV_FOUR(44)
#define LKV_OPERANDS_64 LKV_OPERANDS_48, LKV_SIXTEEN(48)
#define LKV_NUMBERS_44                                                                 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43"
#define LKV_NUMBERS_48 LKV_NUMBERS_44 ", %44, %45, %46, %47"
#define LKV_NUMBERS_64 LKV_NUMBERS_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define LKV_WAIT(n) asm volatile("wgmma.wait_group.sync.aligned 0;" : LKV_OPERANDS_##n : : "memory")
#define LKV_MULTIPLY(n, columns, a_number, b_number, add_number)                                 \
    asm volatile("{.reg .pred add; setp.ne.b32 add, " add_number                                 \
                 ", 0; "                                                                         \
                 "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32.f16.f16 {" LKV_NUMBERS_##n \
                 "}, " a_number ", " b_number ", add, 1, 1, 0, 0;}"                              \
                 : LKV_OPERANDS_##n                                                              \
                 : "l"(a), "l"(b), "r"(static_cast<int>(add)))
#else
#define LKV_WAIT(n)
#define LKV_MULTIPLY(n, columns, a_number, b_number, add_number)
#endif

// Until all products of this warp are there, which are in d: not read before.
__device__ inline void warpgroup_wait(float (&d)[64]) { LKV_WAIT(64); }
__device__ inline void warpgroup_wait(float (&d)[48]) { LKV_WAIT(48); }
__device__ inline void warpgroup_wait(float (&d)[44]) { LKV_WAIT(44); }

// d[64 x 128] (+)= a[64 x 16] · b[16 x 128], f16 in, f32 out; d of 48 registers: 96 columns, of 44: 88. A warp has 16 rows; d[4n + e]:
// columns 8n … 8n + 7 as mma's c[e]. add: false writes d.
__device__ inline void warpgroup_mma(float (&d)[64], uint64_t a, uint64_t b, bool add) {
    LKV_MULTIPLY(64, "128", "%64", "%65", "%66");
}
__device__ inline void warpgroup_mma(float (&d)[48], uint64_t a, uint64_t b, bool add) {
    LKV_MULTIPLY(48, "96", "%48", "%49", "%50");
}
__device__ inline void warpgroup_mma(float (&d)[44], uint64_t a, uint64_t b, bool add) {
    LKV_MULTIPLY(44, "88", "%44", "%45", "%46");
}

// The same with a in registers, of each warp its own 16 rows as mma's operand a, and b as its rows come: 8 x 8 matrices of eight channels,
// 16 bytes of columns each; the next eight channels beside them, the next eight columns next_rows further.
__device__ inline void warpgroup_mma(float (&d)[64], const uint32_t (&a)[4], uint64_t b, bool add) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile(
        "{.reg .pred add; setp.ne.b32 add, %69, 0; "
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" LKV_NUMBERS_64
        "}, {%64, %65, %66, %67}, %68, add, 1, 1, 1;}"
        : LKV_OPERANDS_64
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
#endif
}

#undef LKV_MULTIPLY
#undef LKV_WAIT
#undef LKV_NUMBERS_64
#undef LKV_NUMBERS_48
#undef LKV_NUMBERS_44
#undef LKV_OPERANDS_64
#undef LKV_OPERANDS_48
#undef LKV_OPERANDS_44
#undef LKV_SIXTEEN
#undef LKV_FOUR

// Four 8 x 8 f16 matrices, each as a register of mma's operand a, to shared memory: row i of matrix m to where lane 8m + i points.
__device__ inline void store_four(void* at, const uint32_t (&x)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     static_cast<uint32_t>(__cvta_generic_to_shared(at))),
                 "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
#endif
}

}  // namespace lkv::cuda
