// `ragged_gather_reduce` and the gradient of weights: cpu_native.py calls them through XLA's FFI.
#include "matmul_types.h"
#include "parallel.h"
#include "row_tasks.h"
#include "xla_call.h"

namespace raggedmoe {
namespace {

thread_local Memory scratch;

template <class T>
void gather_reduce(ffi::ThreadPool& pool, const ffi::AnyBuffer& rows, const ffi::Buffer<ffi::S32>& indices,
                   const int32_t* range, const ffi::Buffer<ffi::F32>& weights, ffi::AnyBuffer& result) {
  const int64_t num_rows = rows.dimensions()[0], width = rows.dimensions()[1];
  const int64_t num_tokens = indices.dimensions()[0], num_slots = indices.dimensions()[1];
  const int64_t first = std::max<int64_t>(range[0], 0), last = std::min<int64_t>(range[1], num_rows);
  const T* from = static_cast<const T*>(rows.untyped_data());
  T* to = static_cast<T*>(result.untyped_data());
  const int32_t* index = indices.typed_data();
  const float* weight = weights.element_count() == 0 ? nullptr : weights.typed_data();
  const Kernels<T>& tile = kernels<T>();
  for_row_tasks(pool, num_tokens, (num_slots + 1) * width * sizeof(T), [&](int64_t token) {
    float* sums;
    if constexpr (std::is_same_v<T, float>)
      sums = to + token * width;
    else
      sums = scratch.at_least(width);
    std::fill_n(sums, width, 0.0f);
    for (int64_t slot = token * num_slots; slot < (token + 1) * num_slots; ++slot)
      if (index[slot] >= first && index[slot] < last)
        tile.add_scaled(weight == nullptr ? 1.0f : weight[slot], from + index[slot] * width, sums, width);
    if constexpr (!std::is_same_v<T, float>) tile.narrow(sums, to + token * width, width);
  });
}

// out[l, k] = rows[indices[l, k]] · cotangent[l]. The range is one of indices, or of lines l.
template <class T>
void row_dots(ffi::ThreadPool& pool, const ffi::AnyBuffer& rows, const ffi::Buffer<ffi::S32>& indices,
              const int32_t* range, const ffi::AnyBuffer& cotangent, float* out, bool range_of_lines) {
  const int64_t num_rows = rows.dimensions()[0], width = rows.dimensions()[1];
  const int64_t num_lines = indices.dimensions()[0], num_slots = indices.dimensions()[1];
  const T* from = static_cast<const T*>(rows.untyped_data());
  const T* with = static_cast<const T*>(cotangent.untyped_data());
  const int32_t* index = indices.typed_data();
  const Kernels<T>& tile = kernels<T>();
  for_row_tasks(pool, num_lines, (num_slots + 1) * width * sizeof(T), [&](int64_t line) {
    for (int64_t slot = line * num_slots; slot < (line + 1) * num_slots; ++slot) {
      const int64_t place = range_of_lines ? line : index[slot];
      const bool valid = place >= range[0] && place < range[1] && index[slot] >= 0 && index[slot] < num_rows;
      out[slot] = valid ? tile.dot(from + index[slot] * width, with + line * width, width) : 0.0f;
    }
  });
}

ffi::Error reduce(ffi::ThreadPool pool, ffi::AnyBuffer rows, ffi::Buffer<ffi::S32> indices,
                  ffi::Buffer<ffi::S32> range, ffi::Buffer<ffi::F32> weights, ffi::Result<ffi::AnyBuffer> out) {
  const auto function = rows.element_type() == ffi::F32 ? gather_reduce<float> : gather_reduce<BFloat16>;
  return call_safely([&] { function(pool, rows, indices, range.typed_data(), weights, *out); });
}

ffi::Error dots(ffi::ThreadPool pool, ffi::AnyBuffer rows, ffi::Buffer<ffi::S32> indices, ffi::Buffer<ffi::S32> range,
                ffi::AnyBuffer cotangent, ffi::Result<ffi::Buffer<ffi::F32>> out, bool range_of_lines) {
  const auto function = rows.element_type() == ffi::F32 ? row_dots<float> : row_dots<BFloat16>;
  return call_safely(
      [&] { function(pool, rows, indices, range.typed_data(), cotangent, out->typed_data(), range_of_lines); });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(raggedmoe_gather_reduce, reduce,
                              binding()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(raggedmoe_row_dots, dots,
                              binding()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<bool>("range_of_lines"));

}  // namespace raggedmoe
