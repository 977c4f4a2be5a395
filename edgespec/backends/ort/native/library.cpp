// What the library shows to others: RegisterCustomOps to ONNX Runtime, a few functions to Python.

#include <map>
#include <mutex>
#include <string>

#include "head.h"
#include "levels.h"
#include "matmul.h"
#include "operator.h"

#define EDGESPEC_PUBLIC extern "C" __attribute__((visibility("default")))

namespace edgespec {
namespace {

constexpr const char* kDomain = "edgespec";

OrtStatus* make_domain(const Api& api, OrtCustomOpDomain** domain) {
  if (OrtStatus* status = api.create_domain(kDomain, domain)) return status;
  for (const auto& family : {attention_operators(), experts_operators(), head_operators(),
                             matmul_operators(), norm_gate_operators(),
                             recurrence_operators()}) {
    for (const OrtCustomOp* op : family) {
      if (OrtStatus* status = api.add_operator(*domain, op)) return status;
    }
  }
  return nullptr;
}

// A domain lives as long as the library: sessions refer to it. Each ONNX Runtime of the process has
// its own, as it allocated it.
OrtStatus* register_operators(const OrtApi* table, OrtSessionOptions* options) {
  static std::mutex making;
  static std::map<const OrtApi*, OrtCustomOpDomain*> domains;
  const std::lock_guard<std::mutex> lock(making);
  const Api api(table);
  OrtCustomOpDomain*& domain = domains[table];
  if (domain == nullptr) {
    if (OrtStatus* status = make_domain(api, &domain)) return status;
  }
  return api.add_domain(options, domain);
}

}  // namespace
}  // namespace edgespec

EDGESPEC_PUBLIC edgespec::OrtStatus* RegisterCustomOps(edgespec::OrtSessionOptions* options,
                                                       const edgespec::OrtApiBase* base) {
  const edgespec::OrtApi* table = edgespec::Api::of(base);
  if (table == nullptr) {
    const edgespec::OrtApi* oldest = base->get_api(1);  // its first functions report the error
    if (oldest == nullptr) return nullptr;  // then the session says that it lacks the operators
    return edgespec::Api(oldest).create_status(
        edgespec::kFail, "edgespec's kernels need ONNX Runtime 1.18 or newer");
  }
  return edgespec::register_operators(table, options);
}

// The version of the layout of packed weights.
EDGESPEC_PUBLIC int edgespec_layout_version() { return edgespec::kLayoutVersion; }

// The name of the level of instructions in use.
EDGESPEC_PUBLIC const char* edgespec_level() { return edgespec::level().name; }

// The names of all levels that are usable here, the best one first, separated by commas.
EDGESPEC_PUBLIC const char* edgespec_levels() {
  static const std::string names = [] {
    std::string joined;
    for (const auto& level : edgespec::usable_levels()) {
      joined += (joined.empty() ? "" : ",") + std::string(level.name);
    }
    return joined;
  }();
  return names.c_str();
}

// Use the kernels of a level from the next call on: 1 where it is usable, else 0.
EDGESPEC_PUBLIC int edgespec_use_level(const char* name) {
  return edgespec::use_level(name) ? 1 : 0;
}

// y [num_rows, out] of x [num_rows, in] and a packed weight, whose scales and codebook are numbered
// as in matmul.h; rows have a scale per block (0), one each (1), or the one that is given (2).
EDGESPEC_PUBLIC void edgespec_low_bit_matmul(int64_t in, int64_t out, int bits, int64_t block,
                                             int scales, int64_t super_block, int codebook,
                                             float global, int rounding, float scale,
                                             const uint8_t* weight, const float* x,
                                             int64_t num_rows, float* y) {
  const edgespec::MatMulShape shape{in,
                                    out,
                                    bits,
                                    block,
                                    static_cast<edgespec::Scales>(scales),
                                    super_block,
                                    static_cast<edgespec::Codebook>(codebook),
                                    global};
  const edgespec::RowRounding how{static_cast<edgespec::Rounding>(rounding), scale};
  edgespec::multiply(*edgespec::level().matmul, shape, how, weight, x, num_rows, y);
}

// What stands in the first `ids` of num_rows rows of logits, `stride` apart: the `count` largest of
// each, and with `sums` the logarithm of the sum of the exponentials.
EDGESPEC_PUBLIC void edgespec_find(int64_t count, int64_t ids, int sums, const float* logits,
                                   int64_t num_rows, int64_t stride, int64_t* found_ids,
                                   float* found_values, float* logsumexp, uint8_t* finite) {
  static_assert(sizeof(bool) == 1, "flags are bytes");
  edgespec::find(*edgespec::level().head, {count, ids, sums != 0}, logits, num_rows, stride,
                 {found_ids, found_values, logsumexp, reinterpret_cast<bool*>(finite)});
}
