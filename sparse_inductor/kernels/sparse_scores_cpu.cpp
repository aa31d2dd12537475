// Search of one segment of a SparseIndex for one query. Sums are fp64, in the order of the query's terms, and products
// are rounded before they are added (-ffp-contract=off): the bits are those of ATen's index_add_.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

namespace {

// A larger key is a better document: the score in the order of the numbers above, the id, turned round, below.
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
constexpr int64_t kBlock = 64;       // documents that are compared with the bound at once

}  // namespace

// Writes the keys of the k best of n documents to `best`, in no order, and returns how many there are.
//
// offsets [V + 1], docs and weights [postings]; terms and values [num_terms]: the query; barred [n] or null: documents
// that are in no result; first: the id of document 0.
extern "C" int64_t sparse_index_search(
    const int64_t* offsets, const int32_t* docs, const float* weights, const int64_t* terms,
    const double* values, int64_t num_terms, int64_t n, const bool* barred, int64_t first, int64_t k,
    int64_t* best) {
  // The best so far and those that may yet be among them; a score that is not above the bound comes too late.
  const int64_t most = std::max<int64_t>(4 * k, 1024);
  std::vector<int64_t> found;
  found.reserve(most + kBlock);
  double bound = -std::numeric_limits<double>::infinity();
  bool bounded = false;
  const auto keep = [&] {
    std::nth_element(found.begin(), found.begin() + (k - 1), found.end(), std::greater<>());
    found.resize(k);
    bound = score_of(*std::min_element(found.begin(), found.end()));
    bounded = true;
  };
  std::vector<double> scratch(std::min(n, kChunk));
  std::vector<int64_t> next(num_terms);
  for (int64_t t = 0; t < num_terms; ++t) next[t] = offsets[terms[t]];
  for (int64_t start = 0; start < n; start += kChunk) {
    const int64_t end = std::min(start + kChunk, n);
    std::fill(scratch.begin(), scratch.end(), 0.0);
    double* const sums = scratch.data() - start;
    for (int64_t t = 0; t < num_terms; ++t) {
      const double value = values[t];
      const int64_t last = offsets[terms[t] + 1];
      int64_t i = next[t];
      for (; i < last && docs[i] < end; ++i) sums[docs[i]] += static_cast<double>(weights[i]) * value;
      next[t] = i;
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
  if (static_cast<int64_t>(found.size()) > k) keep();
  std::copy(found.begin(), found.end(), best);
  return found.size();
}
