// Integer scores of a chunk of documents for one query, accumulated in shared memory: see accumulate.py.
//
// Constants: WARPS per block; CHUNK, documents per chunk; APART, words between two queries' candidate counters; LISTED,
// whether chunk_docs [., CHUNK] lists the documents of a sampled chunk; RANKED, the number of sampled documents from which
// the threshold is computed, or 0.

#include "device.cuh"

constexpr u32 THREADS = 32 * WARPS;
// Postings that a warp processes at a time: 8 per lane, all in flight. Longer lists are shared among the warps.
constexpr u32 PIECE = 256;

alignas(16) __shared__ int scores[CHUNK + 32];  // the last 32 words, one per lane, are never read

// Add N groups of 32 postings. SOME: postings may be missing; `left` is the number of postings from this lane's first on.
template <int N, bool SOME>
__device__ void add(const int* postings, int left, int weight) {
    int x[N];
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = load_once(postings + 32 * i, !SOME || left > 32 * i);
#pragma unroll
    for (int i = 0; i < N; i++) {
        // A lane without a posting adds to a word that is never read, because a branch would slow down the whole warp.
        u32 place = !SOME || left > 32 * i ? x[i] & CHUNK - 1 : CHUNK + lane_id();
        asm("" : "+r"(place));  // otherwise the compiler shifts before it masks, which takes one more instruction
        // The high half of posting * weight; the document's bits are too small to matter. It is made odd, so that a
        // positive contribution is not 0.
        atomicAdd(&scores[place], __mulhi(x[i], weight) | 1);
    }
}

// Add the contributions of a query's n terms. The first `longs` are at the start of their rows, the others `gap` places
// further on.
//
// A warp looks up 32 lists at a time, one per lane, and the warps process the pieces of the lists in turn: piece x belongs
// to the first lane with a running count of pieces larger than x. All warps look up all lists, so that no warp waits for
// another.
__device__ void accumulate(const int* offsets, const int* postings, const int* terms, const int* weights, u32 n,
                           u32 longs, u32 gap) {
    u32 x = threadIdx.x / 32;
    for (u32 base = 0; base < n; base += 32) {
        u32 i = base + lane_id(), start = 0, length = 0;
        int weight = 0;
        if (i < n) {
            if (i >= longs) i += gap;
            const int* list = offsets + terms[i];
            weight = weights[i];
            start = list[0];
            length = list[1] - start;
        }
        const u32 own = (length + PIECE - 1) / PIECE, count = scan(own), all = __shfl_sync(ALL, count, 31);
        for (; x < all; x += WARPS) {
            const int lane = __ffs(__ballot_sync(ALL, count > x)) - 1;
            const u32 skip = (x - __shfl_sync(ALL, count - own, lane)) * PIECE;
            const u32 there = __shfl_sync(ALL, length, lane) - skip;
            const int* at = postings + (__shfl_sync(ALL, start, lane) + skip + lane_id());
            const int left = there - lane_id(), w = __shfl_sync(ALL, weight, lane);
            if (there >= PIECE) {
                add<8, false>(at, left, w);
            } else if (there > 128) {
                add<8, true>(at, left, w);
            } else if (there > 64) {
                add<4, true>(at, left, w);
            } else {
                add<2, true>(at, left, w);
            }
        }
        x -= all;
    }
}

