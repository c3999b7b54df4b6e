// `grouped_matmul` and the gradient of its matrices: cpu_native.py calls them through XLA's FFI.
#include <algorithm>
#include <vector>

#include "matmul_types.h"
#include "pages.h"
#include "parallel.h"
#include "xla_call.h"

namespace raggedmoe {

namespace {

constexpr int64_t LEAST_TILE_ROWS = 32;  // of a gradient's tile, so that packing its columns is not most of the work

struct Tile {
  int64_t group, first_row, last_row, first_col, last_col;
};

// The tiles of all groups that have rows (or of all groups: their gradients are zero then).
std::vector<Tile> tiles_of(const int32_t* bounds, int64_t num_groups, int64_t num_cols) {
  std::vector<Tile> tiles;
  for (int64_t g = 0; g < num_groups; ++g) {
    const int64_t rows = bounds[g + 1] - bounds[g];
    if (rows <= 0) continue;
    const int64_t parts = (rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
    const int64_t width = rows <= FEW_ROWS ? 2 * TILE_COLS : TILE_COLS;
    for (int64_t part = 0; part < parts; ++part)
      for (int64_t n = 0; n < num_cols; n += width)
        tiles.push_back({g, bounds[g] + rows * part / parts, bounds[g] + rows * (part + 1) / parts, n,
                         std::min(n + width, num_cols)});
  }
  return tiles;
}

thread_local Scratch scratch;

template <class T, class Out>
void matmul(ffi::ThreadPool& pool, const ffi::AnyBuffer& lhs, const ffi::AnyBuffer& rhs, const int32_t* bounds,
            ffi::AnyBuffer& result, bool transpose_rhs) {
  const auto lhs_dims = lhs.dimensions(), rhs_dims = rhs.dimensions();
  const int64_t num_rows = lhs_dims[0], inner = lhs_dims[1], groups = rhs_dims[0];
  const int64_t width = transpose_rhs ? rhs_dims[1] : rhs_dims[2];
  const T* a = static_cast<const T*>(lhs.untyped_data());
  const T* b = static_cast<const T*>(rhs.untyped_data());
  Out* out = static_cast<Out*>(result.untyped_data());
  const std::vector<Tile> tiles = tiles_of(bounds, groups, width);
  prefer_large_pages(out, result.size_bytes());
  std::fill_n(reinterpret_cast<char*>(out), bounds[0] * width * sizeof(Out), 0);
  std::fill_n(reinterpret_cast<char*>(out + bounds[groups] * width), (num_rows - bounds[groups]) * width * sizeof(Out), 0);
  parallel_for(pool, tiles.size(), [&](int64_t i) {
    const Tile& t = tiles[i];
    const T* matrix = b + t.group * inner * width;
    const View<T> part = transpose_rhs ? View<T>{matrix + t.first_col * inner, 1, inner}
                                       : View<T>{matrix + t.first_col, width, 1};
    const Product<T> product{View<T>{a + t.first_row * inner, inner, 1}, part, inner};
    Out* to = out + t.first_row * width + t.first_col;
    if constexpr (std::is_same_v<Out, T>)
      kernels<T>().multiply(&product, 1, t.last_row - t.first_row, t.last_col - t.first_col, to, width, scratch);
    else
      kernels<T>().multiply_wide(&product, 1, t.last_row - t.first_row, t.last_col - t.first_col, to, width, scratch);
  });
}

// out[g] = lhs_gᵀ rhs_g: of each group a matrix [I O], in tiles of its rows and columns.
template <class T, class Out>
void transposed(ffi::ThreadPool& pool, const ffi::AnyBuffer& lhs, const ffi::AnyBuffer& rhs, const int32_t* bounds,
                ffi::AnyBuffer& result) {
  const int64_t inner = lhs.dimensions()[1], width = rhs.dimensions()[1], groups = result.dimensions()[0];
  const T* a = static_cast<const T*>(lhs.untyped_data());
  const T* b = static_cast<const T*>(rhs.untyped_data());
  Out* out = static_cast<Out*>(result.untyped_data());
  prefer_large_pages(out, result.size_bytes());
  // A dense layer's matrix is one group, and may be one tile: it is cut into as many as there are threads.
  const int64_t matrices = std::max<int64_t>(1, groups * ((width + GRADIENT_COLS - 1) / GRADIENT_COLS));
  const int64_t for_threads = std::min<int64_t>((pool.num_threads() + matrices - 1) / matrices, inner / LEAST_TILE_ROWS);
  const int64_t parts = std::max((inner + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS, for_threads);
  std::vector<Tile> tiles;
  for (int64_t g = 0; g < groups; ++g)
    for (int64_t part = 0; part < parts; ++part)
      for (int64_t n = 0; n < width; n += GRADIENT_COLS)
        tiles.push_back({g, inner * part / parts, inner * (part + 1) / parts, n, std::min(n + GRADIENT_COLS, width)});
  parallel_for(pool, tiles.size(), [&](int64_t i) {
    const Tile& t = tiles[i];
    const int64_t first = bounds[t.group], depth = bounds[t.group + 1] - first;
    const int64_t rows = t.last_row - t.first_row, cols = t.last_col - t.first_col;
    Out* to = out + (t.group * inner + t.first_row) * width + t.first_col;
    if (depth <= 0) {
      for (int64_t m = 0; m < rows; ++m) std::memset(static_cast<void*>(to + m * width), 0, cols * sizeof(Out));
      return;
    }
    const Product<T> product{View<T>{a + first * inner + t.first_row, 1, inner},
                             View<T>{b + first * width + t.first_col, width, 1}, depth};
    if constexpr (std::is_same_v<Out, T>)
      kernels<T>().multiply(&product, 1, rows, cols, to, width, scratch);
    else
      kernels<T>().multiply_wide(&product, 1, rows, cols, to, width, scratch);
  });
}

ffi::Error grouped_matmul(ffi::ThreadPool pool, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs, ffi::Buffer<ffi::S32> bounds,
                          ffi::Result<ffi::AnyBuffer> out, bool transpose_rhs) {
  const bool wide_in = lhs.element_type() == ffi::F32, wide_out = out->element_type() == ffi::F32;
  const auto call = wide_in ? matmul<float, float> : wide_out ? matmul<BFloat16, float> : matmul<BFloat16, BFloat16>;
  return call_safely([&] { call(pool, lhs, rhs, bounds.typed_data(), *out, transpose_rhs); });
}

ffi::Error transposed_matmul(ffi::ThreadPool pool, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs,
                             ffi::Buffer<ffi::S32> bounds, ffi::Result<ffi::AnyBuffer> out) {
  const bool wide_in = lhs.element_type() == ffi::F32, wide_out = out->element_type() == ffi::F32;
  const auto call = wide_in    ? transposed<float, float>
                    : wide_out ? transposed<BFloat16, float>
                               : transposed<BFloat16, BFloat16>;
  return call_safely([&] { call(pool, lhs, rhs, bounds.typed_data(), *out); });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(raggedmoe_grouped_matmul, grouped_matmul,
                              binding()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("transpose_rhs"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(raggedmoe_transposed_matmul, transposed_matmul,
                              binding()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>());

}  // namespace raggedmoe
