// Exact scores of a query's kept documents from their rows: see rescore.py.
//
// Constants: WARPS per block; STORED, the type of weights: float, unsigned short (fp16), or unsigned char with a scale and
// a zero per chunk of documents; ROOM, the largest number of documents of a query; APART, words between two queries'
// candidate counters; RANKED, whether the only block of a query also writes the k best, from at most RANKED_UP_TO keys;
// READ_ANYHOW, terms of a row that are read unconditionally; PDL, programmatic dependent launch.

#include "device.cuh"

constexpr u32 THREADS = 32 * WARPS;
constexpr bool SCALED = sizeof(STORED) == 1;
// Rows that a block looks up at a time, and rows that it scores per turn: four lanes per row, eight rows per warp.
constexpr u32 ROWS = SCALED ? 512 : 1024, TURN = 8 * WARPS;
// Position of a row's length in the 64 bits of its start.
constexpr u32 LENGTH_AT = 40;
// Terms of a row per round, eight per lane. Nearly all rows of about 127 terms need four rounds (READ_ANYHOW), so the check
// whether another round exists starts after three (SURE).
constexpr int ROUND = 32, ROUNDS = 8, ANYHOW = READ_ANYHOW / ROUND, SURE = 3, LONG = ROUNDS * ROUND;
// The largest number of entries, of up to 32 rows of a warp, that passed the filter. For scaled weights the row number is
// stored in the bits above the entry number.
constexpr u32 PASSED = 96, ROW_AT = 44;
// With more terms an eighth of the bits may be set, and loading all weights is as fast.
constexpr u32 FILTER_TERMS = 1023;
constexpr u32 CLASSES = 8;  // classes of lengths, in steps of 32
constexpr u32 MOST = RANKED_UP_TO;  // keys that a block ranks, in as many buckets
constexpr u32 EACH = MOST / THREADS;

alignas(128) __shared__ union {
    struct {
        // A line for each low byte of a term, which separates common terms, since these have adjacent numbers in some
        // vocabularies. A word has a bit for each value of the next five bits, and is repeated for all 32 banks.
        // Overlapping lines of half the size let twice as many other terms pass: 252 us per batch of 500 at 100 000
        // documents instead of 247 (H200).
        u32 filter[256][32];
        union {
            u64 rows[1024];
            struct {
                u64 with_scales[512];
                float2 scales[512];
            };
        };
        union {
            u64 passed[WARPS][PASSED];
            u32 classes[32];
        };
    };
    struct {
        u32 counts[MOST], begins[MOST];
        i64 moved[MOST];
        u32 sums[WARPS];
        int highest, lowest;
    } ranks;
} room;

// The documents and the query that a warp scores.
struct Collection {
    const unsigned short* terms;
    const STORED* weights;
    const float* query;
    const int* kept;
    i64* keys;
    u32 n;  // documents
};

// A weight by its bits.
__device__ float value_of(u32 bits, float2 scale) {
    if constexpr (SCALED) return (float(bits) - scale.y) * scale.x;
    return sizeof(STORED) == 4 ? __uint_as_float(bits) : to_float<false>(bits);
}

// A key ordered as (score, lower document first); -0 equals 0.
__device__ i64 key_of(double score, u32 doc) {
    int bits = __float_as_int(float(score) + 0.0f);
    if (bits < 0) bits ^= 0x7fffffff;
    return i64(u64(bits) << 32 | u32(~doc));
}

// Initialise the filter with a query's terms. The first `longs` are at the start of their row, the others `gap` places
// further on.
__device__ void set_filter(const int* terms, u32 count, u32 longs, u32 gap) {
#pragma unroll
    for (u32 i = 0; i < sizeof room.filter / sizeof(uint4); i += THREADS)
        reinterpret_cast<uint4*>(room.filter)[i + threadIdx.x] = {};
    __syncthreads();
    for (u32 base = threadIdx.x / 32; base < count; base += THREADS) {
        const u32 i = base + WARPS * lane_id();
        const u32 mine = i < count ? terms[i < longs ? i : i + gap] : 0;
        for (u32 left = __ballot_sync(ALL, i < count); left;) {
            const u32 lane = highest(left), t = __shfl_sync(ALL, mine, lane);
            left ^= 1u << lane;
            atomicOr(&room.filter[t % 256][lane_id()], 1u << t / 256 % 32);
        }
    }
}

