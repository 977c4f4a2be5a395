#include "levels.h"

#include <atomic>
#include <mutex>

#include "attention.h"
#include "cpu.h"
#include "head.h"
#include "matmul.h"
#include "norm_gate.h"
#include "recurrence.h"

namespace edgespec {
namespace {

std::vector<Level> all_levels() {
  std::vector<Level> levels;
#if defined(__x86_64__)
  const Cpu& cpu = Cpu::here();
  levels.push_back({"amx_int8", cpu.amx_int8 && amx_runs(), &matmul_amx_int8, &attention_avx512,
                    &rows_avx512, &delta_net_avx512, &head_avx512});
  levels.push_back({"avx512_vnni", cpu.avx512_vnni, &matmul_avx512_vnni, &attention_avx512,
                    &rows_avx512, &delta_net_avx512, &head_avx512});
  levels.push_back({"avx512", cpu.avx512, &matmul_avx2, &attention_avx512, &rows_avx512,
                    &delta_net_avx512, &head_avx512});
  levels.push_back({"avx_vnni", cpu.avx_vnni, &matmul_avx_vnni, &attention_avx2, &rows_avx2,
                    &delta_net_avx2, &head_avx2});
  levels.push_back({"avx2", cpu.avx2, &matmul_avx2, &attention_avx2, &rows_avx2, &delta_net_avx2,
                    &head_avx2});
#elif defined(__aarch64__)
  // Of norms, gates and the search in logits compilers make the vectors that all these CPUs have
  const Cpu& cpu = Cpu::here();
  levels.push_back({"neon_i8mm", cpu.neon_i8mm, &matmul_neon_i8mm, &attention_neon,
                    &rows_portable, &delta_net_neon, &head_portable});
  levels.push_back({"neon_dotprod", cpu.neon_dotprod, &matmul_neon_dotprod, &attention_neon,
                    &rows_portable, &delta_net_neon, &head_portable});
  levels.push_back({"neon", true, &matmul_neon, &attention_neon, &rows_portable, &delta_net_neon,
                    &head_portable});
#endif
  levels.push_back({"portable", true, &matmul_portable, &attention_portable, &rows_portable,
                    &delta_net_portable, &head_portable});
  return levels;
}

// All levels, and which of them are usable: each is proven when it is first asked for.
class Proofs {
 public:
  const std::vector<Level>& levels() const { return levels_; }

  bool usable(size_t index) {
    const Level& candidate = levels_[index];
    if (candidate.attention == &attention_portable) return true;
    std::call_once(asked_[index], [&] {
      usable_[index] = candidate.cpu_has_it && proves_itself(*candidate.matmul) &&
                       proves_itself(*candidate.attention) && proves_itself(*candidate.rows) &&
                       proves_itself(*candidate.delta_net) && proves_itself(*candidate.head);
    });
    return usable_[index];
  }

 private:
  const std::vector<Level> levels_ = all_levels();
  std::vector<std::once_flag> asked_{levels_.size()};
  std::vector<char> usable_ = std::vector<char>(levels_.size());
};

Proofs& proofs() {
  static Proofs here;
  return here;
}

const Level& best_level() {
  size_t index = 0;
  while (!proofs().usable(index)) ++index;  // the last one is
  return proofs().levels()[index];
}

std::atomic<const Level*> chosen{nullptr};

}  // namespace

std::vector<Level> usable_levels() {
  std::vector<Level> found;
  for (size_t i = 0; i < proofs().levels().size(); ++i) {
    if (proofs().usable(i)) found.push_back(proofs().levels()[i]);
  }
  return found;
}

const Level& level() {
  if (const Level* one = chosen.load(std::memory_order_acquire)) return *one;
  static const Level& best = best_level();
  return best;
}

bool use_level(const std::string& name) {
  for (size_t i = 0; i < proofs().levels().size(); ++i) {
    const Level& candidate = proofs().levels()[i];
    if (name == candidate.name && proofs().usable(i)) {
      chosen.store(&candidate, std::memory_order_release);
      return true;
    }
  }
  return false;
}

}  // namespace edgespec
