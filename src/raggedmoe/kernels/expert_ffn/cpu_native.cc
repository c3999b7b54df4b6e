// `expert_ffn` and its gradients: cpu_native.py calls them through XLA's FFI.
//
// The work is cut into blocks of a group's rows. A block's hidden rows are computed part by part and stay in cache until
// the down projection has read them; the next block's are begun before, so that no thread waits for the last part.
#include <vector>

#include "matmul_types.h"
#include "pages.h"
#include "parallel.h"
#include "xla_call.h"

namespace raggedmoe {
namespace {

constexpr int64_t RING = 3;                 // blocks whose hidden rows are in memory at a time
constexpr int64_t STREAMED_BYTES = 1 << 19;  // of a matrix, for a task with few rows

struct FfnScratch {
  Scratch tile;
  Memory gate, up, down;
};
thread_local FfnScratch scratch;

struct Sizes {
  int64_t rows, groups, width, hidden;  // R, G, D, F
};

template <class T>
struct Weights {
  const T *wi_0, *wi_1, *wo, *bias_wi_0, *bias_wi_1, *bias_wo;  // null: there is none
};

template <class Body>
void for_each_part(int64_t size, int64_t part, Body body) {
  for (int64_t first = 0; first < size; first += part) body(first, std::min(first + part, size));
}

// The columns of a task whose matrix has lines of that many bytes: all of a tile's, or with few rows, so many that the
// part of the matrix is worth a task.
int64_t columns_of_task(int64_t rows, int64_t bytes_of_line) {
  if (rows > FEW_ROWS) return TILE_COLS;
  return std::max<int64_t>(32, STREAMED_BYTES / bytes_of_line / 32 * 32);
}

struct Block {
  int64_t group, first, last;
};

std::vector<Block> blocks_of(const int32_t* bounds, int64_t num_groups) {
  std::vector<Block> blocks;
  for (int64_t g = 0; g < num_groups; ++g) {
    const int64_t rows = bounds[g + 1] - bounds[g];
    const int64_t parts = (rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
    for (int64_t part = 0; part < parts; ++part)
      blocks.push_back({g, bounds[g] + rows * part / parts, bounds[g] + rows * (part + 1) / parts});
  }
  return blocks;
}

template <class T>
void clear_rows_of_no_group(T* rows, const int32_t* bounds, const Sizes& sizes, int64_t width) {
  if (rows == nullptr) return;
  std::memset(static_cast<void*>(rows), 0, bounds[0] * width * sizeof(T));
  const int64_t last = bounds[sizes.groups];
  std::memset(static_cast<void*>(rows + last * width), 0, (sizes.rows - last) * width * sizeof(T));
}

// The arguments of the activation for some rows and columns, as float32 sums with biases.
template <class T>
void project_up(const Sizes& sizes, const T* rows, const Weights<T>& weights, const Block& block, int64_t first_col,
                int64_t last_col, float* gate, float* up, int64_t out_row) {
  const Kernels<T>& tile = kernels<T>();
  const int64_t num_rows = block.last - block.first, cols = last_col - first_col, D = sizes.width;
  const View<T> a{rows + block.first * D, D, 1};
  const int64_t column = block.group * sizes.hidden + first_col;
  const Product<T> product{a, View<T>{weights.wi_0 + column * D, 1, D}, D};
  const T* other = up == nullptr ? nullptr : weights.wi_1 + column * D;
  tile.multiply_pair(product, other, num_rows, cols, gate, up, out_row, scratch.tile);
  if (weights.bias_wi_0 == nullptr) return;
  for (int64_t m = 0; m < num_rows; ++m) {
    tile.add(weights.bias_wi_0 + column, gate + m * out_row, cols);
    if (up != nullptr) tile.add(weights.bias_wi_1 + column, up + m * out_row, cols);
  }
}

template <class T>
void ffn(ffi::ThreadPool& pool, const Sizes& sizes, const T* rows, const Weights<T>& weights, const int32_t* bounds,
         Activation activation, T* out, T* kept_gate, T* kept_up) {
  const Kernels<T>& tile = kernels<T>();
  const int64_t D = sizes.width, F = sizes.hidden;
  const std::vector<Block> blocks = blocks_of(bounds, sizes.groups);
  int64_t most = 0;
  for (const Block& block : blocks) most = std::max(most, block.last - block.first);
  std::unique_ptr<T[]> ring(new T[RING * most * F]);
  prefer_large_pages(out, sizes.rows * D * sizeof(T));
  for (T* kept : {kept_gate, kept_up}) prefer_large_pages(kept, sizes.rows * F * sizeof(T));
  clear_rows_of_no_group(out, bounds, sizes, D);
  clear_rows_of_no_group(kept_gate, bounds, sizes, F);
  clear_rows_of_no_group(kept_up, bounds, sizes, F);

  const auto up_and_activation = [&](const Block& block, T* hidden, int64_t first, int64_t last) {
    const int64_t num_rows = block.last - block.first, cols = last - first;
    float *gate, *up = nullptr;
    int64_t row = cols;
    if (std::is_same_v<T, float> && kept_gate != nullptr) {
      row = F;
      gate = reinterpret_cast<float*>(kept_gate) + block.first * F + first;
      if (weights.wi_1) up = reinterpret_cast<float*>(kept_up) + block.first * F + first;
    } else {
      gate = scratch.gate.at_least(num_rows * cols);
      if (weights.wi_1) up = scratch.up.at_least(num_rows * cols);
    }
    project_up(sizes, rows, weights, block, first, last, gate, up, row);
    for (int64_t m = 0; m < num_rows; ++m) {
      const float* up_row = up == nullptr ? nullptr : up + m * row;
      if (!std::is_same_v<T, float> && kept_gate != nullptr) {
        tile.narrow(gate + m * row, kept_gate + (block.first + m) * F + first, cols);
        if (up_row) tile.narrow(up_row, kept_up + (block.first + m) * F + first, cols);
      }
      tile.activate(activation, gate + m * row, up_row, hidden + m * F + first, cols);
    }
  };
  const auto down = [&](const Block& block, const T* hidden, int64_t first, int64_t last) {
    const int64_t num_rows = block.last - block.first, cols = last - first;
    const Product<T> product{View<T>{hidden, F, 1}, View<T>{weights.wo + block.group * F * D + first, D, 1}, F};
    T* to = out + block.first * D + first;
    if (weights.bias_wo == nullptr) return tile.multiply(&product, 1, num_rows, cols, to, D, scratch.tile);
    float* sums = scratch.down.at_least(num_rows * cols);
    tile.multiply_wide(&product, 1, num_rows, cols, sums, cols, scratch.tile);
    for (int64_t m = 0; m < num_rows; ++m) {
      tile.add(weights.bias_wo + block.group * D + first, sums + m * cols, cols);
      tile.narrow(sums + m * cols, to + m * D, cols);
    }
  };

  Steps steps;
  std::vector<int64_t> up_step(blocks.size()), down_step(blocks.size());
  const auto add_down = [&](size_t i) {
    down_step[i] = steps.begin(up_step[i]);
    const Block& block = blocks[i];
    const T* hidden = ring.get() + i % RING * most * F;
    const int64_t part = block.last - block.first > FEW_ROWS ? TILE_COLS : 1024;
    for_each_part(D, part, [&](int64_t a, int64_t b) { steps.add([=, &down, &block] { down(block, hidden, a, b); }); });
  };
  for (size_t i = 0; i < blocks.size(); ++i) {
    const Block& block = blocks[i];
    up_step[i] = steps.begin(i < RING ? -1 : down_step[i - RING]);
    T* hidden = ring.get() + i % RING * most * F;
    for_each_part(F, columns_of_task(block.last - block.first, D * sizeof(T)), [&](int64_t a, int64_t b) {
      steps.add([=, &up_and_activation, &block] { up_and_activation(block, hidden, a, b); });
    });
    if (i > 0) add_down(i - 1);
  }
  if (!blocks.empty()) add_down(blocks.size() - 1);
  steps.run(pool);
}

template <class T>
struct Gradients {
  T *rows, *wi_0, *wi_1, *wo, *bias_wi_0, *bias_wi_1, *bias_wo;
};

template <class T>
void ffn_gradients(ffi::ThreadPool& pool, const Sizes& sizes, const T* rows, const Weights<T>& weights,
                   const int32_t* bounds, const T* kept_gate, const T* kept_up, const T* cotangent,
                   Activation activation, const Gradients<T>& out) {
  const Kernels<T>& tile = kernels<T>();
  const int64_t D = sizes.width, F = sizes.hidden;
  int64_t most = 0;
  for (int64_t g = 0; g < sizes.groups; ++g) most = std::max<int64_t>(most, bounds[g + 1] - bounds[g]);
  // Of each group in the ring: the hidden rows, and the cotangents of both projections.
  std::unique_ptr<T[]> ring(new T[RING * 3 * most * F]);
  prefer_large_pages(ring.get(), RING * 3 * most * F * sizeof(T));
  prefer_large_pages(out.rows, sizes.rows * D * sizeof(T));
  for (T* matrix : {out.wi_0, out.wi_1, out.wo}) prefer_large_pages(matrix, sizes.groups * F * D * sizeof(T));
  clear_rows_of_no_group(out.rows, bounds, sizes, D);

  struct Hidden {
    T *value, *dgate, *dup;
  };
  // The activation's arguments, and how far their rows are apart: computed again, or those that were kept, as they are
  // or widened.
  struct Arguments {
    const float *gate, *up;
    int64_t row;
  };
  const auto arguments = [&](const Block& block, int64_t first, int64_t last) -> Arguments {
    const int64_t num_rows = block.last - block.first, cols = last - first, at = block.first * F + first;
    if constexpr (std::is_same_v<T, float>)
      if (kept_gate != nullptr) return {kept_gate + at, weights.wi_1 ? kept_up + at : nullptr, F};
    float* gate = scratch.gate.at_least(num_rows * cols);
    float* up = weights.wi_1 ? scratch.up.at_least(num_rows * cols) : nullptr;
    if (kept_gate == nullptr)
      project_up(sizes, rows, weights, block, first, last, gate, up, cols);
    else
      for (int64_t m = 0; m < num_rows; ++m) {
        tile.widen(kept_gate + at + m * F, gate + m * cols, cols);
        if (up) tile.widen(kept_up + at + m * F, up + m * cols, cols);
      }
    return {gate, up, cols};
  };
  const auto differentiate = [&](const Block& block, const Hidden& hidden, int64_t first_row, int64_t first,
                                 int64_t last) {
    const int64_t num_rows = block.last - block.first, cols = last - first;
    const auto [gate, up, row] = arguments(block, first, last);
    float* dhidden = scratch.down.at_least(num_rows * cols);
    const Product<T> product{View<T>{cotangent + block.first * D, D, 1},
                             View<T>{weights.wo + (block.group * F + first) * D, 1, D}, D};
    tile.multiply_wide(&product, 1, num_rows, cols, dhidden, cols, scratch.tile);
    for (int64_t m = 0; m < num_rows; ++m) {
      const int64_t at = (block.first - first_row + m) * F + first;
      tile.differentiate(activation, gate + m * row, up ? up + m * row : nullptr, dhidden + m * cols, hidden.value + at,
                         hidden.dgate + at, hidden.dup + at, cols);
    }
  };
  const auto drows = [&](const Block& block, const Hidden& hidden, int64_t first_row, int64_t first, int64_t last) {
    const int64_t at = (block.first - first_row) * F, from = block.group * F * D + first;
    const Product<T> products[2] = {{View<T>{hidden.dgate + at, F, 1}, View<T>{weights.wi_0 + from, D, 1}, F},
                                    {View<T>{hidden.dup + at, F, 1}, View<T>{weights.wi_1 + from, D, 1}, F}};
    tile.multiply(products, weights.wi_1 ? 2 : 1, block.last - block.first, last - first,
                  out.rows + block.first * D + first, D, scratch.tile);
  };
  // out[f, d] = sum over the group's rows of left[row, f] right[row, d]
  const auto dweights = [&](int64_t group, const T* left, const T* right, T* to, int64_t f, int64_t last_f, int64_t d,
                            int64_t last_d) {
    const int64_t first = bounds[group], num_rows = bounds[group + 1] - first;
    const Product<T> product{View<T>{left + f, 1, F}, View<T>{right + first * D + d, D, 1}, num_rows};
    tile.multiply(&product, 1, last_f - f, last_d - d, to + (group * F + f) * D + d, D, scratch.tile);
  };
  const auto dbias = [&](const T* from, int64_t num_rows, int64_t width, T* to) {
    float* sums = scratch.down.at_least(width);
    std::fill_n(sums, width, 0.0f);
    for (int64_t m = 0; m < num_rows; ++m) tile.add(from + m * width, sums, width);
    tile.narrow(sums, to, width);
  };

  Steps steps;
  const auto hidden_in = [&](int64_t slot) {
    T* first = ring.get() + slot * 3 * most * F;
    return Hidden{first, first + most * F, first + 2 * most * F};
  };
  const std::vector<Block> blocks = blocks_of(bounds, sizes.groups);
  struct Group {
    int64_t group;
    std::vector<Block> blocks;
    int64_t hidden_step = -1, last_step = -1;
  };
  std::vector<Group> groups;
  for (const Block& block : blocks) {
    if (groups.empty() || groups.back().group != block.group) groups.push_back({block.group, {}});
    groups.back().blocks.push_back(block);
  }
  const auto add_matmuls = [&](size_t i) {
    Group& group = groups[i];
    const Hidden hidden = hidden_in(i % RING);
    const int64_t g = group.group, first_row = bounds[g], num_rows = bounds[g + 1] - first_row;
    group.last_step = steps.begin(group.hidden_step);
    for (const Block& block : group.blocks)
      for_each_part(D, TILE_COLS, [&](int64_t a, int64_t b) {
        steps.add([=, &drows, &block] { drows(block, hidden, first_row, a, b); });
      });
    for_each_part(F, MAX_TILE_ROWS, [&](int64_t f, int64_t last_f) {
      for_each_part(D, GRADIENT_COLS, [&](int64_t d, int64_t last_d) {
        steps.add([=, &dweights] { dweights(g, hidden.dgate, rows, out.wi_0, f, last_f, d, last_d); });
        if (weights.wi_1)
          steps.add([=, &dweights] { dweights(g, hidden.dup, rows, out.wi_1, f, last_f, d, last_d); });
        steps.add([=, &dweights] { dweights(g, hidden.value, cotangent, out.wo, f, last_f, d, last_d); });
      });
    });
    if (weights.bias_wo != nullptr)
      steps.add([=, &dbias] {
        dbias(hidden.dgate, num_rows, F, out.bias_wi_0 + g * F);
        if (weights.wi_1) dbias(hidden.dup, num_rows, F, out.bias_wi_1 + g * F);
        dbias(cotangent + first_row * D, num_rows, D, out.bias_wo + g * D);
      });
  };
  for (size_t i = 0; i < groups.size(); ++i) {
    Group& group = groups[i];
    const Hidden hidden = hidden_in(i % RING);
    const int64_t first_row = bounds[group.group];
    group.hidden_step = steps.begin(i < RING ? -1 : groups[i - RING].last_step);
    for (const Block& block : group.blocks)
      for_each_part(F, TILE_COLS, [&](int64_t a, int64_t b) {
        steps.add([=, &differentiate, &block] { differentiate(block, hidden, first_row, a, b); });
      });
    if (i > 0) add_matmuls(i - 1);
  }
  if (!groups.empty()) add_matmuls(groups.size() - 1);
  // The gradients of experts without rows are zero.
  steps.begin();
  for (int64_t g = 0; g < sizes.groups; ++g)
    if (bounds[g + 1] <= bounds[g])
      steps.add([=, &out, &weights] {
        for (T* matrix : {out.wi_0, weights.wi_1 ? out.wi_1 : nullptr, out.wo})
          if (matrix) std::memset(static_cast<void*>(matrix + g * F * D), 0, F * D * sizeof(T));
        if (weights.bias_wo == nullptr) return;
        for (T* bias : {out.bias_wi_0, weights.wi_1 ? out.bias_wi_1 : nullptr})
          if (bias) std::memset(static_cast<void*>(bias + g * F), 0, F * sizeof(T));
        std::memset(static_cast<void*>(out.bias_wo + g * D), 0, D * sizeof(T));
      });
  steps.run(pool);
}

using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

template <class T>
Weights<T> weights_of(const Buffer& wi_0, const Buffer& wi_1, const Buffer& wo, const Buffer& bias_wi_0,
                      const Buffer& bias_wi_1, const Buffer& bias_wo) {
  return {data<T>(wi_0), data<T>(wi_1), data<T>(wo), data<T>(bias_wi_0), data<T>(bias_wi_1), data<T>(bias_wo)};
}

Sizes sizes_of(const Buffer& rows, const Buffer& wi_0) {
  return {rows.dimensions()[0], wi_0.dimensions()[0], rows.dimensions()[1], wi_0.dimensions()[1]};
}

ffi::Error forward(ffi::ThreadPool pool, Buffer rows, Buffer wi_0, Buffer wi_1, Buffer wo, Buffer bias_wi_0,
                   Buffer bias_wi_1, Buffer bias_wo, ffi::Buffer<ffi::S32> bounds, Result out, Result gate, Result up,
                   int64_t activation) {
  const auto call = [&](auto type) {
    using T = decltype(type);
    ffn<T>(pool, sizes_of(rows, wi_0), data<T>(rows), weights_of<T>(wi_0, wi_1, wo, bias_wi_0, bias_wi_1, bias_wo),
           bounds.typed_data(), static_cast<Activation>(activation), data<T>(out), data<T>(gate), data<T>(up));
  };
  return call_safely([&] { rows.element_type() == ffi::F32 ? call(float{}) : call(BFloat16{}); });
}

ffi::Error backward(ffi::ThreadPool pool, Buffer rows, Buffer wi_0, Buffer wi_1, Buffer wo, Buffer bias_wi_0,
                    Buffer bias_wi_1, Buffer bias_wo, ffi::Buffer<ffi::S32> bounds, Buffer gate, Buffer up,
                    Buffer cotangent, Result drows, Result dwi_0, Result dwi_1, Result dwo, Result dbias_wi_0,
                    Result dbias_wi_1, Result dbias_wo, int64_t activation) {
  const auto call = [&](auto type) {
    using T = decltype(type);
    ffn_gradients<T>(pool, sizes_of(rows, wi_0), data<T>(rows),
                     weights_of<T>(wi_0, wi_1, wo, bias_wi_0, bias_wi_1, bias_wo), bounds.typed_data(), data<T>(gate),
                     data<T>(up), data<T>(cotangent), static_cast<Activation>(activation),
                     Gradients<T>{data<T>(drows), data<T>(dwi_0), data<T>(dwi_1), data<T>(dwo), data<T>(dbias_wi_0),
                                  data<T>(dbias_wi_1), data<T>(dbias_wo)});
  };
  return call_safely([&] { rows.element_type() == ffi::F32 ? call(float{}) : call(BFloat16{}); });
}

}  // namespace

// Rows, three weights and three biases; where each group's rows begin; what else is read; what is written.
XLA_FFI_DEFINE_HANDLER_SYMBOL(raggedmoe_expert_ffn, forward,
                              with_results<3>(with_args<7>(binding()).Arg<ffi::Buffer<ffi::S32>>())
                                  .Attr<int64_t>("activation"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(raggedmoe_expert_ffn_gradients, backward,
                              with_results<7>(with_args<3>(with_args<7>(binding()).Arg<ffi::Buffer<ffi::S32>>()))
                                  .Attr<int64_t>("activation"));

}  // namespace raggedmoe
