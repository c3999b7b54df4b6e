// `attention` and its gradients, against loops in float64.
#include "checks.h"

extern "C" {
XLA_FFI_Error* raggedmoe_attention(XLA_FFI_CallFrame*);
XLA_FFI_Error* raggedmoe_attention_gradients(XLA_FFI_CallFrame*);
}

namespace {

enum class Kind { CAUSAL, PACKED, CACHE };  // slots of the queries; of several segments; at positions of a cache

struct Case {
  std::string name;
  Kind kind;
  int64_t batch, queries, slots, heads, key_heads, width, value_width;  // B S L N M H W
  int64_t window = 0;
  bool sinks = false;
};

template <class T>
struct Operands {
  Array<T> query, key, value;
  Array<int32_t> positions, segments;
  Array<float> sinks;
};

int64_t integer(int64_t least, int64_t most) {
  return std::uniform_int_distribution<int64_t>(least, most)(random_numbers);
}

// Some positions see no slot, or are past all; segments come back after others, some are negative; some sinks
// are none, and some are all.
template <class T>
Operands<T> drawn_operands(const Case& c) {
  const int64_t B = c.batch, S = c.queries, L = c.slots;
  Operands<T> all{drawn<T>({B, S, c.heads, c.width}, 2),
                  drawn<T>({B, L, c.key_heads, c.width}, 2),
                  drawn<T>({B, L, c.key_heads, c.value_width}, 1),
                  Array<int32_t>(c.kind == Kind::CACHE ? std::vector<int64_t>{B, S} : std::vector<int64_t>{0}),
                  Array<int32_t>(c.kind == Kind::PACKED ? std::vector<int64_t>{B, S} : std::vector<int64_t>{0}),
                  drawn<float>({c.sinks ? c.heads : 0}, 4)};
  for (int64_t i = 0; i < all.positions.size(); ++i)
    all.positions[i] = i % 7 == 3 ? std::numeric_limits<int32_t>::max() : integer(-2, L + c.window + 1);
  for (int64_t i = 0; i < all.segments.size(); ++i)
    all.segments[i] = i % S == 0 || integer(0, 19) == 0 ? integer(-2, 2) : all.segments[i - 1];
  for (int64_t n = 0; n < all.sinks.size(); n += 2)
    all.sinks[n] = n % 4 ? 300 : -std::numeric_limits<float>::infinity();
  return all;
}

struct Expected {
  Exact out, logsumexp, dquery, dkey, dvalue;
};

double dot(const double* a, const double* b, int64_t length) {
  double sum = 0;
  for (int64_t i = 0; i < length; ++i) sum += a[i] * b[i];
  return sum;
}
void add(double scale, const double* from, double* to, int64_t length) {
  for (int64_t i = 0; i < length; ++i) to[i] += scale * from[i];
}

// One query at a time. The logsumexp of one that sees nothing is zero here.
template <class T>
Expected attend(const Case& c, const Operands<T>& operands, float scale, const Array<T>& cotangents) {
  const int64_t B = c.batch, S = c.queries, L = c.slots, N = c.heads, M = c.key_heads, H = c.width, W = c.value_width;
  const Exact query = exact(operands.query), key = exact(operands.key), value = exact(operands.value);
  const Exact cotangent = exact(cotangents);
  Expected expected{Exact(B * S * N * W), Exact(B * N * S), Exact(B * S * N * H), Exact(B * L * M * H), Exact(B * L * M * W)};
  for (int64_t i = 0; i < B * S * N; ++i) {
    const int64_t n = i % N, s = i / N % S, b = i / N / S;
    const int64_t position = c.kind == Kind::CACHE ? operands.positions[b * S + s] : s;
    const auto head_of_slot = [&](int64_t slot) { return (b * L + slot) * M + n / (N / M); };
    std::vector<int64_t> seen;
    Exact weights;
    double total = c.sinks ? std::exp(double(operands.sinks[n])) : 0;
    for (int64_t slot = 0; slot < L && slot <= position; ++slot) {
      if (c.window > 0 && position - slot >= c.window) continue;
      if (c.kind == Kind::PACKED && operands.segments[b * S + s] != operands.segments[b * S + slot]) continue;
      seen.push_back(slot);
      weights.push_back(std::exp(scale * dot(&query[i * H], &key[head_of_slot(slot) * H], H)));
      total += weights.back();
    }
    if (seen.empty()) continue;
    expected.logsumexp[(b * N + n) * S + s] = std::log(total);
    for (size_t j = 0; j < seen.size(); ++j)
      add(weights[j] /= total, &value[head_of_slot(seen[j]) * W], &expected.out[i * W], W);
    const double mean = dot(&cotangent[i * W], &expected.out[i * W], W);
    for (size_t j = 0; j < seen.size(); ++j) {
      const int64_t head = head_of_slot(seen[j]);
      const double slope = scale * weights[j] * (dot(&cotangent[i * W], &value[head * W], W) - mean);
      add(slope, &key[head * H], &expected.dquery[i * H], H);
      add(slope, &query[i * H], &expected.dkey[head * H], H);
      add(weights[j], &cotangent[i * W], &expected.dvalue[head * W], W);
    }
  }
  return expected;
}

template <class T>
void check(const Case& c) {
  Operands<T> operands = drawn_operands<T>(c);
  Array<T> cotangent = drawn<T>({c.batch, c.queries, c.heads, c.value_width}, 1);
  Array<float> logsumexp({c.batch, c.heads, c.queries});
  const float scale = 1 / std::sqrt(float(c.width));
  const auto call = [&](Pool& pool) {
    Call all(pool);
    all.operand(operands.query).operand(operands.key).operand(operands.value);
    all.operand(operands.positions).operand(operands.segments).operand(operands.sinks);
    return all.attribute("scale", scale).attribute("window", c.window);
  };
  const auto forward = [&](Pool& pool, Array<float>& sums) {
    std::vector<Array<T>> out;
    out.emplace_back(cotangent.dims);
    call(pool).result(out[0]).result(sums).run(raggedmoe_attention);
    return out;
  };
  auto out = same_with_any_threads(c.name, "attention", [&](Pool& pool) {
    Array<float> sums(logsumexp.dims);
    return forward(pool, sums);
  });
  Pool pool(2);
  forward(pool, logsumexp);
  const auto gradients = same_with_any_threads(c.name, "gradients of attention", [&](Pool& pool) {
    std::vector<Array<T>> results;
    for (const Array<T>* array : {&operands.query, &operands.key, &operands.value}) results.emplace_back(array->dims);
    Call all = call(pool);
    all.operand(out[0]).operand(logsumexp).operand(cotangent);
    for (Array<T>& array : results) all.result(array);
    all.run(raggedmoe_attention_gradients);
    return results;
  });

  const Expected expected = attend(c, operands, scale, cotangent);
  for (int64_t i = 0; i < logsumexp.size(); ++i)
    if (logsumexp[i] == std::numeric_limits<float>::infinity()) logsumexp[i] = 0;
  expect_close(c.name, "attention", out[0], expected.out, TOLERANCE<T>);
  expect_close(c.name, "logsumexp", logsumexp, expected.logsumexp, TOLERANCE<float>);
  // With one slot to see, the slope of its score is a difference of equal sums, zero but for rounding.
  expect_close(c.name, "dquery", gradients[0], expected.dquery, 2 * TOLERANCE<T>, false);
  expect_close(c.name, "dkey", gradients[1], expected.dkey, 2 * TOLERANCE<T>, false);
  expect_close(c.name, "dvalue", gradients[2], expected.dvalue, 2 * TOLERANCE<T>);
}

}  // namespace

