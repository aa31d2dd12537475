// Common functions of the CUDA C++ kernels. Tests compile this file for a CPU, without the inline assembly.

using u32 = unsigned;
using u64 = unsigned long long;
using i64 = long long;

constexpr u32 ALL = ~0u;  // mask of all lanes of a warp

#ifdef __CUDACC__

// Load the bits of a number without allocating a line in L1; returns 0 if `there` is false.
template <typename T>
__device__ u32 load_once(const T* at, bool there = true) {
    u32 x;
#define LOAD(type)                                                                                              \
    asm volatile(                                                                                               \
        "{ .reg .pred p; setp.ne.s32 p, %2, 0; mov.b32 %0, 0; @p ld.global.nc.L1::no_allocate." type " %0, [%1]; }" \
        : "=r"(x)                                                                                               \
        : "l"(at), "r"(int(there)))
    if constexpr (sizeof(T) == 4) LOAD("u32");
    if constexpr (sizeof(T) == 2) LOAD("u16");
    if constexpr (sizeof(T) == 1) LOAD("u8");
#undef LOAD
    return x;
}

// A load that the compiler does not delay until the first use of its result, so that it overlaps the code in between.
__device__ inline uint4 load_now(const uint4* at) {
    uint4 x;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(at));
    return x;
}

// 32-bit addresses of shared memory, for address arithmetic.
__device__ inline u32 shared_address(const void* at) { return u32(__cvta_generic_to_shared(at)); }

__device__ inline u32 load_shared(u32 at) {
    u32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(at));
    return x;
}

// 16-bit numbers, bfloat16 or fp16.
template <bool BF16>
__device__ float to_float(unsigned short bits) {
    float x;
    if constexpr (BF16) return __uint_as_float(u32(bits) << 16);
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

template <bool BF16>
__device__ unsigned short from_float(float x) {
    unsigned short bits;
    if constexpr (BF16) asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    if constexpr (!BF16) asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

// For two packed numbers: all 16 bits of a half are set if its number is not zero.
template <bool BF16>
__device__ u32 nonzero(u32 two) {
    u32 bits;
    if constexpr (BF16) asm("set.neu.u32.bf16x2 %0, %1, %2;" : "=r"(bits) : "r"(two), "r"(0));
    if constexpr (!BF16) asm("set.neu.u32.f16x2 %0, %1, %2;" : "=r"(bits) : "r"(two), "r"(0));
    return bits;
}

// Programmatic dependent launch: see pdl.py.
__device__ inline void wait_for_previous() {
#if PDL
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#endif

__device__ inline u32 lane_id() { return threadIdx.x % 32; }

// Inclusive prefix sum over the lanes.
__device__ inline u32 scan(u32 x) {
    for (u32 apart = 1; apart < 32; apart *= 2) {
        const u32 below = __shfl_up_sync(ALL, x, apart);
        if (lane_id() >= apart) x += below;
    }
    return x;
}

// Reduction of x by a commutative function `of` over each group of `lanes` lanes.
template <typename T, typename Of>
__device__ T across(T x, Of of, u32 lanes = 32) {
    for (u32 apart = lanes / 2; apart; apart /= 2) x = of(x, __shfl_xor_sync(ALL, x, apart));
    return x;
}

__device__ inline u32 highest(u32 bits) { return 31 - __clz(bits); }
