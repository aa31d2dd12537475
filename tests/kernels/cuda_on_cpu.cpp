// CUDA C++ on a CPU: the threads of a block are coroutines, which take turns at barriers and at what a warp does
// together. Blocks run one after the other. Shared memory holds what the block before left there. SOURCE: the kernels'
// file.

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(...)

struct dim3 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct int4 { int x, y, z, w; };
struct float2 { float x, y; };
static dim3 threadIdx, blockIdx, gridDim;

using std::fma, std::max, std::min;

struct Group {
    unsigned arrived = 0, phase = 0;
    std::array<uint64_t, 32> given[2];  // turn by turn, since some lanes may still read the last
};

struct Thread {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool done;
};

static std::vector<Thread> threads;
static ucontext_t host;
static unsigned stride;  // in which order threads take turns
static Group block, warps[32];

static void next() {
    const unsigned from = threadIdx.x;
    for (unsigned i = 0; i < threads.size(); i++) {
        threadIdx.x = (threadIdx.x + stride) % threads.size();
        if (!threads[threadIdx.x].done) break;
    }
    if (threads[threadIdx.x].done) setcontext(&host);
    if (threadIdx.x != from) swapcontext(&threads[from].context, &threads[threadIdx.x].context);
}

// A thread goes on here with the index that it had.
static void wait(Group& group, unsigned count) {
    const unsigned phase = group.phase, own = threadIdx.x;
    if (++group.arrived == count) {
        group.arrived = 0;
        group.phase++;
    }
    while (group.phase == phase) {
        next();
        threadIdx.x = own;
    }
}

inline void __syncthreads() { wait(block, threads.size()); }

template <typename T>
std::array<T, 32> gathered(T x) {
    Group& warp = warps[threadIdx.x / 32];
    auto& given = warp.given[warp.phase % 2];
    std::memcpy(&given[threadIdx.x % 32], &x, sizeof x);
    wait(warp, 32);
    std::array<T, 32> all;
    for (int i = 0; i < 32; i++) std::memcpy(&all[i], &given[i], sizeof x);
    return all;
}

template <typename T>
T __shfl_sync(unsigned, T x, int lane) { return gathered(x)[lane]; }
template <typename T>
T __shfl_xor_sync(unsigned, T x, int lanes) { return gathered(x)[threadIdx.x % 32 ^ lanes]; }
template <typename T>
T __shfl_up_sync(unsigned, T x, int lanes) {
    const int lane = threadIdx.x % 32;
    return gathered(x)[lane < lanes ? lane : lane - lanes];
}
inline unsigned __match_any_sync(unsigned, unsigned x) {
    unsigned same = 0, lane = 0;
    for (unsigned other : gathered(x)) same |= unsigned(other == x) << lane++;
    return same;
}
inline unsigned __ballot_sync(unsigned, bool x) {
    unsigned bits = 0, lane = 0;
    for (bool other : gathered(x)) bits |= unsigned(other) << lane++;
    return bits;
}
inline bool __any_sync(unsigned, int x) { return __ballot_sync(~0u, x); }
inline void __syncwarp() { gathered(0); }

template <typename T>
T atomicAdd(T* at, std::type_identity_t<T> x) { return std::exchange(*at, *at + x); }
inline void atomicOr(unsigned* at, unsigned x) { *at |= x; }
inline void atomicMax(int* at, int x) { *at = max(*at, x); }
inline void atomicMin(int* at, int x) { *at = min(*at, x); }

inline int __mulhi(int a, int b) { return int64_t(a) * b >> 32; }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __clz(unsigned x) { return std::countl_zero(x); }
inline int __ffs(unsigned x) { return x ? std::countr_zero(x) + 1 : 0; }
inline unsigned __dp4a(unsigned a, unsigned b, unsigned sum) {
    for (int at = 0; at < 32; at += 8) sum += (a >> at & 255) * (b >> at & 255);
    return sum;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
    return (uint64_t(high) << 32 | low) >> by % 32;
}
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned by) {
    return (uint64_t(high) << 32 | low) << min(by, 32u) >> 32;
}
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return std::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return std::bit_cast<double>(x); }

// What device.cuh says in assembly.
template <typename T>
unsigned load_once(const T* at, bool there = true) {
    unsigned bits = 0;
    if (there) std::memcpy(&bits, at, sizeof(T));
    return bits;
}
inline uint4 load_now(const uint4* at) {
    if (reinterpret_cast<uintptr_t>(at) % 16) __builtin_trap();
    return *at;
}
static char* const near = reinterpret_cast<char*>(&host);
inline unsigned shared_address(const void* at) { return static_cast<const char*>(at) - near; }
inline unsigned load_shared(unsigned at) { return *reinterpret_cast<unsigned*>(near + int(at)); }
template <bool BF16>
float to_float(unsigned short bits) {
    if constexpr (BF16) return std::bit_cast<float>(unsigned(bits) << 16);
    return std::bit_cast<_Float16>(bits);
}
template <bool BF16>
unsigned short from_float(float x) {
    if constexpr (!BF16) return std::bit_cast<unsigned short>(_Float16(x));
    const unsigned bits = std::bit_cast<unsigned>(x);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
template <bool>
unsigned nonzero(unsigned two) {
    return (two & 0x7fff ? 0xffff : 0) | (two & 0x7fff0000 ? 0xffff0000 : 0);
}

// What the kernel in front writes before this one has waited for it: where, what, how many bytes.
struct Late { void* to; const void* from; size_t size; };
static std::vector<Late> late;
inline void wait_for_previous() {
    for (const Late& l : late) std::memcpy(l.to, l.from, l.size);
    late.clear();
}
extern "C" void write_late(void* to, const void* from, size_t size) { late.push_back({to, from, size}); }

#include SOURCE

static void* kernel;
static const uint64_t* arguments;

// An integer argument takes eight bytes, whatever its size.
template <size_t... I>
void call(std::index_sequence<I...>) {
    reinterpret_cast<void (*)(decltype(I, uint64_t())...)>(kernel)(arguments[I]...);
}

static void thread() {
    const unsigned own = threadIdx.x;
    call(std::make_index_sequence<24>());
    threadIdx.x = own;
    threads[own].done = true;
    next();
}

extern "C" void launch(void* function, const uint64_t* given, unsigned x, unsigned y, unsigned count, unsigned order) {
    kernel = function, arguments = given, stride = order, gridDim = {x, y};
    threads.resize(count);
    for (unsigned i = 0; i < x * y; i++) {
        blockIdx = {i % x, i / x};
        for (Thread& t : threads) {
            t.stack = std::make_unique<char[]>(1 << 16);
            t.done = false;
            getcontext(&t.context);
            t.context.uc_stack = {.ss_sp = t.stack.get(), .ss_size = 1 << 16};
            makecontext(&t.context, thread, 0);
        }
        threadIdx.x = 0;
        swapcontext(&host, &threads[0].context);
    }
}
