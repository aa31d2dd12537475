// Search of a SparseIndex's segments on a CPU, and checksums of documents: see cpu.py.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

// A key is larger for a better document: the ordered bits of the score above the inverted id.
int64_t key_of(float score, int64_t id) {
  int32_t bits;
  score += 0.0f;  // -0 as 0
  std::memcpy(&bits, &score, sizeof bits);
  const int64_t ordered = bits < 0 ? bits ^ 0x7FFFFFFF : bits;
  return static_cast<int64_t>(static_cast<uint64_t>(ordered) << 32) | (0xFFFFFFFFLL - id);
}

float score_of(int64_t key) {
  const int32_t ordered = static_cast<int32_t>(key >> 32);
  const int32_t bits = ordered < 0 ? ordered ^ 0x7FFFFFFF : ordered;
  float score;
  std::memcpy(&score, &bits, sizeof score);
  return score;
}

constexpr int64_t kChunk = 1 << 14;  // documents whose sums stay in a core's cache
constexpr int64_t kBlock = 64;       // sums compared with the bound at a time, and weights compared with 0 at a time

struct Segment {
  int64_t count;
  const int64_t* offsets;
  const int32_t* docs;
  const float* weights;
};

// The remaining postings of a term of the query, and its weight.
struct List {
  int64_t next, end;
  double value;
};

// Buffers that are reused from query to query.
struct Scratch {
  std::vector<int64_t> terms, found;
  std::vector<List> lists;
  std::vector<double> sums = std::vector<double>(kChunk);
};

// Find the non-zero terms of a query; false if a weight is not finite.
bool find_terms(const float* query, int64_t num_terms, std::vector<int64_t>& terms) {
  terms.clear();
  bool finite = true;
  for (int64_t low = 0; low < num_terms; low += kBlock) {
    const int64_t high = std::min(low + kBlock, num_terms);
    int some = 0;
    for (int64_t t = low; t < high; ++t) some |= query[t] != 0;
    if (!some) continue;
    for (int64_t t = low; t < high; ++t) {
      if (query[t] == 0) continue;
      terms.push_back(t);
      finite &= std::abs(query[t]) < std::numeric_limits<float>::infinity();
    }
  }
  return finite;
}

// Writes the keys of the k best documents of some segments, the best first, to `scratch.found`, which must be empty.
// `scratch.terms` are the query's terms. Other arguments are those of `sparse_index_search`.
//
// Sums are fp64, in the order of the query's terms, and products are rounded before they are added (-ffp-contract=off),
// so results are bitwise equal to those of ATen's index_add_.
void search(
    const Segment* segments, int64_t num_segments, const float* query, int64_t first, const bool* barred,
    const int64_t* allowed, int64_t num_allowed, int64_t k, Scratch& scratch) {
  const std::vector<int64_t>& terms = scratch.terms;
  // The k best documents so far, and candidates found since. A candidate's score must be above the bound, since of equal
  // scores the lower ids are kept.
  const int64_t most = std::max<int64_t>(4 * k, 1024);
  std::vector<int64_t>& found = scratch.found;
  found.reserve(most + kBlock);
  double bound = -std::numeric_limits<double>::infinity();
  bool bounded = false;
  const auto keep = [&] {
    std::nth_element(found.begin(), found.begin() + (k - 1), found.end(), std::greater<>());
    found.resize(k);
    bound = score_of(*std::min_element(found.begin(), found.end()));
    bounded = true;
  };
  const int64_t* const allowed_end = allowed + num_allowed;
  const int64_t* next_allowed = std::lower_bound(allowed, allowed_end, first);
  std::vector<List>& lists = scratch.lists;
  lists.resize(terms.size());
  for (const Segment* s = segments; s < segments + num_segments; ++s) {
    const int32_t* const docs = s->docs;
    const float* const weights = s->weights;
    for (size_t i = 0; i < terms.size(); ++i)
      lists[i] = {s->offsets[terms[i]], s->offsets[terms[i] + 1], query[terms[i]]};
    for (int64_t start = 0; start < s->count; start += kChunk) {
      const int64_t end = std::min(start + kChunk, s->count);
      double* const sums = scratch.sums.data() - start;
      const int64_t* const here = next_allowed;
      next_allowed = std::lower_bound(here, allowed_end, first + end);
      if (allowed) {  // sums of other documents are not read
        for (const int64_t* id = here; id < next_allowed; ++id) sums[*id - first] = 0;
      } else {
        std::fill_n(scratch.sums.begin(), end - start, 0.0);
      }
      const bool skipped = allowed && here == next_allowed;
      for (List& list : lists) {
        int64_t i = list.next;
        if (skipped) i = std::lower_bound(docs + i, docs + list.end, end) - docs;
        for (; i < list.end && docs[i] < end; ++i) sums[docs[i]] += static_cast<double>(weights[i]) * list.value;
        list.next = i;
      }
      if (allowed) {
        for (const int64_t* id = here; id < next_allowed; ++id) {
          const float score = static_cast<float>(sums[*id - first]);
          if (!bounded || score > bound) found.push_back(key_of(score, *id));
        }
        if (static_cast<int64_t>(found.size()) >= most) keep();
        continue;
      }
      for (int64_t low = start; low < end; low += kBlock) {
        const int64_t high = std::min(low + kBlock, end);
        int above = !bounded;
        for (int64_t d = low; d < high; ++d) above |= sums[d] > bound;
        if (!above) continue;
        for (int64_t d = low; d < high; ++d) {
          const float score = static_cast<float>(sums[d]);
          if ((!bounded || score > bound) && !(barred && barred[d]))
            found.push_back(key_of(score, first + d));
        }
        if (static_cast<int64_t>(found.size()) >= most) keep();
      }
    }
    first += s->count;
    if (barred) barred += s->count;
  }
  if (static_cast<int64_t>(found.size()) > k) keep();
  std::sort(found.begin(), found.end(), std::greater<>());
}

}  // namespace

