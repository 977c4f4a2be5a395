// What an operator is written against: its attributes, its inputs and outputs as spans with
// dimensions, loops over the session's threads; and the struct that ONNX Runtime calls, made of a
// class.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ort_api.h"

namespace edgespec {

// A mistake in a graph, with the operator's name in front.
struct GraphError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A status of ONNX Runtime on its way back to it.
struct StatusError {
  OrtStatus* status;
};

inline void check(OrtStatus* status) {
  if (status != nullptr) throw StatusError{status};
}

using Dims = std::vector<int64_t>;

inline int64_t count_of(const Dims& dims) {
  int64_t count = 1;
  for (int64_t dim : dims) count *= dim;
  return count;
}

// A tensor of a call; one that is not `there` was left out. One without elements may have no data.
template <typename T>
struct Tensor {
  T* data = nullptr;
  Dims dims;
  bool there = false;

  explicit operator bool() const { return there; }
  int64_t count() const { return count_of(dims); }
};

inline Dims dims_of(const Api& api, const OrtValue* value) {
  OrtTensorTypeAndShapeInfo* info = nullptr;
  check(api.tensor_info(value, &info));
  size_t count = 0;
  OrtStatus* status = api.num_dimensions(info, &count);
  Dims dims(status == nullptr ? count : 0);
  if (status == nullptr && count > 0) status = api.dimensions(info, dims.data(), count);
  api.release(info);
  check(status);
  return dims;
}

template <typename T>
Tensor<const T> tensor_of(const Api& api, const OrtValue* value) {
  Tensor<const T> tensor;
  if (value == nullptr) return tensor;
  void* data = nullptr;
  check(api.tensor_data(value, &data));
  tensor.data = static_cast<const T*>(data);
  tensor.dims = dims_of(api, value);
  tensor.there = true;
  return tensor;
}

// The attributes of a node, and those of its inputs that are constants.
class Info {
 public:
  Info(const Api& api, const OrtKernelInfo* info) : api_(api), info_(info) {}

  int64_t integer(const char* name) const {
    int64_t value = 0;
    check(api_.attribute(info_, name, &value));
    return value;
  }
  float real(const char* name) const {
    float value = 0;
    check(api_.attribute(info_, name, &value));
    return value;
  }
  int64_t integer_or(const char* name, int64_t otherwise) const {
    return value_or(name, otherwise);
  }
  float real_or(const char* name, float otherwise) const { return value_or(name, otherwise); }
  // Empty where the node does not have it.
  std::vector<int64_t> integers(const char* name) const { return values_of<int64_t>(name); }
  std::vector<float> reals(const char* name) const { return values_of<float>(name); }
  // Which of the names a text is; 0 where the node does not have it. GraphError for another.
  template <size_t kCount>
  int place_in(const char* const (&names)[kCount], const char* name) const {
    std::vector<char> text = values_of<char>(name);
    if (text.empty()) return 0;
    for (size_t i = 0; i < kCount; ++i) {
      if (std::strcmp(names[i], text.data()) == 0) return static_cast<int>(i);
    }
    throw GraphError("no kernel for the " + std::string(name) + " " + text.data());
  }
  // An input that is the same in every call; without data where it is not known before.
  template <typename T>
  Tensor<const T> constant(size_t index) const {
    int is_constant = 0;
    const OrtValue* value = nullptr;
    if (OrtStatus* status = api_.constant_input(info_, index, &is_constant, &value)) {
      api_.release(status);
      return {};
    }
    return is_constant != 0 ? tensor_of<T>(api_, value) : Tensor<const T>{};
  }

 private:
  template <typename T>
  T value_or(const char* name, T otherwise) const {
    T value = otherwise;
    if (OrtStatus* status = api_.attribute(info_, name, &value)) {
      api_.release(status);
      return otherwise;
    }
    return value;
  }

  template <typename T>
  std::vector<T> values_of(const char* name) const {
    size_t count = 0;
    if (OrtStatus* status = api_.attribute(info_, name, static_cast<T*>(nullptr), &count)) {
      api_.release(status);
      return {};
    }
    std::vector<T> values(count);
    if (count > 0) check(api_.attribute(info_, name, values.data(), &count));
    return values;
  }

  const Api& api_;
  const OrtKernelInfo* info_;
};

// While it lives the thread rounds to the nearest and keeps denormals, as all others do, whatever
// libraries in the process have set for it: bits must not depend on the thread.
class UsualFloats {
 public:
#if defined(__x86_64__)
  UsualFloats() : before_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(0x1f80); }
  ~UsualFloats() { __builtin_ia32_ldmxcsr(before_); }

 private:
  unsigned before_;
#elif defined(__aarch64__)
  UsualFloats() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(before_));
    __asm__ volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~UsualFloats() { __asm__ volatile("msr fpcr, %0" : : "r"(before_)); }

 private:
  uint64_t before_;
#else
  ~UsualFloats() {}
#endif
};

// One call of an operator.
class Context {
 public:
  Context(const Api& api, OrtKernelContext* context) : api_(api), context_(context) {}

