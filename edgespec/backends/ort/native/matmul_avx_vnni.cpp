// The product by AVX-VNNI: 32 products of bytes an instruction, for CPUs without AVX-512.

#include "matmul_ymm.h"

namespace edgespec {
namespace {

struct AvxVnniDot {
  static constexpr int kMostRows = 6;

  // As an intrinsic GCC 12 copies the sums around it
  template <int kBits>
  static void add(Ints& sums, Ints unsigned_bytes, Ints signed_bytes) {
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(unsigned_bytes), "x"(signed_bytes));
  }
};

}  // namespace

const MatMulKernels matmul_avx_vnni = kernels_of<Ymm<AvxVnniDot>>();

}  // namespace edgespec