// Append the documents that reach the threshold, and are not deleted, to the query's candidates, as keys (score, lower id
// first).
//
// A thread first sets a bit per document, and a warp then reserves places for all of them with one atomic: an atomic per
// document would take as long as everything else if a hundred documents of a chunk reach the threshold.
template <typename Doc>
__device__ void append(int threshold, int* found, i64* candidates, u32 capacity, const bool* deleted, Doc doc) {
    static_assert(CHUNK / THREADS <= 32, "a thread's documents are the bits of one word");
    u32 hits = 0;
#pragma unroll
    for (u32 i = 0; i < CHUNK / THREADS; i += 4) {
        const int4 x = *reinterpret_cast<const int4*>(&scores[i * THREADS + 4 * threadIdx.x]);
        if (max(max(x.x, x.y), max(x.z, x.w)) >= threshold) {
            const bool four[] = {x.x >= threshold, x.y >= threshold, x.z >= threshold, x.w >= threshold};
#pragma unroll
            for (u32 j = 0; j < 4; j++) hits |= u32(four[j]) << i + j;
        }
    }
    const auto place = [](u32 bit) { return bit / 4 * 4 * THREADS + 4 * threadIdx.x + bit % 4; };
    for (u32 rest = hits; rest;) {
        const u32 bit = highest(rest);
        rest ^= 1u << bit;
        if (deleted[doc(place(bit))]) hits ^= 1u << bit;
    }
    const u32 own = __popc(hits), count = scan(own), all = __shfl_sync(ALL, count, 31);
    if (!all) return;
    u32 slot = lane_id() == 31 ? atomicAdd(found, all) : 0;
    slot = __shfl_sync(ALL, slot, 31) + count - own;
    for (; hits; slot++) {
        const u32 bit = highest(hits), at = place(bit);
        hits ^= 1u << bit;
        const i64 key = i64(scores[at]) << 32 | (doc(at) ^ 0x7fffffff);
        if (slot < capacity) candidates[slot] = key;
    }
}

// The score of rank `rank` among the first RANKED documents, or a little less: see `kth_largest`. Negative scores are
// ignored.
__device__ int ranked(int rank, const bool* deleted, const int* docs) {
    __shared__ int largest, reached[12];  // 12 steps end within 2^-12 of the largest, in a third of the time of all 31
    constexpr int EACH = RANKED / THREADS;
    int x[EACH + 1], most = 0;
    if (threadIdx.x < 12) reached[threadIdx.x] = 0;
    if (threadIdx.x == 12) largest = 0;
    for (int i = 0; i < EACH; i++) {
        const u32 place = i * THREADS + threadIdx.x;
        x[i] = scores[place];
        if (x[i] > 0 && deleted[docs[place]]) x[i] = 0;
        most = max(most, x[i]);
    }
    most = across(most, [](int a, int b) { return max(a, b); });
    __syncthreads();
    if (lane_id() == 0) atomicMax(&largest, most);
    __syncthreads();
    int width = largest + 1, found = 0;
    for (int& count : reached) {
        width = width + 1 >> 1;
        int own = 0;
        for (int i = 0; i < EACH; i++) own += x[i] >= found + width;
        own = across(own, [](int a, int b) { return a + b; });
        if (lane_id() == 0) atomicAdd(&count, own);
        __syncthreads();
        if (count >= rank) found += width;
    }
    return max(found, 1);
}

// One block per (chunk, query): scores the chunk, then appends the documents that reach the query's threshold, or, if
// RANKED, computes the threshold.
//
// Queries vary fastest in the grid, so that a chunk's postings stay in L2 while all queries read them. Reads 4 bytes per
// posting of the query's terms in the chunk and 8 bytes of offsets per term; writes 8 bytes per candidate. Six blocks of 40
// registers per thread run on an SM, the most that 32 KiB of scores per block allow.
extern "C" __global__ void __launch_bounds__(THREADS, RANKED ? 4 : 6)
    score_chunks(const int* postings, const int* offsets, const i64* bases, const int* chunk_docs, const int* terms,
                 const int* weights, const int* counts, const int* long_counts, int* threshold, int* found,
                 i64* candidates, const bool* deleted, u32 B, u32 V1, u32 L, u32 capacity, int rank,
                 void*, void*) {
    const u64 c = blockIdx.x / B, q = blockIdx.x % B;
    const u32 n = counts[q], longs = long_counts[q];  // in flight while the scores are set to 0
    const i64 base = bases[c];
#pragma unroll
    for (u32 i = 0; i < CHUNK; i += 4 * THREADS) *reinterpret_cast<int4*>(&scores[i + 4 * threadIdx.x]) = {};
    __syncthreads();
    accumulate(offsets + c * V1, postings + base, terms + q * L, weights + q * L, n, longs, L - n);
    __syncthreads();
    const int* docs = chunk_docs + c * (LISTED ? CHUNK : 1);
    if constexpr (RANKED) {
        threshold[q] = ranked(rank, deleted, docs);
        found[q * APART] = 0;
    } else {
        append(threshold[q], found + q * APART, candidates + q * capacity, capacity, deleted,
               [=](u32 place) { return LISTED ? docs[place] : docs[0] + int(place); });
    }
}
