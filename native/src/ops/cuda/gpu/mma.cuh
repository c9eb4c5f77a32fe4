// The instructions the kernels are made of: f16 tensor-core products, matrix loads, asynchronous copies.
#pragma once

#include <cstdint>

namespace lkv::cuda {

// c[16 x 8] += a[16 x 16] · b[16 x 8], f16 in, f32 out. Lane 4g + c holds
//   a: rows g, g+8 · columns 2c, 2c+1, 2c+8, 2c+9    b: rows 2c, 2c+1, 2c+8, 2c+9 · column g    c: rows g, g+8 · columns 2c, 2c+1
__device__ inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 x 8 f16 matrices from shared memory, each by the rows that eight lanes point at, as they are or transposed.
template <bool transpose = false>
__device__ inline void load_four(uint32_t (&x)[4], const void* at) {
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(at));
    if constexpr (transpose) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(address)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(address)
                     : "memory");
    }
}

// A 16 x 16 f16 matrix, rows `pitch` bytes apart, as operand a.
__device__ inline void load_a(uint32_t (&a)[4], const void* at, int pitch, int lane) {
    load_four(a, static_cast<const char*>(at) + (lane % 16) * pitch + lane / 16 * 16);
}

// The same where the matrix is stored transposed: rows of shared memory are columns of a.
__device__ inline void load_a_transposed(uint32_t (&a)[4], const void* at, int pitch, int lane) {
    load_four<true>(a, static_cast<const char*>(at) + (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 16);
}

// Two 16 x 8 f16 matrices side by side as operands b, stored transposed: 16 rows of 16, `pitch` bytes apart. b: first, second.
__device__ inline void load_b_pair(uint32_t (&b)[4], const void* at, int pitch, int lane) {
    load_four(b, static_cast<const char*>(at) + (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 16);
}

template <int n>
__device__ inline void copy_async(void* dst, const void* src) {
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(dst));
    if constexpr (n == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(src) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(src), "n"(n) : "memory");
    }
}

// 2^x, without exp2f's care for results below 2^-126.
__device__ inline float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// An 8 x 8 matrix of f16 in registers, as a quarter of an operand of mma, transposed.
__device__ inline uint32_t transposed(uint32_t x) {
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// x, which the compiler may not know to be the same the next time: what follows from it is computed again, not kept in registers.
__device__ inline int forgotten(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// (x & mask) ^ other in one instruction, which two constants would be two.
__device__ inline uint32_t masked_xor(uint32_t x, uint32_t mask, uint32_t other) {
    uint32_t y;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(y) : "r"(x), "r"(mask), "r"(other));
    return y;
}

// (x & mask) | other, likewise.
__device__ inline uint32_t masked_or(uint32_t x, uint32_t mask, uint32_t other) {
    uint32_t y;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(x), "r"(mask), "r"(other));
    return y;
}

// Into the L2 cache.
__device__ inline void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

__device__ inline void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most n groups of this thread's copies are under way.
__device__ inline void copies_wait(int n) {
    if (n >= 3) {
        asm volatile("cp.async.wait_group 3;" ::: "memory");
    } else if (n == 2) {
        asm volatile("cp.async.wait_group 2;" ::: "memory");
    } else if (n == 1) {
        asm volatile("cp.async.wait_group 1;" ::: "memory");
    } else {
        asm volatile("cp.async.wait_group 0;" ::: "memory");
    }
}

}  // namespace lkv::cuda
