#include "cpu.h"

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace edgespec {

#if defined(__x86_64__)
namespace {

struct Registers {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
  Registers r;
  if (__get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx) == 0) return Registers{};
  return r;
}

// Which register states the operating system saves when it switches threads (XCR0).
uint64_t saved_states() {
  uint32_t low = 0, high = 0;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

bool bit(uint32_t word, int index) { return ((word >> index) & 1u) != 0; }

// Asks for the registers of AMX, which Linux gives to a process that asks, for all its threads;
// without having asked its instructions fault.
bool tiles_granted() {
#if defined(__linux__)
  constexpr long kAsk = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kAsk, kTileData) == 0;
#else
  return false;
#endif
}

Cpu detect() {
  Cpu cpu;
  const Registers basic = cpuid(1, 0);
  if (!bit(basic.ecx, 27)) return cpu;  // OSXSAVE: without it xgetbv faults
  const uint64_t states = saved_states();
  const bool ymm = (states & 0x6) == 0x6;
  const bool zmm = (states & 0xe6) == 0xe6;
  const Registers more = cpuid(7, 0);
  const Registers most = more.eax >= 1 ? cpuid(7, 1) : Registers{};
  const bool fma = bit(basic.ecx, 12) && bit(basic.ecx, 29);
  cpu.avx2 = ymm && fma && bit(more.ebx, 5);
  cpu.avx_vnni = cpu.avx2 && bit(most.eax, 4);
  cpu.avx512 = cpu.avx2 && zmm && bit(more.ebx, 16) && bit(more.ebx, 17) && bit(more.ebx, 30) &&
               bit(more.ebx, 31);
  cpu.avx512_vnni = cpu.avx512 && bit(more.ecx, 11);
  const bool tiles = (states & 0x60000) == 0x60000;
  cpu.amx_int8 = cpu.avx512_vnni && tiles && bit(more.edx, 24) && bit(more.edx, 25) &&
                 tiles_granted();
  return cpu;
}

}  // namespace
#elif defined(__aarch64__) && defined(__linux__)
namespace {

// As the kernel says it; headers of older systems do not name the second one.
constexpr unsigned long kDotProducts = 1ul << 20;    // HWCAP_ASIMDDP
constexpr unsigned long kMatrixProducts = 1ul << 13;  // HWCAP2_I8MM

Cpu detect() {
  Cpu cpu;
  cpu.neon_dotprod = (getauxval(AT_HWCAP) & kDotProducts) != 0;
  cpu.neon_i8mm = cpu.neon_dotprod && (getauxval(AT_HWCAP2) & kMatrixProducts) != 0;
  return cpu;
}

}  // namespace
#elif defined(__aarch64__) && defined(__APPLE__)
namespace {

bool has(const char* feature) {
  int found = 0;
  size_t size = sizeof found;
  return sysctlbyname(feature, &found, &size, nullptr, 0) == 0 && found != 0;
}

Cpu detect() {
  Cpu cpu;
  cpu.neon_dotprod = has("hw.optional.arm.FEAT_DotProd");
  cpu.neon_i8mm = cpu.neon_dotprod && has("hw.optional.arm.FEAT_I8MM");
  return cpu;
}

}  // namespace
#else
namespace {
Cpu detect() { return Cpu{}; }
}  // namespace
#endif

const Cpu& Cpu::here() {
  static const Cpu cpu = detect();
  return cpu;
}

}  // namespace edgespec
