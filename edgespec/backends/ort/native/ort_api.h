// The part of ONNX Runtime's C API that these operators use, declared anew: its wheels ship no
// headers.
//
// The API is a table of functions that only ever grows, so an index found in one release holds in
// all later ones. `Api::of` asks for the version that added the newest function used here.
#pragma once

#include <cstddef>
#include <cstdint>

namespace edgespec {

// What ONNX Runtime hands out and takes back; only it knows what is inside.
struct OrtStatus;
struct OrtValue;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtTensorTypeAndShapeInfo;
struct OrtShapeInferContext;
struct OrtApi;  // the table itself

struct OrtApiBase {
  const OrtApi* (*get_api)(uint32_t version) noexcept;
  const char* (*get_version_string)() noexcept;
};

constexpr uint32_t kApiVersion = 18;  // of ONNX Runtime 1.18

enum ErrorCode : int { kFail = 1, kInvalidArgument = 2 };
enum ElementType : int {
  kUndefined = 0,
  kFloat = 1,
  kUint8 = 2,
  kInt8 = 3,
  kUint16 = 4,
  kInt32 = 6,
  kInt64 = 7,
  kBool = 9,
  kFloat16 = 10,
};
enum Characteristic : int { kRequired = 0, kOptional = 1, kVariadic = 2 };
enum MemoryType : int { kDefaultMemory = 0 };

// A custom operator: what ONNX Runtime calls, in the order of its own struct. The version says
// which of the last fields it may look at.
struct OrtCustomOp {
  uint32_t version;
  void* (*create_kernel)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*);
  const char* (*get_name)(const OrtCustomOp*);
  const char* (*get_execution_provider)(const OrtCustomOp*);
  int (*get_input_type)(const OrtCustomOp*, size_t);
  size_t (*get_input_count)(const OrtCustomOp*);
  int (*get_output_type)(const OrtCustomOp*, size_t);
  size_t (*get_output_count)(const OrtCustomOp*);
  void (*compute)(void* kernel, OrtKernelContext*);
  void (*destroy_kernel)(void* kernel);
  int (*get_input_characteristic)(const OrtCustomOp*, size_t);
  int (*get_output_characteristic)(const OrtCustomOp*, size_t);
  int (*get_input_memory_type)(const OrtCustomOp*, size_t);
  int (*get_variadic_input_min)(const OrtCustomOp*);
  int (*get_variadic_input_homogeneous)(const OrtCustomOp*);
  int (*get_variadic_output_min)(const OrtCustomOp*);
  int (*get_variadic_output_homogeneous)(const OrtCustomOp*);
  OrtStatus* (*create_kernel_v2)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void**);
  OrtStatus* (*compute_v2)(void* kernel, OrtKernelContext*);
  OrtStatus* (*infer_output_shape)(const OrtCustomOp*, OrtShapeInferContext*);
  int (*get_start_version)(const OrtCustomOp*);
  int (*get_end_version)(const OrtCustomOp*);
  size_t (*get_may_inplace)(int** inputs, int** outputs);
  void (*release_may_inplace)(int* inputs, int* outputs);
  size_t (*get_alias_map)(int** inputs, int** outputs);
  void (*release_alias_map)(int* inputs, int* outputs);
};

// The functions that are used, each at its index of the table.
class Api {
 public:
  explicit Api(const OrtApi* table) : table_(reinterpret_cast<void* const*>(table)) {}

  // The table of the running ONNX Runtime; null where it is too old.
  static const OrtApi* of(const OrtApiBase* base) { return base->get_api(kApiVersion); }

