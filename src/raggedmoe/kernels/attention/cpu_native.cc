// `attention` and its gradients: cpu_native.py calls them through XLA's FFI.
//
// A block of queries of one head is multiplied by the keys that any of them sees, and by no others; its scores stay in
// cache. With a single query for each sequence, as in decoding, a block is the query heads that share a key head.
#include <cmath>
#include <limits>
#include <vector>

#include "matmul_types.h"
#include "parallel.h"
#include "xla_call.h"

namespace raggedmoe {
namespace {

constexpr int64_t BLOCK_QUERIES = 64;

struct AttentionScratch {
  Scratch tile;
  Memory scores, weights, dweights, slopes, sums, dkey, dvalue;
};
thread_local AttentionScratch scratch;

template <class T>
struct Call {
  int64_t batch, queries, slots, heads, key_heads, width, value_width;  // B S L N M H W
  const T *query, *key, *value;
  const int32_t *positions, *segments;  // null: query i is at position i; all are of one segment
  const float* sinks;                   // null: there are none
  float scale;
  int64_t window;  // 0: none

  int64_t position(int64_t b, int64_t s) const { return positions == nullptr ? s : positions[b * queries + s]; }
  int64_t heads_of_key() const { return heads / key_heads; }
  bool decodes() const { return queries == 1; }
};

// Some queries of a head, or, with one query for each sequence, the heads that share a key head.
struct Block {
  int64_t batch, head, first, last, num_rows;
};

template <class T>
std::vector<Block> blocks_of(const Call<T>& call, int64_t b, int64_t key_head) {
  std::vector<Block> blocks;
  const int64_t group = call.heads_of_key();
  if (call.decodes()) return {{b, key_head * group, 0, 1, group}};
  for (int64_t head = key_head * group; head < (key_head + 1) * group; ++head)
    for (int64_t s = 0; s < call.queries; s += BLOCK_QUERIES) {
      const int64_t last = std::min(s + BLOCK_QUERIES, call.queries);
      blocks.push_back({b, head, s, last, last - s});
    }
  return blocks;
}

// The slots that a query, or any of a block's queries, sees; beside their segments.
struct Range {
  int64_t first, last;
};
template <class T>
Range range_of_query(const Call<T>& call, int64_t b, int64_t s) {
  const int64_t position = call.position(b, s), last = std::min(position + 1, call.slots);
  const int64_t first = call.window == 0 ? 0 : std::max<int64_t>(0, position - call.window + 1);
  return {std::min(first, std::max<int64_t>(last, 0)), std::max<int64_t>(last, 0)};
}
template <class T>
Range range_of_block(const Call<T>& call, const Block& block) {
  Range all{call.slots, 0};
  for (int64_t s = block.first; s < block.last; ++s) {
    const Range one = range_of_query(call, block.batch, s);
    if (one.first < one.last) all = {std::min(all.first, one.first), std::max(all.last, one.last)};
  }
  if (all.first >= all.last) return {0, 0};
  if (call.segments != nullptr) {
    const int32_t* segments = call.segments + block.batch * call.queries;
    const auto [least, most] = std::minmax_element(segments + block.first, segments + block.last);
    while (all.first < all.last && (segments[all.first] < *least || segments[all.first] > *most)) ++all.first;
  }
  return all;
}

// Where a block's rows begin in an array [B S N width], and how far they are apart.
template <class T, class Number>
Line<Number> rows_of(const Call<T>& call, const Block& block, Number* array, int64_t width) {
  const int64_t token = block.batch * call.queries + block.first;
  return {array + (token * call.heads + block.head) * width, call.decodes() ? width : call.heads * width};
}

template <class T>
SoftmaxRow softmax_row(const Call<T>& call, const Block& block, int64_t row, const Range& range) {
  const int64_t s = block.first + (call.decodes() ? 0 : row);
  const Range own = range_of_query(call, block.batch, s);
  const int32_t* segments = call.segments == nullptr ? nullptr : call.segments + block.batch * call.queries;
  return {std::max<int64_t>(own.first - range.first, 0), std::min(own.last, range.last) - range.first,
          range.last - range.first, call.scale, segments == nullptr ? nullptr : segments + range.first,
          segments == nullptr ? 0 : segments[s]};
}

// scores[row, slot] of a block for the slots of a range.
template <class T>
float* scores_of(const Call<T>& call, const Block& block, const Range& range) {
  const int64_t length = range.last - range.first, key_line = call.key_heads * call.width;
  const int64_t key_head = block.head / call.heads_of_key();
  float* scores = scratch.scores.at_least(block.num_rows * length);
  const Line<const T> query = rows_of(call, block, call.query, call.width);
  const T* key = call.key + (block.batch * call.slots + range.first) * key_line + key_head * call.width;
  const Product<T> product{{query.data, query.row, 1}, {key, 1, key_line}, call.width};
  kernels<T>().multiply_pair(product, nullptr, block.num_rows, length, scores, nullptr, length, scratch.tile);
  return scores;
}

template <class T>
void attend(const Call<T>& call, const Block& block, T* out, float* logsumexp) {
  const Kernels<T>& tile = kernels<T>();
  const Range range = range_of_block(call, block);
  const int64_t length = range.last - range.first, W = call.value_width, value_line = call.key_heads * W;
  const Line<T> to = rows_of(call, block, out, W);
  float* sums = scratch.sums.at_least(block.num_rows * W);
  std::vector<float> totals(block.num_rows, 0.0f);
  const auto head_of = [&](int64_t row) { return block.head + (call.decodes() ? row : 0); };
  const auto sum_of = [&](int64_t row) -> float& {
    const int64_t s = block.first + (call.decodes() ? 0 : row);
    return logsumexp[(block.batch * call.heads + head_of(row)) * call.queries + s];
  };
  if (length > 0) {
    const float* scores = scores_of(call, block, range);
    T* weights = reinterpret_cast<T*>(scratch.weights.at_least(block.num_rows * length));
    for (int64_t row = 0; row < block.num_rows; ++row) {
      const float sink = call.sinks == nullptr ? -std::numeric_limits<float>::infinity() : call.sinks[head_of(row)];
      float peak = sink;
      const SoftmaxRow slots = softmax_row(call, block, row, range);
      totals[row] = tile.softmax(slots, scores + row * length, weights + row * length, &peak);
      // Also where a sink is so high that no weight is left, or infinite.
      if (slots.begin < slots.end && sink != -std::numeric_limits<float>::infinity()) totals[row] += std::exp(sink - peak);
      sum_of(row) = totals[row] == 0 ? std::numeric_limits<float>::infinity() : peak + std::log(totals[row]);
    }
    const T* value = call.value + (block.batch * call.slots + range.first) * value_line +
                     block.head / call.heads_of_key() * W;
    const Product<T> product{{weights, length, 1}, {value, value_line, 1}, length};
    tile.multiply_wide(&product, 1, block.num_rows, W, sums, W, scratch.tile);
  } else {
    for (int64_t row = 0; row < block.num_rows; ++row) sum_of(row) = std::numeric_limits<float>::infinity();
  }
  for (int64_t row = 0; row < block.num_rows; ++row) {
    T* line = to.data + row * to.row;
    if (totals[row] == 0) {
      std::memset(static_cast<void*>(line), 0, W * sizeof(T));
      continue;
    }
    for (int64_t i = 0; i < W; ++i) sums[row * W + i] /= totals[row];
    tile.narrow(sums + row * W, line, W);
  }
}

template <class T>
void attend_all(ffi::ThreadPool& pool, const Call<T>& call, T* out, float* logsumexp) {
  std::vector<Block> blocks;
  for (int64_t b = 0; b < call.batch; ++b)
    for (int64_t m = 0; m < call.key_heads; ++m)
      for (const Block& block : blocks_of(call, b, m)) blocks.push_back(block);
  parallel_for(pool, blocks.size(), [&](int64_t i) { attend(call, blocks[i], out, logsumexp); });
}

template <class T>
struct Cotangents {
  const T *out, *cotangent;
  const float* logsumexp;
  T *dquery, *dkey, *dvalue;
};

// All gradients of a key head: those of its keys and values are sums over the query heads that read it.
template <class T>
void differentiate(const Call<T>& call, const Cotangents<T>& with, int64_t b, int64_t key_head) {
  const Kernels<T>& tile = kernels<T>();
  const int64_t H = call.width, W = call.value_width, L = call.slots;
  const int64_t key_line = call.key_heads * H, value_line = call.key_heads * W;
  float *dkey = scratch.dkey.at_least(L * H), *dvalue = scratch.dvalue.at_least(L * W);
  std::fill_n(dkey, L * H, 0.0f);
  std::fill_n(dvalue, L * W, 0.0f);
  for (const Block& block : blocks_of(call, b, key_head)) {
    const Range range = range_of_block(call, block);
    const int64_t length = range.last - range.first;
    const Line<T> dquery = rows_of(call, block, with.dquery, H);
    if (length == 0) {
      for (int64_t row = 0; row < block.num_rows; ++row)
        std::memset(static_cast<void*>(dquery.data + row * dquery.row), 0, H * sizeof(T));
      continue;
    }
    const float* scores = scores_of(call, block, range);
    T* weights = reinterpret_cast<T*>(scratch.weights.at_least(block.num_rows * length));
    T* slopes = reinterpret_cast<T*>(scratch.slopes.at_least(block.num_rows * length));
    float* dweights = scratch.dweights.at_least(block.num_rows * length);
    const Line<const T> cotangent = rows_of(call, block, with.cotangent, W), out = rows_of(call, block, with.out, W);
    const T* value = call.value + (b * L + range.first) * value_line + key_head * W;
    const T* key = call.key + (b * L + range.first) * key_line + key_head * H;
    const Product<T> by_value{{cotangent.data, cotangent.row, 1}, {value, 1, value_line}, W};
    tile.multiply_pair(by_value, nullptr, block.num_rows, length, dweights, nullptr, length, scratch.tile);
    for (int64_t row = 0; row < block.num_rows; ++row) {
      const int64_t head = block.head + (call.decodes() ? row : 0), s = block.first + (call.decodes() ? 0 : row);
      const float sum = with.logsumexp[(b * call.heads + head) * call.queries + s];
      const float mean = tile.dot(cotangent.data + row * cotangent.row, out.data + row * out.row, W);
      tile.softmax_slopes(softmax_row(call, block, row, range), scores + row * length, dweights + row * length, sum, mean,
                          weights + row * length, slopes + row * length);
    }
    const auto add_product = [&](const T* left, const T* right, int64_t right_row, int64_t width, float* to) {
      float* sums = scratch.sums.at_least(length * width);
      const Product<T> product{{left, 1, length}, {right, right_row, 1}, block.num_rows};
      tile.multiply_wide(&product, 1, length, width, sums, width, scratch.tile);
      kernels<float>().add(sums, to + range.first * width, length * width);
    };
    const Line<const T> query = rows_of(call, block, call.query, H);
    add_product(weights, cotangent.data, cotangent.row, W, dvalue);
    add_product(slopes, query.data, query.row, H, dkey);
    const Product<T> by_key{{slopes, length, 1}, {key, key_line, 1}, length};
    tile.multiply(&by_key, 1, block.num_rows, H, dquery.data, dquery.row, scratch.tile);
  }
  for (int64_t slot = 0; slot < L; ++slot) {
    tile.narrow(dkey + slot * H, with.dkey + (b * L + slot) * key_line + key_head * H, H);
    tile.narrow(dvalue + slot * W, with.dvalue + (b * L + slot) * value_line + key_head * W, W);
  }
}

using Buffer = ffi::AnyBuffer;
using Integers = ffi::Buffer<ffi::S32>;

template <class T>
Call<T> call_of(const Buffer& query, const Buffer& key, const Buffer& value, const Integers& positions,
                const Integers& segments, const ffi::Buffer<ffi::F32>& sinks, float scale, int64_t window) {
  const auto q = query.dimensions(), k = key.dimensions();
  const auto integers = [](const Integers& array) { return array.element_count() == 0 ? nullptr : array.typed_data(); };
  return {q[0], q[1], k[1], q[2], k[2], q[3], value.dimensions()[3], static_cast<const T*>(query.untyped_data()),
          static_cast<const T*>(key.untyped_data()), static_cast<const T*>(value.untyped_data()), integers(positions),
          integers(segments), sinks.element_count() == 0 ? nullptr : sinks.typed_data(), scale, window};
}

ffi::Error forward(ffi::ThreadPool pool, Buffer query, Buffer key, Buffer value, Integers positions, Integers segments,
                   ffi::Buffer<ffi::F32> sinks, ffi::Result<Buffer> out,
                   ffi::Result<ffi::Buffer<ffi::F32>> logsumexp, float scale, int64_t window) {
  const auto run = [&](auto type) {
    using T = decltype(type);
    attend_all<T>(pool, call_of<T>(query, key, value, positions, segments, sinks, scale, window),
                  static_cast<T*>(out->untyped_data()), logsumexp->typed_data());
  };
  return call_safely([&] { query.element_type() == ffi::F32 ? run(float{}) : run(BFloat16{}); });
}

ffi::Error backward(ffi::ThreadPool pool, Buffer query, Buffer key, Buffer value, Integers positions, Integers segments,
                    ffi::Buffer<ffi::F32> sinks, Buffer out, ffi::Buffer<ffi::F32> logsumexp, Buffer cotangent,
                    ffi::Result<Buffer> dquery, ffi::Result<Buffer> dkey, ffi::Result<Buffer> dvalue, float scale,
                    int64_t window) {
  const auto run = [&](auto type) {
    using T = decltype(type);
    const Call<T> call = call_of<T>(query, key, value, positions, segments, sinks, scale, window);
    const Cotangents<T> with{static_cast<const T*>(out.untyped_data()), static_cast<const T*>(cotangent.untyped_data()),
                             logsumexp.typed_data(), static_cast<T*>(dquery->untyped_data()),
                             static_cast<T*>(dkey->untyped_data()), static_cast<T*>(dvalue->untyped_data())};
    parallel_for(pool, call.batch * call.key_heads,
                 [&](int64_t i) { differentiate(call, with, i / call.key_heads, i % call.key_heads); });
  };
  return call_safely([&] { query.element_type() == ffi::F32 ? run(float{}) : run(BFloat16{}); });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(raggedmoe_attention, forward,
                              binding()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(raggedmoe_attention_gradients, backward,
                              binding()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window"));

}  // namespace raggedmoe
