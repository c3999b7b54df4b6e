// `ragged_gather`: cpu_native.py calls it through XLA's FFI.
#include "matmul_types.h"
#include "pages.h"
#include "parallel.h"
#include "row_tasks.h"
#include "xla_call.h"

namespace raggedmoe {
namespace {

thread_local Memory scratch;

template <class T>
void gather(ffi::ThreadPool& pool, const ffi::AnyBuffer& x, const int32_t* indices, const int32_t* range,
            const ffi::Buffer<ffi::F32>& weights, ffi::AnyBuffer& result) {
  const int64_t num_tokens = x.dimensions()[0], width = x.dimensions()[1], num_rows = result.dimensions()[0];
  const T* from = static_cast<const T*>(x.untyped_data());
  T* to = static_cast<T*>(result.untyped_data());
  const float* weight = weights.element_count() == 0 ? nullptr : weights.typed_data();
  const Kernels<T>& tile = kernels<T>();
  prefer_large_pages(to, result.size_bytes());
  for_row_tasks(pool, num_rows, 2 * width * sizeof(T), [&](int64_t row) {
    const bool valid = row >= range[0] && row < range[1] && indices[row] >= 0 && indices[row] < num_tokens;
    T* line = to + row * width;
    if (!valid) {
      std::memset(static_cast<void*>(line), 0, width * sizeof(T));
    } else if (weight == nullptr) {
      std::memcpy(static_cast<void*>(line), from + indices[row] * width, width * sizeof(T));
    } else {
      float* sums = scratch.at_least(width);
      std::fill_n(sums, width, 0.0f);
      tile.add_scaled(weight[row], from + indices[row] * width, sums, width);
      tile.narrow(sums, line, width);
    }
  });
}

ffi::Error call(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> indices, ffi::Buffer<ffi::S32> range,
                ffi::Buffer<ffi::F32> weights, ffi::Result<ffi::AnyBuffer> out) {
  const auto function = x.element_type() == ffi::F32 ? gather<float> : gather<BFloat16>;
  return call_safely([&] { function(pool, x, indices.typed_data(), range.typed_data(), weights, *out); });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(raggedmoe_gather, call,
                              binding()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>());

}  // namespace raggedmoe