// Shift the filter's answers for eight terms into the upper bits of `answers`.
//
// Dot products of bytes (dp4a) extract a byte or compute its address, in a different pipe from shifts.
__device__ void ask(const uint4& terms, u32& answers) {
    const u32 bank = shared_address(&room.filter[0][lane_id()]);
    const u32 words[] = {terms.x, terms.y, terms.z, terms.w};
#pragma unroll
    for (u32 two : words) {
#pragma unroll
        for (u32 low = 0; low < 32; low += 16) {
            const u32 x = load_shared(__dp4a(two, 128u << low, bank));
            answers = __funnelshift_r(answers, __funnelshift_r(x, x, __dp4a(two, 256u << low, 0u)), 1);
        }
    }
}

// Mask of the bits of a word that stand for terms of a row with `left` more terms: rounds `first`, `first` + 2, ...
__device__ u32 valid(int left, int first) {
    const int whole = (left + 2 * ROUND - 8 - ROUND * first) >> 6;
    const int bits = 8 * whole + max(left - 2 * ROUND * whole - ROUND * first, 0);
    return ~__funnelshift_lc(0u, ALL, bits);
}

// Clear the highest bit and return the number of its entry, for a word of every second round; arbitrary if no bit is set.
__device__ u32 take(u32& bits) {
    const u32 bit = highest(bits);
    bits &= ~(1u << bit % 32);
    return bit + bit / 8 * (2 * ROUND - 8);
}

// Add the entries of up to four bits of either word, with all loads in flight.
__device__ void add(const Collection& c, float2 scale, u64 entry, u32& even, u32& odd, double& sum) {
    u32 terms[8], bits[8];
    float weights[8];
    bool some[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        u32& from = j % 2 ? odd : even;
        some[j] = from;
        terms[j] = bits[j] = 0;
        const u64 at = entry + (j % 2 ? ROUND : 0) + take(from);
        if (!some[j]) continue;
        terms[j] = c.terms[at];
        if constexpr (sizeof(STORED) == 4) bits[j] = __float_as_uint(c.weights[at]);
        else bits[j] = c.weights[at];
    }
#pragma unroll
    for (int j = 0; j < 8; j++) weights[j] = some[j] ? c.query[terms[j]] : 0;
#pragma unroll
    for (int j = 0; j < 8; j++) sum = fma(double(value_of(bits[j], scale)), double(weights[j]), sum);
}

// The scores of rows that do not fit the list, computed directly; `even` and `odd` are the filter's answers for a row's
// first 256 entries.
__device__ double sum_of(const Collection& c, float2 scale, u64 entry, int left, u32 even, u32 odd) {
    double sum = 0;
    for (u64 next = entry + LONG;; next += 2 * ROUND) {
        while (__any_sync(ALL, even | odd)) add(c, scale, entry, even, odd, sum);
        left -= next - entry;
        if (!__any_sync(ALL, left > 0)) break;
        entry = next;
        const uint4* at = reinterpret_cast<const uint4*>(c.terms + entry);
        ask(left > 0 ? load_now(at) : uint4{}, even);
        ask(left > ROUND ? load_now(at + ROUND / 8) : uint4{}, odd);
        even = even >> 24 & valid(max(left, 0), 0);
        odd = odd >> 24 & valid(max(left, 0), 1);
    }
    return across(sum, [](double a, double b) { return a + b; }, 4);
}

// The entries of a warp's rows, from up to four turns, that passed the filter, in order; later replaced by their products.
struct List {
    const Collection& c;
    u64* const entries;
    const u32 step;  // documents from one turn to the next
    u32 first;       // document of the first turn
    u32 used = 0, turns;
    u32 begins = ALL;  // start of this lane's row in the list, below its length; ALL if it is not in the list

    // Replace entries by products of weights and the query's weights, which are 0 for false positives of the filter.
    // Returns the document of this lane's row, or -1.
    __device__ int multiply() {
        __syncwarp();
        const u32 i = document();
        const int doc = lane_id() / 8 < turns && i < c.n && begins != ALL ? c.kept[i] : -1;
        u32 term[PASSED / 32], bits[PASSED / 32];
        float2 scale[PASSED / 32];
#pragma unroll
        for (u32 u = 0; u < PASSED / 32; u++) {
            const bool there = lane_id() + 32 * u < used;
            u64 at = there ? entries[lane_id() + 32 * u] : 0;
            if constexpr (SCALED) {
                scale[u] = room.scales[at >> ROW_AT];
                at &= (1ull << ROW_AT) - 1;
            }
            term[u] = there ? c.terms[at] : 0;
            bits[u] = load_once(c.weights + at, there);
        }
#pragma unroll
        for (u32 u = 0; u < PASSED / 32; u++)
            term[u] = lane_id() + 32 * u < used ? __float_as_uint(c.query[term[u]]) : 0;
#pragma unroll
        for (u32 u = 0; u < PASSED / 32; u++) {
            const double product = double(value_of(bits[u], scale[u])) * double(__uint_as_float(term[u]));
            if (lane_id() + 32 * u < used) entries[lane_id() + 32 * u] = __double_as_longlong(product);
        }
        return doc;
    }