int check_attention(int num_random) {
  std::vector<Case> all = {
      {"one query of one slot", Kind::CAUSAL, 1, 1, 1, 1, 1, 1, 1},
      {"decoding with grouped heads", Kind::CACHE, 3, 1, 45, 6, 2, 24, 17, 0, true},
      {"decoding with many heads to a key", Kind::CACHE, 2, 1, 70, 12, 1, 33, 16, 9},
      {"several blocks of queries", Kind::CAUSAL, 1, 261, 261, 2, 1, 19, 8},
      {"several blocks and a window", Kind::CAUSAL, 2, 150, 150, 2, 2, 8, 5, 13, true},
      {"several blocks of segments", Kind::PACKED, 2, 270, 270, 2, 1, 5, 9, 0, true},
      {"segments and a window", Kind::PACKED, 1, 140, 140, 1, 1, 16, 16, 3},
      {"several blocks in a cache", Kind::CACHE, 1, 131, 67, 4, 2, 16, 21, 0, true},
      {"more slots than a panel is deep", Kind::CACHE, 1, 9, 300, 2, 2, 40, 36, 280},
  };
  for (int number = 0; number < num_random; ++number) {
    const int64_t key_heads = integer(1, 3), queries = integer(0, 3) == 0 ? 1 : integer(1, 60);
    Case c{"random attention " + std::to_string(number), Kind(integer(0, 2)), integer(1, 3), queries, queries,
           key_heads * integer(1, 4), key_heads, integer(1, 40), integer(1, 40)};
    if (c.kind == Kind::CACHE) c.slots = integer(1, 90);
    c.window = integer(0, 1) * integer(1, 30), c.sinks = integer(0, 1);
    all.push_back(c);
  }
  for (const Case& c : all) {
    check<float>(c);
    check<BFloat16>(c);
  }
  return all.size();
}
