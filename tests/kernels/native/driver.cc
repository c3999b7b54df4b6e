// Calls every kernel on regular and on random ragged cases, against loops in float64, for sanitizers to watch: results
// must be right, and the same bits with one thread, with several, and under calls at the same time. test_driver.py
// builds and runs it.
#include <fstream>

#include "checks.h"

extern "C" {
XLA_FFI_Error* raggedmoe_grouped_matmul(XLA_FFI_CallFrame*);
XLA_FFI_Error* raggedmoe_transposed_matmul(XLA_FFI_CallFrame*);
XLA_FFI_Error* raggedmoe_expert_ffn(XLA_FFI_CallFrame*);
XLA_FFI_Error* raggedmoe_expert_ffn_gradients(XLA_FFI_CallFrame*);
XLA_FFI_Error* raggedmoe_gather(XLA_FFI_CallFrame*);
XLA_FFI_Error* raggedmoe_gather_reduce(XLA_FFI_CallFrame*);
XLA_FFI_Error* raggedmoe_row_dots(XLA_FFI_CallFrame*);
const char* raggedmoe_isa();
}
int check_attention(int num_random);  // check_attention.cc; returns how many cases
int check_quantized();                // check_quantized.cc; likewise
int check_errors();                   // check_errors.cc

namespace {

// R rows, of which those before the first bound and from the last one on are in no group; D and F wide.
struct Case {
  std::string name;
  std::vector<int32_t> bounds;
  int64_t rows, width, hidden;
  int64_t activation = 0;
  bool gated = true, biased = false;
  int64_t groups() const { return static_cast<int64_t>(bounds.size()) - 1; }
};

// Rows of no group hold NaN, which must reach nothing.
template <class T>
Array<T> drawn_rows(const Case& c, int64_t width) {
  Array<T> rows = drawn<T>({c.rows, width}, 1.0f);
  for (int64_t i = 0; i < c.rows * width; ++i)
    if (i / width < c.bounds.front() || i / width >= c.bounds.back()) from_float(NAN, rows[i]);
  return rows;
}

// out[r, j] = sum_i a[r, i] b[g, i, j], or with b[g, j, i], of the rows of groups.
Exact multiply(const Case& c, const Exact& a, const Exact& b, int64_t inner, int64_t outer, bool transposed) {
  Exact out(c.rows * outer);
  for (int64_t g = 0; g < c.groups(); ++g)
    for (int64_t r = c.bounds[g]; r < c.bounds[g + 1]; ++r)
      for (int64_t i = 0; i < inner; ++i) {
        const double x = a[r * inner + i];
        const double* from = b.data() + g * inner * outer + (transposed ? i : i * outer);
        for (int64_t j = 0; j < outer; ++j) out[r * outer + j] += x * from[transposed ? j * inner : j];
      }
  return out;
}
// out[g, i, j] = sum over the group's rows of a[r, i] b[r, j].
Exact multiply_transposed(const Case& c, const Exact& a, const Exact& b, int64_t inner, int64_t outer) {
  Exact out(c.groups() * inner * outer);
  for (int64_t g = 0; g < c.groups(); ++g)
    for (int64_t r = c.bounds[g]; r < c.bounds[g + 1]; ++r)
      for (int64_t i = 0; i < inner; ++i)
        for (int64_t j = 0; j < outer; ++j) out[(g * inner + i) * outer + j] += a[r * inner + i] * b[r * outer + j];
  return out;
}

template <class T, class Out>
void check_grouped_matmul(const Case& c, bool transposed) {
  Array<T> lhs = drawn_rows<T>(c, c.width);
  Array<T> rhs = transposed ? drawn<T>({c.groups(), c.hidden, c.width}, 1) : drawn<T>({c.groups(), c.width, c.hidden}, 1);
  Array<int32_t> bounds = integers(c.bounds, {c.groups() + 1});
  const auto run = [&](Pool& pool) {
    std::vector<Array<Out>> out;
    out.emplace_back(std::vector<int64_t>{c.rows, c.hidden});
    Call(pool).operand(lhs).operand(rhs).operand(bounds).result(out[0]).attribute("transpose_rhs", transposed).run(
        raggedmoe_grouped_matmul);
    return out;
  };
  const Exact expected = multiply(c, exact(lhs), exact(rhs), c.width, c.hidden, transposed);
  const char* what = transposed ? "grouped_matmul, transposed" : "grouped_matmul";
  expect_close(c.name, what, same_with_any_threads(c.name, what, run)[0], expected, TOLERANCE<Out>);
}

template <class T, class Out>
void check_transposed_matmul(const Case& c) {
  Array<T> lhs = drawn_rows<T>(c, c.width), rhs = drawn_rows<T>(c, c.hidden);
  Array<int32_t> bounds = integers(c.bounds, {c.groups() + 1});
  const auto run = [&](Pool& pool) {
    std::vector<Array<Out>> out;
    out.emplace_back(std::vector<int64_t>{c.groups(), c.width, c.hidden});
    Call(pool).operand(lhs).operand(rhs).operand(bounds).result(out[0]).run(raggedmoe_transposed_matmul);
    return out;
  };
  const Exact expected = multiply_transposed(c, exact(lhs), exact(rhs), c.width, c.hidden);
  expect_close(c.name, "transposed_matmul", same_with_any_threads(c.name, "transposed_matmul", run)[0], expected, TOLERANCE<Out>);
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// The gate's factor of an activation, as expert_ffn/activations.py has it; the other factor; slopes by differences.
double of_gate(int64_t kind, double x) {
  switch (kind) {
    case 0: return x * sigmoid(x);
    case 1: return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    case 2: return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case 3: return x > 0 ? x * x : 0;
    default: return std::min(x, 7.0) * sigmoid(1.702 * std::min(x, 7.0));
  }
}
double of_up(int64_t kind, double x) { return kind == 4 ? 1 + std::min(std::max(x, -7.0), 7.0) : x; }
double slope(double (*function)(int64_t, double), int64_t kind, double x) {
  return (function(kind, x + 1e-5) - function(kind, x - 1e-5)) / 2e-5;
}

template <class T>
void check_expert_ffn(const Case& c) {
  const int64_t G = c.groups(), D = c.width, F = c.hidden;
  const float wide = 2 / std::sqrt(float(D)), deep = 2 / std::sqrt(float(F));
  const auto optional = [](bool there, std::vector<int64_t> dims, float scale) {
    return drawn<T>(there ? dims : std::vector<int64_t>{0}, scale);
  };
  Array<T> rows = drawn_rows<T>(c, D), cotangent = drawn_rows<T>(c, D);
  Array<T> wi_0 = drawn<T>({G, F, D}, wide), wi_1 = optional(c.gated, {G, F, D}, wide), wo = drawn<T>({G, F, D}, deep);
  Array<T> bias_0 = optional(c.biased, {G, F}, 1), bias_1 = optional(c.biased && c.gated, {G, F}, 1);
  Array<T> bias_wo = optional(c.biased, {G, D}, 1);
  Array<int32_t> bounds = integers(c.bounds, {G + 1});
  const auto operands = [&](Call& call) -> Call& {
    return call.operand(rows).operand(wi_0).operand(wi_1).operand(wo).operand(bias_0).operand(bias_1).operand(bias_wo)
        .operand(bounds);
  };
  const auto forward = [&](Pool& pool, bool keep) {
    std::vector<Array<T>> out;
    out.emplace_back(std::vector<int64_t>{c.rows, D});
    out.emplace_back(keep ? std::vector<int64_t>{c.rows, F} : std::vector<int64_t>{0});
    out.emplace_back(keep && c.gated ? std::vector<int64_t>{c.rows, F} : std::vector<int64_t>{0});
    Call call(pool);
    operands(call).result(out[0]).result(out[1]).result(out[2]).attribute("activation", c.activation).run(
        raggedmoe_expert_ffn);
    return out;
  };
  auto kept = same_with_any_threads(c.name, "expert_ffn, keeping", [&](Pool& pool) { return forward(pool, true); });
  auto plain = same_with_any_threads(c.name, "expert_ffn", [&](Pool& pool) { return forward(pool, false); });
  const auto gradients = [&](Pool& pool, Array<T>& gate, Array<T>& up) {
    std::vector<Array<T>> out;
    for (const Array<T>* array : {&rows, &wi_0, &wi_1, &wo, &bias_0, &bias_1, &bias_wo}) out.emplace_back(array->dims);
    Call call(pool);
    operands(call).operand(gate).operand(up).operand(cotangent);
    for (Array<T>& array : out) call.result(array);
    call.attribute("activation", c.activation).run(raggedmoe_expert_ffn_gradients);
    return out;
  };
  const auto of_kept = same_with_any_threads(
      c.name, "gradients of kept", [&](Pool& pool) { return gradients(pool, kept[1], kept[2]); });
  const auto of_none = same_with_any_threads(
      c.name, "gradients", [&](Pool& pool) { return gradients(pool, plain[1], plain[2]); });

  const auto add_bias = [&](Exact& sums, const Array<T>& bias, int64_t width) {
    if (bias.size() == 0) return;
    for (int64_t g = 0; g < G; ++g)
      for (int64_t r = c.bounds[g]; r < c.bounds[g + 1]; ++r)
        for (int64_t i = 0; i < width; ++i) sums[r * width + i] += to_float(bias[g * width + i]);
  };
  Exact gate = multiply(c, exact(rows), exact(wi_0), D, F, true), up(c.rows * F), hidden(c.rows * F);
  add_bias(gate, bias_0, F);
  if (c.gated) up = multiply(c, exact(rows), exact(wi_1), D, F, true);
  add_bias(up, bias_1, F);
  const Exact dhidden = multiply(c, exact(cotangent), exact(wo), D, F, true);
  Exact dgate(c.rows * F), dup(c.rows * F);
  for (int64_t i = c.bounds.front() * F; i < c.bounds.back() * F; ++i) {
    const double first = of_gate(c.activation, gate[i]), second = c.gated ? of_up(c.activation, up[i]) : 1;
    hidden[i] = first * second;
    dgate[i] = dhidden[i] * second * slope(of_gate, c.activation, gate[i]);
    dup[i] = c.gated ? dhidden[i] * first * slope(of_up, c.activation, up[i]) : 0;
  }
  Exact out = multiply(c, hidden, exact(wo), F, D, false);
  add_bias(out, bias_wo, D);
  const double tolerance = 2 * TOLERANCE<T>;
  expect_close(c.name, "expert_ffn", plain[0], out, tolerance);
  expect_close(c.name, "expert_ffn, keeping", kept[0], out, tolerance);
  Exact drows = multiply(c, dgate, exact(wi_0), F, D, false);
  if (c.gated) {
    const Exact second = multiply(c, dup, exact(wi_1), F, D, false);
    for (size_t i = 0; i < drows.size(); ++i) drows[i] += second[i];
  }
  const auto sums_of_groups = [&](const Exact& from, int64_t width) {
    return multiply_transposed(c, Exact(c.rows, 1.0), from, 1, width);
  };
  const Exact expected[] = {drows,
                            multiply_transposed(c, dgate, exact(rows), F, D),
                            multiply_transposed(c, dup, exact(rows), F, D),
                            multiply_transposed(c, hidden, exact(cotangent), F, D),
                            sums_of_groups(dgate, F),
                            sums_of_groups(dup, F),
                            sums_of_groups(exact(cotangent), D)};
  const char* names[] = {"drows", "dwi_0", "dwi_1", "dwo", "dbias_wi_0", "dbias_wi_1", "dbias_wo"};
  for (int i = 0; i < 7; ++i) {
    expect_close(c.name, names[i], of_kept[i], expected[i], 2 * tolerance);
    expect_close(c.name, names[i], of_none[i], expected[i], 2 * tolerance);
  }
}

// Tokens' rows gathered and summed, with indices out of range, over the rows of [first bound, last bound).
template <class T>
void check_gathers(const Case& c, bool weighted) {
  const int64_t num_tokens = std::max<int64_t>(1, c.rows / 3), slots = 3, D = c.width;
  std::uniform_int_distribution<int32_t> token(-2, num_tokens + 1), row(-2, c.rows + 1);
  std::vector<int32_t> from_token(c.rows), from_row(num_tokens * slots);
  for (int32_t& index : from_token) index = token(random_numbers);
  for (int32_t& index : from_row) index = row(random_numbers);
  const int32_t first = c.bounds.front(), last = c.bounds.back();
  Array<T> x = drawn<T>({num_tokens, D}, 1), rows = drawn_rows<T>(c, D);
  Array<int32_t> tokens = integers(from_token, {c.rows}), indices = integers(from_row, {num_tokens, slots});
  Array<int32_t> range = integers({first, last}, {2});
  Array<float> row_weights = drawn<float>({weighted ? c.rows : 0}, 1);
  Array<float> slot_weights = weighted ? drawn<float>({num_tokens, slots}, 1) : drawn<float>({0}, 1);
  const Exact exact_x = exact(x), exact_rows = exact(rows);

  const auto gather = [&](Pool& pool) {
    std::vector<Array<T>> out;
    out.emplace_back(std::vector<int64_t>{c.rows, D});
    Call(pool).operand(x).operand(tokens).operand(range).operand(row_weights).result(out[0]).run(raggedmoe_gather);
    return out;
  };
  Exact gathered(c.rows * D), reduced(num_tokens * D), dots(num_tokens * slots);
  for (int64_t r = first; r < last; ++r)
    if (from_token[r] >= 0 && from_token[r] < num_tokens)
      for (int64_t d = 0; d < D; ++d)
        gathered[r * D + d] = exact_x[from_token[r] * D + d] * (weighted ? row_weights[r] : 1);
  expect_close(c.name, "gather", same_with_any_threads(c.name, "gather", gather)[0], gathered, TOLERANCE<T>);

  const auto reduce = [&](Pool& pool) {
    std::vector<Array<T>> out;
    out.emplace_back(std::vector<int64_t>{num_tokens, D});
    Call(pool).operand(rows).operand(indices).operand(range).operand(slot_weights).result(out[0]).run(
        raggedmoe_gather_reduce);
    return out;
  };
  const auto row_dots = [&](Pool& pool) {
    std::vector<Array<float>> out;
    out.emplace_back(std::vector<int64_t>{num_tokens, slots});
    Call(pool).operand(rows).operand(indices).operand(range).operand(x).result(out[0]).attribute("range_of_lines", false)
        .run(raggedmoe_row_dots);
    return out;
  };
  for (int64_t s = 0; s < num_tokens * slots; ++s)
    if (from_row[s] >= first && from_row[s] < last)
      for (int64_t d = 0; d < D; ++d) {
        const double value = exact_rows[from_row[s] * D + d];
        reduced[s / slots * D + d] += value * (weighted ? slot_weights[s] : 1);
        dots[s] += value * exact_x[s / slots * D + d];
      }
  expect_close(c.name, "gather_reduce", same_with_any_threads(c.name, "gather_reduce", reduce)[0], reduced, TOLERANCE<T>);
  expect_close(c.name, "row_dots", same_with_any_threads(c.name, "row_dots", row_dots)[0], dots, TOLERANCE<float>);
}

template <class T>
void check(const Case& c) {
  check_grouped_matmul<T, T>(c, false);
  check_grouped_matmul<T, float>(c, true);
  check_transposed_matmul<T, T>(c);
  check_transposed_matmul<T, float>(c);
  check_expert_ffn<T>(c);
  check_gathers<T>(c, c.gated);
}

std::vector<Case> cases(int num_random) {
  std::vector<Case> all = {
      {"one row", {0, 1}, 1, 8, 16},
      {"no rows", {0, 0, 0}, 0, 8, 16},
      {"rows of no group alone", {0, 0, 0}, 5, 8, 16, 1},
      {"all rows to one of four", {0, 0, 0, 70, 70}, 70, 48, 40, 2, true, true},
      {"empty groups and spare rows", {0, 9, 9, 17, 17, 30}, 41, 33, 17, 4, true, true},
      {"an offset", {11, 20, 31}, 40, 24, 32, 3, false, true},
      {"widths of one", {0, 3, 7}, 9, 1, 1, 0, true, true},
      {"few rows for each", {0, 1, 3, 6, 10, 15, 21, 28}, 28, 67, 131, 0},
      {"several blocks and tiles", {0, 259, 259, 276}, 281, 258, 261, 4, true, true},
      {"many blocks", {0, 20, 40, 60, 80, 100, 120, 140, 160}, 160, 40, 300, 1, false, false},
  };
  for (int number = 0; number < num_random; ++number) {
    const auto upto = [](int64_t most) { return std::uniform_int_distribution<int64_t>(0, most)(random_numbers); };
    Case c{"random " + std::to_string(number), {static_cast<int32_t>(upto(1) * upto(9))}, 0, 1 + upto(80), 1 + upto(80)};
    for (int64_t groups = 1 + upto(7); groups > 0; --groups)
      c.bounds.push_back(c.bounds.back() + upto(1) * upto(upto(1) ? 8 : 60));
    c.rows = c.bounds.back() + upto(1) * upto(7);
    c.activation = number % 5, c.gated = upto(3) != 0, c.biased = upto(1);
    all.push_back(c);
  }
  return all;
}

// Those of a file, a line each: sizes, numbers of the activation, gates and biases, the number of bounds, they, a name.
std::vector<Case> cases_of(const char* path) {
  std::vector<Case> all;
  std::ifstream file(path);
  for (Case c; file >> c.rows >> c.width >> c.hidden >> c.activation >> c.gated >> c.biased; all.push_back(c)) {
    size_t num_bounds = 0;
    file >> num_bounds;
    c.bounds.resize(num_bounds);
    for (int32_t& bound : c.bounds) file >> bound;
    file >> c.name;
  }
  return all;
}

}  // namespace

// The number of random cases, and a file of others.
int main(int, char** arguments) {
  const int num_random = std::atoi(arguments[1]);
  std::vector<Case> all = cases(num_random);
  for (Case& c : cases_of(arguments[2])) all.push_back(std::move(c));
  for (const Case& c : all) {
    check<float>(c);
    check<BFloat16>(c);
  }
  const size_t of_others = check_attention(num_random) + check_quantized() + check_errors();
  std::printf("%zu cases with %s: %d failures\n", all.size() + of_others, raggedmoe_isa(), failures.load());
  return failures == 0 ? 0 : 1;
}