    // Sum the products, a lane per row, and empty the list.
    __device__ void add_up(int doc, u32 next) {
        __syncwarp();
        const u64* product = entries + begins % 65536;
        double sum = 0;
        for (int left = doc < 0 ? 0 : begins >> 16; __any_sync(ALL, left > 0); left -= 4, product += 4) {
#pragma unroll
            for (int n = 0; n < 4; n++)
                if (left > n) sum += __longlong_as_double(product[n]);
        }
        if (doc >= 0) c.keys[document()] = key_of(sum, doc);
        __syncwarp();
        used = turns = 0;
        first = next;
    }

    __device__ u32 document() const { return first + lane_id() / 8 * step + lane_id() % 8; }
};

// Write keys of scores that are fp64 sums over rows.
//
// Few of a row's terms are in the query. A lane looks up eight terms at a time in the filter, in its own bank, and keeps
// the answers as bits. Entries that pass are appended to the warp's list, in order. When the list is full, or has 32 rows,
// the lanes load the weights and the query's weights of its entries and replace the entries by the products; then each lane
// sums a row. Rows that do not fit the list are summed directly. The next rows are loaded in the meantime. The first lists
// of different warps have different numbers of rows, so that the warps do not all wait at the same time.
//
// i: document of the first of room.rows. step: distance of the documents of two rows that are TURN rows apart.
__device__ void score_rows(const Collection& c, u32 i, u32 step) {
    const u32 lane = lane_id(), warp = threadIdx.x / 32, eight = 8 * (lane % 4);
    u32 row = threadIdx.x / 4;
    i += 8 * warp;
    if (i >= c.n) return;
    List list{c, room.passed[warp], step, i - warp % 4 * step, 0, warp % 4};
    uint4 terms[ROUNDS];
    u64 following;
    u32 from_first;
    int coming;
    const auto fetch = [&] {
        const u64 where = room.rows[row];
        const u32 before = where % 8;
        coming = int(where >> LENGTH_AT) + before - eight;
        from_first = eight ? ALL : ALL << before;
        following = (where & (1ull << LENGTH_AT) - 8) + eight;
        const uint4* at = reinterpret_cast<const uint4*>(c.terms + following);
#pragma unroll
        for (int r = 0; r < ROUNDS; r++) {
            terms[r] = {};
            if (r < ANYHOW || coming > ROUND * r) terms[r] = load_now(at + r * ROUND / 8);
        }
    };

    for (fetch();;) {
        // Rounds alternate between two words of answers, so that both have about as many.
        u32 even = 0, odd = 0;
        const int left = coming;
        u64 entry = following;
#pragma unroll
        for (int r = 0; r < ROUNDS; r++) {
            if (r >= SURE && !__any_sync(ALL, left > ROUND * r)) {
                even >>= 32 - 8 * ((r + 1) / 2);
                odd >>= 32 - 8 * (r / 2);
                break;
            }
            ask(terms[r], r % 2 ? odd : even);
        }
        even &= valid(left, 0) & from_first;
        odd &= valid(left, 1);
        const u32 own = __popc(even) + __popc(odd), count = scan(own), total = __shfl_sync(ALL, count, 31);
        u32 slot = count - own;
        const auto note = [&] {
            u64* at = &list.entries[slot];
            for (u32* bits : {&even, &odd}) {
                do {
                    const bool some = *bits;
                    const u64 passed = entry + take(*bits);
                    if (some) *at++ = passed;
                } while (__any_sync(ALL, *bits));
                entry += ROUND;
            }
        };
        if (__any_sync(ALL, left > LONG) || total > PASSED) {
            const double sum = sum_of(c, SCALED ? room.scales[row] : float2{}, entry, left, even, odd);
            const u32 mine = i + lane / 4;
            if (mine < c.n && !eight) c.keys[mine] = key_of(sum, c.kept[mine]);
            if (lane / 8 == list.turns) list.begins = ALL;
            even = odd = 0;
        } else {
            if (list.used + total > PASSED) list.add_up(list.multiply(), i);
            slot += list.used;
            const u32 low = __shfl_sync(ALL, slot, lane % 8 * 4), high = __shfl_sync(ALL, slot + own, lane % 8 * 4 + 3);
            if (lane / 8 == list.turns) list.begins = high - low << 16 | low;
            list.used += total;
            if constexpr (SCALED) entry |= u64(row) << ROW_AT;
        }
        row += TURN;
        i += step;
        list.turns++;
        const bool more = i < c.n && row < ROWS;
        if (more && list.turns < 4) {
            fetch();
            note();
            continue;
        }
        note();
        const int doc = list.multiply();
        if (!more) return list.add_up(doc, i);
        fetch();
        list.add_up(doc, i);
    }
}

