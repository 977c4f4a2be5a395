// Which instructions this CPU has and the operating system keeps registers for.
#pragma once

namespace edgespec {

struct Cpu {
  bool avx2 = false;  // with FMA and half-precision conversion
  bool avx_vnni = false;
  bool avx512 = false;  // F, BW, DQ and VL
  bool avx512_vnni = false;
  bool amx_int8 = false;  // beside avx512_vnni; its registers were granted to this process
  bool neon_dotprod = false;  // products of signed bytes, ARMv8.2
  bool neon_i8mm = false;     // of matrices of bytes too, ARMv8.6

  static const Cpu& here();
};

}  // namespace edgespec
