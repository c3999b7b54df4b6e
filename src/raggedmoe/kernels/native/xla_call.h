// What every function that XLA calls needs: how it reads its buffers, and how it says that it failed.
#pragma once

#include <exception>
#include <new>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace raggedmoe {

namespace ffi = xla::ffi;

template <class T>
const T* data(const ffi::AnyBuffer& buffer) {
  return buffer.element_count() == 0 ? nullptr : static_cast<const T*>(buffer.untyped_data());
}
template <class T>
T* data(ffi::Result<ffi::AnyBuffer>& buffer) {
  return buffer->element_count() == 0 ? nullptr : static_cast<T*>(buffer->untyped_data());
}

// Calls body(), whose exceptions must not reach XLA: they become the call's error, which ends no process.
template <class Body>
ffi::Error call_safely(Body body) {
  try {
    body();
    return ffi::Error::Success();
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "the C++ kernel has no memory for its buffers");
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kInternal, error.what());
  }
}

// What is known of every function: XLA gives it threads.
inline auto binding() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>(); }

// The binding with so many more operands, or results, of any type. A binding can be neither copied nor moved.
template <int NUM, class Binding>
auto with_args(Binding&& binding) {
  if constexpr (NUM == 1)
    return std::move(binding).template Arg<ffi::AnyBuffer>();
  else
    return with_args<NUM - 1>(std::move(binding).template Arg<ffi::AnyBuffer>());
}
template <int NUM, class Binding>
auto with_results(Binding&& binding) {
  if constexpr (NUM == 1)
    return std::move(binding).template Ret<ffi::AnyBuffer>();
  else
    return with_results<NUM - 1>(std::move(binding).template Ret<ffi::AnyBuffer>());
}

}  // namespace raggedmoe