// (scale, zero) of a document: the values of the last chunk that begins at or before it.
__device__ float2 scale_of(int doc, const float2* scales, const int* chunk_docs, u32 chunks) {
    u32 low = 0;
    for (u32 high = chunks; high - low > 1;) {
        const u32 middle = (low + high) / 2;
        (chunk_docs[middle] <= doc ? low : high) = middle;
    }
    return scales[low];
}

// Write the scores and ids of the k best keys, each at its rank: a bucket sort in shared memory. `_write_ranked` is the
// same in global memory.
__device__ void rank(const i64* keys, u32 n, u32 k, float* scores, i64* ids) {
    auto& [counts, begins, moved, sums, most, least] = room.ranks;
    i64 key[EACH];
    u32 place[EACH];
    constexpr int NONE = 1 << 31, ANY = ~NONE;  // the least and the largest int
    int high = NONE, low = ANY;
    __syncthreads();
    if (threadIdx.x == 0) most = NONE, least = ANY;
    for (u32 u = 0; u < EACH; u++) {
        const u32 at = u * THREADS + threadIdx.x;
        counts[at] = 0;
        if (at >= n) continue;
        key[u] = keys[at];
        high = max(high, int(key[u] >> 32));
        low = min(low, int(key[u] >> 32));
    }
    high = across(high, [](int a, int b) { return max(a, b); });
    low = across(low, [](int a, int b) { return min(a, b); });
    __syncthreads();
    if (lane_id() == 0) atomicMax(&most, high), atomicMin(&least, low);
    __syncthreads();
    const u32 top = most, bits = 32 - __clz(top - u32(least)), shift = bits > 10 ? bits - 10 : 0;
    const auto bucket = [=](i64 key) { return (top - u32(key >> 32)) >> shift; };
    for (u32 u = 0; u < EACH; u++)
        if (u * THREADS + threadIdx.x < n) place[u] = atomicAdd(&counts[bucket(key[u])], 1u);
    __syncthreads();
    u32 own[EACH], all = 0;
    for (u32 u = 0; u < EACH; u++) all += own[u] = counts[EACH * threadIdx.x + u];
    u32 before = scan(all);
    if (lane_id() == 31) sums[threadIdx.x / 32] = before;
    __syncthreads();
    before -= all;
    for (u32 warp = 0; warp < threadIdx.x / 32; warp++) before += sums[warp];
    for (u32 u = 0; u < EACH; before += own[u++]) begins[EACH * threadIdx.x + u] = before;
    __syncthreads();
    for (u32 u = 0; u < EACH; u++)
        if (u * THREADS + threadIdx.x < n) moved[begins[bucket(key[u])] + place[u]] = key[u];
    __syncthreads();
    // From here on keys are in the order of buckets, so that neighbouring threads write the same lines.
    for (u32 at = threadIdx.x; at < n; at += THREADS) {
        const i64 mine = moved[at];
        const u32 b = bucket(mine), begin = begins[b];
        u32 rank = begin;
        for (u32 j = 0; j < counts[b]; j++) rank += moved[begin + j] > mine;
        if (rank >= k) continue;
        const int bits = mine >> 32;
        scores[rank] = __int_as_float(bits < 0 ? bits ^ 0x7fffffff : bits);
        ids[rank] = u32(~mine);
    }
}

