// What the checks of all kernels need: random arrays, comparison with float64, and calls with any number of threads.
#pragma once

#include <atomic>
#include <cmath>
#include <random>

#include "xla_calls.h"

using Exact = std::vector<double>;

inline thread_local std::mt19937 random_numbers(1);

template <class T>
Array<T> drawn(std::vector<int64_t> dims, float scale) {
  Array<T> array(std::move(dims));
  std::uniform_real_distribution<float> uniform(-scale, scale);
  for (int64_t i = 0; i < array.size(); ++i) from_float(uniform(random_numbers), array[i]);
  return array;
}

inline Array<int32_t> integers(const std::vector<int32_t>& values, std::vector<int64_t> dims) {
  Array<int32_t> array(std::move(dims));
  for (int64_t i = 0; i < array.size(); ++i) array[i] = values[i];
  return array;
}

template <class T>
Exact exact(const Array<T>& array) {
  Exact numbers(array.size());
  for (int64_t i = 0; i < array.size(); ++i) numbers[i] = to_float(array[i]);
  return numbers;
}

inline std::atomic<int> failures{0};

// Where zero is expected, the result must be zero too, unless its zeros are rounded.
template <class T>
void expect_close(const std::string& name, const char* what, const Array<T>& found, const Exact& expected,
                  double tolerance, bool zeros_are_exact = true) {
  double largest = 1;
  for (double number : expected) largest = std::max(largest, std::abs(number));
  for (int64_t i = 0; i < found.size(); ++i) {
    const double difference = std::abs(to_float(found[i]) - expected[i]);
    const bool zero = zeros_are_exact && expected[i] == 0;
    if (difference <= (zero ? 0 : tolerance * largest)) continue;
    std::fprintf(stderr, "%s, %s: %g at %ld, expected %g\n", name.c_str(), what, to_float(found[i]), long(i), expected[i]);
    ++failures;
    return;
  }
}

template <class T>
constexpr double TOLERANCE = std::is_same_v<T, float> ? 2e-5 : 3e-2;

// Runs a call with one thread, and twice at once with several: the bits must agree.
template <class Run>
auto same_with_any_threads(const std::string& name, const char* what, Run run) {
  static Pool one(1), several(4);
  auto results = run(one);
  const auto compare = [&](const decltype(results)& others) {
    for (size_t i = 0; i < results.size(); ++i)
      if (!results[i].same_bits(others[i])) {
        std::fprintf(stderr, "%s, %s: result %zu has other bits with other threads\n", name.c_str(), what, i);
        ++failures;
      }
  };
  std::thread other([&] { compare(run(several)); });
  compare(run(several));
  other.join();
  return results;
}