// Writes the keys of the k best documents of some segments to the row of each query in `best` [num_queries, k], the best
// first, padded with the least int64; rows are `stride` apart. finite: whether each query is finite; a query that is not
// has no results.
//
// segments: for each segment the number of its documents and the addresses of offsets [num_terms + 1], docs and weights
// [postings]. queries [num_queries, num_terms]. first: id of the first document. barred: null, or for each document whether
// it is excluded from the results. allowed: null, or, if they are few, the ascending ids of the documents that are not
// barred.
extern "C" void sparse_index_search(
    const Segment* segments, int64_t num_segments, const float* queries, int64_t num_queries, int64_t num_terms,
    int64_t first, const bool* barred, const int64_t* allowed, int64_t num_allowed, int64_t k, int64_t* best,
    int64_t stride, bool* finite) {
  Scratch scratch;
  for (int64_t q = 0; q < num_queries; ++q, best += stride) {
    const float* const query = queries + q * num_terms;
    finite[q] = find_terms(query, num_terms, scratch.terms);
    scratch.found.clear();
    if (finite[q] && k > 0) search(segments, num_segments, query, first, barred, allowed, num_allowed, k, scratch);
    int64_t* const end = std::copy(scratch.found.begin(), scratch.found.end(), best);
    std::fill(end, best + k, std::numeric_limits<int64_t>::min());
  }
}

// Writes the indices of the marks that are false, ascending.
extern "C" void sparse_index_unmarked(const bool* marks, int64_t count, int64_t* numbers) {
  for (int64_t low = 0; low < count; low += kBlock) {
    uint64_t words[kBlock / 8];
    std::memset(words, 1, sizeof words);
    if (low + kBlock <= count) {
      std::memcpy(words, marks + low, sizeof words);
    } else {
      std::memcpy(words, marks + low, count - low);
    }
    uint64_t bits = 0;
    for (int64_t i = 0; i < kBlock / 8; ++i)  // the product has the lowest bits of eight bytes in its highest byte
      bits |= ((words[i] ^ 0x0101010101010101u) * 0x0102040810204080u >> 56) << 8 * i;
    for (; bits; bits &= bits - 1) *numbers++ = low + __builtin_ctzll(bits);
  }
}

namespace {

// Adds to `sum` the products of the two halves of `words` 64-bit words, after adding to each half its 32-bit key and its
// element of `apart`.
void add_products(
    const char* data, int64_t words, const uint32_t* keys, const uint32_t apart[2], uint64_t* sum) {
  int64_t i = 0;
  uint64_t total = 0;
#ifdef __AVX2__
  const __m256i more = _mm256_set1_epi64x(static_cast<int64_t>(apart[1]) << 32 | apart[0]);
  __m256i totals = _mm256_setzero_si256();
  for (; i + 4 <= words; i += 4) {
    const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + 8 * i));
    const __m256i key = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys + 2 * i));
    const __m256i x = _mm256_add_epi32(word, _mm256_add_epi32(key, more));
    totals = _mm256_add_epi64(totals, _mm256_mul_epu32(x, _mm256_srli_epi64(x, 32)));
  }
  uint64_t lanes[4];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), totals);
  for (const uint64_t lane : lanes) total += lane;
#endif
  for (; i < words; ++i) {
    uint32_t half[2];
    std::memcpy(half, data + 8 * i, 8);
    const uint32_t low = half[0] + keys[2 * i] + apart[0], high = half[1] + keys[2 * i + 1] + apart[1];
    total += static_cast<uint64_t>(low) * high;
  }
  *sum += total;
}

}  // namespace

// Adds the two sums over tiles `first` to `last` - 1 of some bytes to `sums`, as defined in checksum.py; the last word is
// padded with 0. keys [2][size][2]: random, for tiles of `size` words.
extern "C" void sparse_index_checksum(
    const char* data, int64_t bytes, int64_t first, int64_t last, const uint32_t* keys, int64_t size,
    uint64_t* sums) {
  for (int64_t tile = first; tile < last; ++tile) {
    const char* const here = data + tile * size * 8;
    const int64_t rest = std::min(bytes - tile * size * 8, size * 8);
    const uint32_t number = static_cast<uint32_t>(tile);
    for (int s = 0; s < 2; ++s) {
      const uint32_t apart[2] = {number * (s ? 0x85EBCA77u : 0x9E3779B1u), number * (s ? 0x9E3779B1u : 0x85EBCA77u)};
      const uint32_t* const mine = keys + s * 2 * size;
      add_products(here, rest / 8, mine, apart, sums + s);
      if (rest % 8 == 0) continue;
      char last_word[8] = {};
      std::memcpy(last_word, here + rest / 8 * 8, rest % 8);
      add_products(last_word, 1, mine + rest / 8 * 2, apart, sums + s);
    }
  }
}