  OrtStatus* create_status(ErrorCode code, const char* message) const {
    return at<OrtStatus* (*)(int, const char*)>(0)(code, message);
  }
  OrtStatus* create_domain(const char* name, OrtCustomOpDomain** domain) const {
    return at<OrtStatus* (*)(const char*, OrtCustomOpDomain**)>(26)(name, domain);
  }
  OrtStatus* add_operator(OrtCustomOpDomain* domain, const OrtCustomOp* op) const {
    return at<OrtStatus* (*)(OrtCustomOpDomain*, const OrtCustomOp*)>(27)(domain, op);
  }
  OrtStatus* add_domain(OrtSessionOptions* options, OrtCustomOpDomain* domain) const {
    return at<OrtStatus* (*)(OrtSessionOptions*, OrtCustomOpDomain*)>(28)(options, domain);
  }
  OrtStatus* tensor_data(const OrtValue* value, void** data) const {
    return at<OrtStatus* (*)(const OrtValue*, void**)>(51)(value, data);
  }
  OrtStatus* num_dimensions(const OrtTensorTypeAndShapeInfo* info, size_t* count) const {
    return at<OrtStatus* (*)(const OrtTensorTypeAndShapeInfo*, size_t*)>(61)(info, count);
  }
  OrtStatus* dimensions(const OrtTensorTypeAndShapeInfo* info, int64_t* dims, size_t count) const {
    return at<OrtStatus* (*)(const OrtTensorTypeAndShapeInfo*, int64_t*, size_t)>(62)(
        info, dims, count);
  }
  OrtStatus* element_type(const OrtTensorTypeAndShapeInfo* info, int* type) const {
    return at<OrtStatus* (*)(const OrtTensorTypeAndShapeInfo*, int*)>(60)(info, type);
  }
  OrtStatus* tensor_info(const OrtValue* value, OrtTensorTypeAndShapeInfo** info) const {
    return at<OrtStatus* (*)(const OrtValue*, OrtTensorTypeAndShapeInfo**)>(65)(value, info);
  }
  OrtStatus* attribute(const OrtKernelInfo* info, const char* name, float* value) const {
    return at<OrtStatus* (*)(const OrtKernelInfo*, const char*, float*)>(85)(info, name, value);
  }
  OrtStatus* attribute(const OrtKernelInfo* info, const char* name, int64_t* value) const {
    return at<OrtStatus* (*)(const OrtKernelInfo*, const char*, int64_t*)>(86)(info, name, value);
  }
  // With the zero behind it in `size`; `value` null asks for that alone.
  OrtStatus* attribute(const OrtKernelInfo* info, const char* name, char* value,
                       size_t* size) const {
    return at<OrtStatus* (*)(const OrtKernelInfo*, const char*, char*, size_t*)>(87)(
        info, name, value, size);
  }
  OrtStatus* attribute(const OrtKernelInfo* info, const char* name, float* values,
                       size_t* count) const {
    return at<OrtStatus* (*)(const OrtKernelInfo*, const char*, float*, size_t*)>(162)(
        info, name, values, count);
  }
  OrtStatus* attribute(const OrtKernelInfo* info, const char* name, int64_t* values,
                       size_t* count) const {
    return at<OrtStatus* (*)(const OrtKernelInfo*, const char*, int64_t*, size_t*)>(163)(
        info, name, values, count);
  }
  // An input that is the same in every call, with 1 in `is_constant`.
  OrtStatus* constant_input(const OrtKernelInfo* info, size_t index, int* is_constant,
                            const OrtValue** value) const {
    return at<OrtStatus* (*)(const OrtKernelInfo*, size_t, int*, const OrtValue**)>(249)(
        info, index, is_constant, value);
  }
  OrtStatus* num_inputs(const OrtKernelContext* context, size_t* count) const {
    return at<OrtStatus* (*)(const OrtKernelContext*, size_t*)>(88)(context, count);
  }
  OrtStatus* num_outputs(const OrtKernelContext* context, size_t* count) const {
    return at<OrtStatus* (*)(const OrtKernelContext*, size_t*)>(89)(context, count);
  }
  OrtStatus* input(const OrtKernelContext* context, size_t index, const OrtValue** value) const {
    return at<OrtStatus* (*)(const OrtKernelContext*, size_t, const OrtValue**)>(90)(
        context, index, value);
  }
  OrtStatus* output(OrtKernelContext* context, size_t index, const int64_t* dims, size_t num_dims,
                    OrtValue** value) const {
    return at<OrtStatus* (*)(OrtKernelContext*, size_t, const int64_t*, size_t, OrtValue**)>(91)(
        context, index, dims, num_dims, value);
  }
  void release(OrtStatus* status) const { at<void (*)(OrtStatus*)>(93)(status); }
  void release(OrtTensorTypeAndShapeInfo* info) const {
    at<void (*)(OrtTensorTypeAndShapeInfo*)>(99)(info);
  }
  // Calls fn(data, i) for each i below `total`, on the threads of the session.
  OrtStatus* parallel_for(const OrtKernelContext* context, void (*fn)(void*, size_t), size_t total,
                          size_t num_batches, void* data) const {
    return at<OrtStatus* (*)(const OrtKernelContext*, void (*)(void*, size_t), size_t, size_t,
                             void*)>(274)(context, fn, total, num_batches, data);
  }

 private:
  template <typename Function>
  Function at(size_t index) const {
    return reinterpret_cast<Function>(table_[index]);
  }

  void* const* table_;
};

}  // namespace edgespec