// Exact scores of the kept documents of a query; blocks (q, part). If the query has at most FILTER_TERMS terms, a filter
// rejects most terms that are not in the query. Reads the terms of a kept document's row (2 bytes per entry) once, and the
// weights of the query's terms; writes 8 bytes per document.
//
// RANKED: the only block of a query also writes the k best in the simple case (see `simple`), and stores a count of -1;
// otherwise it adds 1 to progress[2].
extern "C" __global__ void __launch_bounds__(THREADS, 4)
    rescore(const float* query, const i64* offsets, const unsigned short* terms, const STORED* weights,
            const float2* scales, const int* chunk_docs, u32 chunks, const int* query_terms, const int* query_counts,
            const int* long_counts, int* kept, int* kept_counts, i64* keys, const int* found, float* scores, i64* ids,
            int* progress, u32 V, u32 L, u32 k, void*, void*) {
    const u64 q = blockIdx.x;
    const u32 part = blockIdx.y, parts = gridDim.y, count = query_counts[q], longs = long_counts[q];
    const bool filtered = count <= FILTER_TERMS;
    query_terms += q * L;
    // The terms were written by `_prepare_kernel`, which ended before the preceding `select_kernel` started.
    if (PDL && filtered) set_filter(query_terms, count, longs, L - count);
    wait_for_previous();
    const u32 n = kept_counts[q];
    // Documents may occur twice only if there were fewer than k candidates.
    const bool simple = RANKED && filtered && n >= k && n <= MOST && u32(found[q * APART]) >= k;
    if (RANKED && !simple && threadIdx.x == 0) atomicAdd(&progress[2], 1);
    kept += q * ROOM;
    keys += q * ROOM;
    const Collection c = {terms, weights, query + q * V, kept, keys, n};

    if (!filtered) {  // a warp per document
        for (u32 i = part * WARPS + threadIdx.x / 32; i < n; i += parts * WARPS) {
            const int doc = kept[i];
            const float2 scale = SCALED ? scale_of(doc, scales, chunk_docs, chunks) : float2{};
            double sum = 0;
#pragma unroll 4
            for (i64 at = offsets[doc] + lane_id(), end = offsets[doc + 1]; at < end; at += 32)
                sum = fma(double(value_of(load_once(weights + at), scale)), double(c.query[terms[at]]), sum);
            sum = across(sum, [](double a, double b) { return a + b; });
            if (lane_id() == 0) keys[i] = key_of(sum, doc);
        }
        return;
    }

    const auto document = [=](u32 row) { return (row / TURN * parts + part) * TURN + row % TURN; };
    for (u32 first = 0; document(first) < n; first += ROWS) {
        u32 doc[ROWS / THREADS], kind[ROWS / THREADS], before[ROWS / THREADS];
        u64 where[ROWS / THREADS];
#pragma unroll
        for (u32 u = 0; u < ROWS / THREADS; u++) {
            const u32 i = document(first + u * THREADS + threadIdx.x);
            doc[u] = i < n ? kept[i] : 0;
            const i64 start = i < n ? offsets[doc[u]] : 0, length = i < n ? offsets[doc[u] + 1] - start : 0;
            where[u] = start | length << LENGTH_AT;
            kind[u] = i < n ? CLASSES - min(u32(length + start % 8 + 31) / 32, CLASSES) : CLASSES + 1;
        }
        if (!PDL && first == 0) set_filter(query_terms, count, longs, L - count);  // while the first look-ups are in flight
        if (threadIdx.x < 32) room.classes[threadIdx.x] = 0;  // shares memory with the list of warp 0
        __syncthreads();                                      // all warps have scored the previous rows
        // Rows are sorted by length, the longest first, so that a warp's rows end at the same time.
#pragma unroll
        for (u32 u = 0; u < ROWS / THREADS; u++) {
            const u32 same = __match_any_sync(ALL, kind[u]), below = __popc(same & (1u << lane_id()) - 1);
            const u32 ahead = below ? 0 : atomicAdd(&room.classes[kind[u]], __popc(same));
            before[u] = below + __shfl_sync(ALL, ahead, __ffs(same) - 1);
        }
        __syncthreads();
#pragma unroll
        for (u32 u = 0; u < ROWS / THREADS; u++) {
#pragma unroll
            for (u32 longer = 0; longer <= CLASSES; longer++) before[u] += longer < kind[u] ? room.classes[longer] : 0;
            room.rows[before[u]] = where[u];
            if constexpr (SCALED) room.scales[before[u]] = scale_of(doc[u], scales, chunk_docs, chunks);
            if (kind[u] <= CLASSES) kept[document(first + before[u])] = doc[u];
        }
        __syncthreads();
        score_rows(c, document(first), parts * TURN);
    }
    if (simple) {
        rank(keys, n, k, scores + q * k, ids + q * k);
        if (threadIdx.x == 0) kept_counts[q] = -1;
    }
}
