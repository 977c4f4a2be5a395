#include "levels.h"

#include <atomic>

#include "attention.h"
#include "cpu.h"
#include "matmul.h"

namespace edgespec {
namespace {

std::vector<Level> all_levels() {
  std::vector<Level> levels;
#if defined(__x86_64__)
  const Cpu& cpu = Cpu::here();
  levels.push_back({"avx512_vnni", cpu.avx512_vnni, &matmul_avx512_vnni, &attention_avx512});
  levels.push_back({"avx_vnni", cpu.avx_vnni, &matmul_avx_vnni, &attention_avx2});
  levels.push_back({"avx2", cpu.avx2, &matmul_avx2, &attention_avx2});
#endif
  levels.push_back({"portable", true, &matmul_portable, &attention_portable});
  return levels;
}

std::vector<Level> proven_levels() {
  std::vector<Level> proven;
  for (const Level& candidate : all_levels()) {
    const bool portable = candidate.attention == &attention_portable;
    if (portable || (candidate.cpu_has_it && proves_itself(*candidate.matmul) &&
                     proves_itself(*candidate.attention))) {
      proven.push_back(candidate);
    }
  }
  return proven;
}

std::atomic<const Level*> chosen{nullptr};

}  // namespace

const std::vector<Level>& usable_levels() {
  static const std::vector<Level> levels = proven_levels();
  return levels;
}

const Level& level() {
  const Level* one = chosen.load(std::memory_order_acquire);
  return one != nullptr ? *one : usable_levels().front();
}

bool use_level(const std::string& name) {
  for (const Level& candidate : usable_levels()) {
    if (name == candidate.name) {
      chosen.store(&candidate, std::memory_order_release);
      return true;
    }
  }
  return false;
}

}  // namespace edgespec
