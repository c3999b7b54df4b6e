// What XLA does to call the kernels, without XLA: threads in a pool, buffers, and the frame of a call.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "matmul_types.h"
#include "xla/ffi/api/c_api.h"

using raggedmoe::BFloat16;

// Threads that take tasks from one queue, in order.
class Pool {
 public:
  explicit Pool(int64_t num_threads) : num_threads_(num_threads) {
    for (int64_t i = 0; i < num_threads; ++i) threads_.emplace_back([this] { work(); });
  }
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  void schedule(std::function<void()> task) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    changed_.notify_one();
  }
  int64_t num_threads() const { return num_threads_; }

 private:
  void work() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return closed_ || !tasks_.empty(); });
        if (tasks_.empty()) return;
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      task();
    }
  }

  const int64_t num_threads_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool closed_ = false;
  std::vector<std::thread> threads_;
};

inline float to_float(float x) { return x; }
inline float to_float(BFloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}
inline void from_float(float x, float& to) { to = x; }
inline void from_float(float x, BFloat16& to) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  to.bits = x != x ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
inline void from_float(float x, int32_t& to) { to = static_cast<int32_t>(x); }
inline void from_float(float x, uint8_t& to) { to = x != x ? 0xff : static_cast<uint8_t>(x); }

inline XLA_FFI_DataType type_of(const float*) { return XLA_FFI_DataType_F32; }
inline XLA_FFI_DataType type_of(const BFloat16*) { return XLA_FFI_DataType_BF16; }
inline XLA_FFI_DataType type_of(const int32_t*) { return XLA_FFI_DataType_S32; }
inline XLA_FFI_DataType type_of(const uint8_t*) { return XLA_FFI_DataType_U8; }

// An array in memory of exactly its size, so that whatever is read or written beyond it is noticed. Filled with NaN.
template <class T>
struct Array {
  std::vector<int64_t> dims;
  std::unique_ptr<T[]> numbers;

  explicit Array(std::vector<int64_t> shape) : dims(std::move(shape)), numbers(new T[size()]) {
    for (int64_t i = 0; i < size(); ++i) {
      if constexpr (std::is_same_v<T, int32_t>)
        numbers[i] = -123456789;
      else
        from_float(std::numeric_limits<float>::quiet_NaN(), numbers[i]);
    }
  }
  int64_t size() const {
    int64_t product = 1;
    for (int64_t dim : dims) product *= dim;
    return product;
  }
  T& operator[](int64_t i) { return numbers[i]; }
  const T& operator[](int64_t i) const { return numbers[i]; }
  bool same_bits(const Array& other) const {
    return size() == other.size() &&
           (size() == 0 || std::memcmp(static_cast<const void*>(numbers.get()), other.numbers.get(), size() * sizeof(T)) == 0);
  }
};

// One call of a handler: operands, results and attributes, in the handler's order; attributes sorted by name.
class Call {
 public:
  explicit Call(Pool& pool) : pool_(pool) {}

  template <class T>
  Call& operand(Array<T>& array) {
    operands_.push_back(buffer_of(array));
    return *this;
  }
  template <class T>
  Call& result(Array<T>& array) {
    results_.push_back(buffer_of(array));
    return *this;
  }
  Call& attribute(const char* name, bool value) { return attribute(name, XLA_FFI_DataType_PRED, value); }
  Call& attribute(const char* name, int64_t value) { return attribute(name, XLA_FFI_DataType_S64, value); }
  Call& attribute(const char* name, float value) {
    int64_t bits = 0;  // a scalar is read from its first bytes
    std::memcpy(&bits, &value, sizeof value);
    return attribute(name, XLA_FFI_DataType_F32, bits);
  }

  void run(XLA_FFI_Handler* handler) {
    std::vector<void*> operands, results, attributes;
    for (XLA_FFI_Buffer& buffer : operands_) operands.push_back(&buffer);
    for (XLA_FFI_Buffer& buffer : results_) results.push_back(&buffer);
    std::vector<XLA_FFI_ByteSpan> spans;
    std::vector<XLA_FFI_ByteSpan*> names;
    spans.reserve(attributes_.size());
    for (Attribute& attribute : attributes_) {
      attribute.scalar.value = &attribute.value;
      attributes.push_back(&attribute.scalar);
      spans.push_back({attribute.name.data(), attribute.name.size()});
      names.push_back(&spans.back());
    }
    std::vector<XLA_FFI_ArgType> operand_types(operands.size(), XLA_FFI_ArgType_BUFFER);
    std::vector<XLA_FFI_RetType> result_types(results.size(), XLA_FFI_RetType_BUFFER);
    std::vector<XLA_FFI_AttrType> attribute_types(attributes.size(), XLA_FFI_AttrType_SCALAR);

    XLA_FFI_Api api{};
    api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    api.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) -> XLA_FFI_Error* {
      std::fprintf(stderr, "a handler returned an error: %s\n", args->message);
      std::abort();
    };
    api.XLA_FFI_ThreadPool_Schedule = [](XLA_FFI_ThreadPool_Schedule_Args* args) -> XLA_FFI_Error* {
      XLA_FFI_Task* task = args->task;
      void* data = args->data;
      reinterpret_cast<Pool*>(args->ctx)->schedule([task, data] { task(data); });
      return nullptr;
    };
    api.XLA_FFI_ThreadPool_NumThreads = [](XLA_FFI_ThreadPool_NumThreads_Args* args) -> XLA_FFI_Error* {
      *args->num_threads = reinterpret_cast<Pool*>(args->ctx)->num_threads();
      return nullptr;
    };

    XLA_FFI_CallFrame frame{};
    frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    frame.api = &api;
    frame.ctx = reinterpret_cast<decltype(frame.ctx)>(&pool_);
    frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
    frame.args.struct_size = XLA_FFI_Args_STRUCT_SIZE;
    frame.args.size = operands.size(), frame.args.types = operand_types.data(), frame.args.args = operands.data();
    frame.rets.struct_size = XLA_FFI_Rets_STRUCT_SIZE;
    frame.rets.size = results.size(), frame.rets.types = result_types.data(), frame.rets.rets = results.data();
    frame.attrs.struct_size = XLA_FFI_Attrs_STRUCT_SIZE;
    frame.attrs.size = attributes.size(), frame.attrs.types = attribute_types.data();
    frame.attrs.names = names.data(), frame.attrs.attrs = attributes.data();
    if (handler(&frame) != nullptr) std::abort();
  }

 private:
  struct Attribute {
    std::string name;
    int64_t value;
    XLA_FFI_Scalar scalar;
  };

  Call& attribute(const char* name, XLA_FFI_DataType type, int64_t value) {
    attributes_.push_back({name, value, {type, nullptr}});
    return *this;
  }
  template <class T>
  static XLA_FFI_Buffer buffer_of(Array<T>& array) {
    XLA_FFI_Buffer buffer{};
    buffer.struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
    buffer.dtype = type_of(array.numbers.get());
    buffer.data = array.numbers.get();
    buffer.rank = array.dims.size();
    buffer.dims = array.dims.data();
    return buffer;
  }

  Pool& pool_;
  std::vector<XLA_FFI_Buffer> operands_, results_;
  std::vector<Attribute> attributes_;
};