  size_t num_inputs() const {
    size_t count = 0;
    check(api_.num_inputs(context_, &count));
    return count;
  }
  size_t num_outputs() const {
    size_t count = 0;
    check(api_.num_outputs(context_, &count));
    return count;
  }
  template <typename T>
  Tensor<const T> input(size_t index) const {
    const OrtValue* value = nullptr;
    check(api_.input(context_, index, &value));
    return tensor_of<T>(api_, value);
  }
  template <typename T>
  Tensor<T> output(size_t index, const Dims& dims) const {
    OrtValue* value = nullptr;
    check(api_.output(context_, index, dims.data(), dims.size(), &value));
    Tensor<T> tensor;
    if (value == nullptr) return tensor;  // an output that nobody reads
    void* data = nullptr;
    check(api_.tensor_data(value, &data));
    tensor.data = static_cast<T*>(data);
    tensor.dims = dims;
    tensor.there = true;
    return tensor;
  }
  // Calls body(i) for each i below `total`, on the threads of the session and in any order. The
  // body must not throw.
  template <typename Body>
  void parallel_for(size_t total, const Body& body) const {
    if (total == 1) return body(size_t{0});
    auto call = [](void* data, size_t i) {
      const UsualFloats floats;
      (*static_cast<const Body*>(data))(i);
    };
    void* data = const_cast<void*>(static_cast<const void*>(&body));
    if (total > 0) check(api_.parallel_for(context_, call, total, 0, data));
  }

 private:
  const Api& api_;
  OrtKernelContext* context_;
};

// The type of an input or output, and whether it may be left out or repeated.
struct Port {
  ElementType type;
  Characteristic characteristic = kRequired;
};

// The struct of an operator that the class `Kernel` computes. `Kernel` has a static `name`, static
// functions `inputs()` and `outputs()` that return references to vectors of ports, a constructor
// from Info, and `void compute(const Context&) const`, which calls of several threads may enter.
template <typename Kernel>
struct Operator : OrtCustomOp {
  struct Holder {
    Api api;
    Kernel kernel;
  };

  Operator() : OrtCustomOp{} {
    version = kApiVersion;
    get_name = [](const OrtCustomOp*) { return Kernel::name; };
    get_execution_provider = [](const OrtCustomOp*) -> const char* { return nullptr; };
    get_input_type = [](const OrtCustomOp*, size_t i) -> int { return Kernel::inputs()[i].type; };
    get_input_count = [](const OrtCustomOp*) { return Kernel::inputs().size(); };
    get_output_type = [](const OrtCustomOp*, size_t i) -> int { return Kernel::outputs()[i].type; };
    get_output_count = [](const OrtCustomOp*) { return Kernel::outputs().size(); };
    get_input_characteristic = [](const OrtCustomOp*, size_t i) -> int {
      return Kernel::inputs()[i].characteristic;
    };
    get_output_characteristic = [](const OrtCustomOp*, size_t i) -> int {
      return Kernel::outputs()[i].characteristic;
    };
    get_input_memory_type = [](const OrtCustomOp*, size_t) -> int { return kDefaultMemory; };
    get_variadic_input_min = [](const OrtCustomOp*) { return 1; };
    get_variadic_input_homogeneous = [](const OrtCustomOp*) { return 1; };
    get_variadic_output_min = [](const OrtCustomOp*) { return 1; };
    get_variadic_output_homogeneous = [](const OrtCustomOp*) { return 1; };
    create_kernel_v2 = [](const OrtCustomOp*, const OrtApi* table, const OrtKernelInfo* info,
                          void** kernel) -> OrtStatus* {
      const Api api(table);
      return guarded(api, [&] { *kernel = new Holder{api, Kernel(Info(api, info))}; });
    };
    compute_v2 = [](void* kernel, OrtKernelContext* context) -> OrtStatus* {
      const UsualFloats floats;
      const Holder& holder = *static_cast<Holder*>(kernel);
      return guarded(holder.api, [&] { holder.kernel.compute(Context(holder.api, context)); });
    };
    destroy_kernel = [](void* kernel) { delete static_cast<Holder*>(kernel); };
    get_start_version = [](const OrtCustomOp*) { return 1; };
    get_end_version = [](const OrtCustomOp*) { return 1; };
    get_may_inplace = [](int**, int**) -> size_t { return 0; };
    release_may_inplace = [](int*, int*) {};
    get_alias_map = [](int**, int**) -> size_t { return 0; };
    release_alias_map = [](int*, int*) {};
  }

  // What a body throws, as a status: no exception may leave the library.
  template <typename Body>
  static OrtStatus* guarded(const Api& api, const Body& body) noexcept {
    try {
      body();
      return nullptr;
    } catch (const StatusError& error) {
      return error.status;
    } catch (const GraphError& error) {
      return api.create_status(kInvalidArgument,
                               (std::string(Kernel::name) + ": " + error.what()).c_str());
    } catch (const std::exception& error) {
      return api.create_status(kFail, (std::string(Kernel::name) + ": " + error.what()).c_str());
    }
  }
};

// One list of operators per family, which `library.cpp` registers.
std::vector<const OrtCustomOp*> attention_operators();
std::vector<const OrtCustomOp*> experts_operators();
std::vector<const OrtCustomOp*> head_operators();
std::vector<const OrtCustomOp*> matmul_operators();
std::vector<const OrtCustomOp*> norm_gate_operators();
std::vector<const OrtCustomOp*> recurrence_operators();

}  // namespace edgespec
