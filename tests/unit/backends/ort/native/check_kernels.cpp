// Runs the kernels of every usable level without Python and without ONNX Runtime: against float64,
// against the portable level's bits, and a row alone against the same row among others. Prints the
// levels, and a digest of all results, which is the same on every machine.
//
// test_arm.py compiles it for ARM; it runs on any machine.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "attention.h"
#include "levels.h"
#include "matmul.h"
#include "matmul_proof.h"

namespace edgespec {
namespace {

int failures = 0;
uint64_t digest = 14695981039346656037ull;  // FNV-1a

void expect(bool holds, const std::string& what) {
  if (holds) return;
  std::printf("failed: %s\n", what.c_str());
  ++failures;
}

template <typename T>
void add_to_digest(const std::vector<T>& values) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(values.data());
  for (size_t i = 0; i < values.size() * sizeof(T); ++i) digest = (digest ^ bytes[i]) * 1099511628211ull;
}

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

std::vector<float> some(ProofNumbers& numbers, int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = numbers.real();
  return values;
}

// ---- the product

double float_of_half(uint16_t half) {
  const int exponent = half >> 10 & 31, fraction = half & 1023;
  const double size = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  return half >> 15 ? -size : size;
}

struct Product {
  MatMulShape shape;
  RowRounding rounding;
  std::vector<uint8_t> weight;

  Product(const MatMulShape& of, RowRounding how, ProofNumbers& numbers)
      : shape(of), rounding(how), weight(some_weight(of, numbers)) {}

  // Where what a block shares begins, and the block.
  uint8_t* factors(int64_t panel, int64_t b) {
    const int64_t shared = b / shape.super_block;
    return weight.data() + panel * shape.panel_bytes() +
           shared * (shape.super_block * shape.block_bytes() + shape.factor_bytes());
  }
  uint8_t* block(int64_t panel, int64_t b) {
    return factors(panel, b) + shape.factor_bytes() + b % shape.super_block * shape.block_bytes();
  }

  std::string name() const {
    return "product of " + std::to_string(shape.bits) + " bits, blocks of " +
           std::to_string(shape.block) + ", " + std::to_string(shape.in) + " by " +
           std::to_string(shape.out);
  }

  std::vector<float> run(const MatMulKernels& kernels, const std::vector<float>& x) const {
    const int64_t rows = static_cast<int64_t>(x.size()) / shape.in;
    std::vector<float> y(static_cast<size_t>(rows * shape.out));
    multiply(kernels, shape, rounding, weight.data(), x.data(), rows, y.data());
    return y;
  }

  double half_at(const uint8_t* at) const { return float_of_half(static_cast<uint16_t>(at[0] | at[1] << 8)); }

  // A block's scale of an output, or with `part` 1 its minimum.
  double scale_at(int64_t panel, int64_t b, int64_t o, int part) {
    const uint8_t* at = block(panel, b) + shape.values_bytes() + part * kPanel * shape.scale_bytes();
    const double global = static_cast<double>(shape.global);
    if (shape.scales == Scales::kFloat32) {
      float scale;
      std::memcpy(&scale, at + 4 * o, 4);
      return static_cast<double>(scale) * global;
    }
    if (!shape.has_factors()) return half_at(at + 2 * o) * global;
    const int byte = shape.scales == Scales::kSuper ? static_cast<int8_t>(at[o]) : at[o];
    return byte * half_at(factors(panel, b) + part * 2 * kPanel + 2 * o) * global;
  }

  // The weight's value of an output and an input, as matmul.h describes the layout, and the minimum
  // that is subtracted.
  std::pair<double, double> weight_at(int64_t output, int64_t input) {
    const int64_t panel = output / kPanel, o = output % kPanel, b = input / shape.block;
    const int64_t i = input % shape.block, quad = i % 16 / 4, lines = shape.bits / 2;
    const uint8_t* step = block(panel, b) + i / 16 * lines * kTiles * kLine;
    auto byte = [&](int64_t line) { return step[(line * kTiles + o / kTile) * kLine + o % kTile * 4 + i % 4]; };
    int value = shape.bits == 8 ? byte(quad) : quad % 2 == 0 ? byte(quad / 2) % 16 : byte(quad / 2) / 16;
    if (shape.bits == 6) value += (byte(2) >> 2 * quad & 3) * 16;
    const bool coded = shape.codebook != Codebook::kNone;
    value = coded ? kCodebooks[static_cast<int>(shape.codebook)][value] : value - shape.middle();
    const double minimum = shape.has_minimums() ? scale_at(panel, b, o, 1) : 0;
    return {value * scale_at(panel, b, o, 0), minimum};
  }

  // A row after rounding.
  std::vector<double> rounded(const float* row) const {
    std::vector<double> values;
    for (int64_t i = 0; i < shape.in; ++i) {
      const bool whole = rounding.kind == Rounding::kRow;
      const int64_t begin = whole ? 0 : i / shape.block * shape.block;
      const int64_t end = whole ? shape.in : std::min(shape.in, begin + shape.block);
      float reach = 0;
      for (int64_t j = begin; j < end; ++j) reach = std::max(reach, std::fabs(row[j]));
      const Scale scale = scale_of(rounding, reach);
      const double steps = std::nearbyint(scale.units(row[i]));
      values.push_back(std::max(-128.0, std::min(127.0, steps)) * static_cast<double>(scale.scale));
    }
    return values;
  }

  void check_reference(const std::string& level, const std::vector<float>& x,
                       const std::vector<float>& y) {
    for (int64_t r = 0; r < static_cast<int64_t>(y.size()) / shape.out; ++r) {
      const std::vector<double> row = rounded(x.data() + r * shape.in);
      for (int64_t o = 0; o < shape.out; ++o) {
        double sum = 0, size = 0;
        for (int64_t i = 0; i < shape.in; ++i) {
          const auto [value, minimum] = weight_at(o, i);
          const double one = row[static_cast<size_t>(i)];
          sum += one * (value - minimum);
          size += std::fabs(one) * (std::fabs(value) + std::fabs(minimum));
        }
        const double found = static_cast<double>(y[static_cast<size_t>(r * shape.out + o)]);
        if (std::fabs(found - sum) <= 1e-6 * size + 1e-12) continue;
        return expect(false, level + ": " + name() + " is not that of float64");
      }
    }
  }

  void check(int64_t rows, ProofNumbers& numbers) {
    const std::vector<float> x = some(numbers, rows * shape.in);
    const std::vector<float> wanted = run(matmul_portable, x);
    check_reference("portable", x, wanted);
    add_to_digest(wanted);
    for (const Level& level : usable_levels()) {
      const std::string what = std::string(level.name) + ": " + name();
      expect(same_bits(run(*level.matmul, x), wanted), what + " has other bits");
      const std::vector<float> last(x.end() - shape.in, x.end());
      const std::vector<float> alone = run(*level.matmul, last);
      expect(std::memcmp(alone.data(), &wanted[static_cast<size_t>((rows - 1) * shape.out)],
                         alone.size() * sizeof(float)) == 0,
             what + ": a row has other bits alone");
    }
  }
};

void check_products() {
  ProofNumbers numbers;
  const std::vector<std::pair<int64_t, int64_t>> sizes = {{1, 1}, {7, 3}, {33, 17}, {129, 70}, {300, 130}};
  const MatMulShape forms[] = {
      {0, 0, 4, 16, Scales::kFloat16Min},
      {0, 0, 4, 32, Scales::kSuperMin, 8},
      {0, 0, 6, 64, Scales::kFloat16},
      {0, 0, 6, 16, Scales::kSuper, 16},
      {0, 0, 6, 32, Scales::kSuperMin, 3},
      {0, 0, 8, 128, Scales::kSuperMin, 1},
      {0, 0, 4, 32, Scales::kSuper, 8, Codebook::kIq4Nl},
      {0, 0, 4, 16, Scales::kFloat16, 1, Codebook::kFp4, 0.3f},
  };
  const RowRounding roundings[] = {{Rounding::kBlock}, {Rounding::kRow}, {Rounding::kStatic, 0.02f}};
  for (const auto& [in, out] : sizes) {
    for (int bits : {4, 8}) {
      for (int64_t block : {32, 64, 128}) {
        for (const RowRounding rounding : roundings) {
          Product product({in, out, bits, block}, rounding, numbers);
          for (int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 61}) {
            if (rows <= 9 || rounding.kind == Rounding::kBlock) product.check(rows, numbers);
          }
        }
      }
    }
    for (MatMulShape form : forms) {
      form.in = in;
      form.out = out;
      Product product(form, {Rounding::kBlock}, numbers);
      for (int64_t rows : {1, 2, 3, 5, 8, 13}) product.check(rows, numbers);
    }
  }
}

// The largest values that there are: sums of a few products must not leave what holds them.
void check_products_of_extremes() {
  ProofNumbers numbers;
  const MatMulShape forms[] = {
      {256, 70, 4, 128},
      {256, 70, 6, 128},
      {256, 70, 8, 128},
      {256, 70, 8, 128, Scales::kFloat16Min},
      {256, 70, 4, 128, Scales::kFloat16, 1, Codebook::kIq4Nl},
  };
  for (const MatMulShape& form : forms) {
    Product product(form, {Rounding::kStatic, 0.01f}, numbers);
    for (int64_t b = 0; b < form.panels() * form.blocks(); ++b) {
      uint8_t* values = product.block(b / form.blocks(), b % form.blocks());
      for (int64_t i = 0; i < form.values_bytes(); ++i) values[i] = i / 8 % 3 == 0 ? 0xff : 0;
    }
    std::vector<float> x(9 * 256);
    for (size_t i = 0; i < x.size(); ++i) x[i] = i / 32 % 5 == 1 ? 1e3f : -1e3f;
    const std::vector<float> wanted = product.run(matmul_portable, x);
    product.check_reference("portable", x, wanted);
    for (const Level& level : usable_levels()) {
      const bool same = same_bits(product.run(*level.matmul, x), wanted);
      expect(same, std::string(level.name) + ": " + product.name() + " of extremes");
    }
  }
}

// What is no number stays in its own row; all levels agree which results are none.
void check_products_of_no_numbers() {
  ProofNumbers numbers;
  const Product product({70, 40, 4, 32}, {Rounding::kBlock}, numbers);
  std::vector<float> x = some(numbers, 9 * 70);
  const std::vector<float> calm = product.run(matmul_portable, x);
  x[70 + 3] = std::nanf("");
  x[3 * 70 + 40] = -INFINITY;
  x[4 * 70] = 1e38f;
  for (int64_t i = 0; i < 70; ++i) x[static_cast<size_t>(5 * 70 + i)] = 1e-33f;
  const std::vector<float> wanted = product.run(matmul_portable, x);
  for (const Level& level : usable_levels()) {
    const std::vector<float> found = product.run(*level.matmul, x);
    bool agree = true;
    for (size_t i = 0; i < found.size(); ++i) {
      const bool none = std::isnan(wanted[i]);
      agree = agree && (none ? std::isnan(found[i]) : found[i] == wanted[i]);
      const size_t row = i / 40;
      if (row == 0 || row == 2 || row > 5) agree = agree && found[i] == calm[i];
      if (row == 1) agree = agree && none;
      if (row == 5) agree = agree && found[i] == 0.0f;
    }
    expect(agree, std::string(level.name) + ": a row of no numbers");
  }
}

// ---- attention

// A sequence whose prefix stands in caches, and a tree behind it; another sequence beside it.
struct Tree {
  int64_t group, kv_heads = 2, dim, rotary, prefix, window;
  CacheType type;
  std::vector<int64_t> parents;
  std::vector<float> q, k, v, cos, sin;  // [prefix + nodes, heads, dim]

  Tree(CacheType of, int64_t width, int64_t heads_of_kv, int64_t length, int64_t sees,
       ProofNumbers& numbers)
      : group(heads_of_kv), dim(width), rotary(width / 2 * 2), prefix(length), window(sees), type(of) {
    for (int64_t node = 0; node < 7; ++node) {
      parents.push_back(node == 0 ? -1 : static_cast<int64_t>(numbers.next() % static_cast<uint32_t>(node + 1)) - 1);
    }
    const int64_t tokens = prefix + nodes();
    q = some(numbers, tokens * heads() * dim);
    k = some(numbers, tokens * kv_heads * dim);
    v = some(numbers, tokens * kv_heads * dim);
    for (int64_t token = 0; token < tokens; ++token) {
      // a node turns as far as its position says
      const int64_t position = token < prefix ? token : prefix + depth(token - prefix);
      for (int64_t i = 0; i < rotary / 2; ++i) {
        const double angle = static_cast<double>(position) * std::pow(0.5, static_cast<double>(i % 8));
        cos.push_back(static_cast<float>(std::cos(angle)));
        sin.push_back(static_cast<float>(std::sin(angle)));
      }
    }
  }

  int64_t heads() const { return group * kv_heads; }
  int64_t nodes() const { return static_cast<int64_t>(parents.size()); }
  int64_t slots() const { return prefix + nodes(); }
  int64_t row_bytes() const {
    return type == CacheType::kFloat32 ? 4 * dim : type == CacheType::kFloat16 ? 2 * dim : dim + kScaleBytes;
  }
  float scale() const { return 0.5f / std::sqrt(static_cast<float>(dim)); }
  int64_t depth(int64_t node) const {
    return parents[static_cast<size_t>(node)] < 0 ? 0 : 1 + depth(parents[static_cast<size_t>(node)]);
  }
  // From a root on.
  std::vector<int64_t> path(int64_t node) const {
    std::vector<int64_t> nodes;
    for (; node >= 0; node = parents[static_cast<size_t>(node)]) nodes.insert(nodes.begin(), node);
    return nodes;
  }

  std::string name() const {
    return "attention, type " + std::to_string(static_cast<int>(type)) + ", heads of " +
           std::to_string(dim) + ", " + std::to_string(group) + " of a KV head, behind " +
           std::to_string(prefix) + ", window " + std::to_string(window);
  }

  int64_t first_of(int64_t position) const { return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0; }
};

struct Caches {
  std::vector<uint8_t> keys, values;

  // What was never written is a NaN of all types.
  explicit Caches(const Tree& tree)
      : keys(static_cast<size_t>(tree.kv_heads * tree.slots() * tree.row_bytes()), 0xff), values(keys) {}
};

std::vector<float> picked(const std::vector<float>& rows, const std::vector<int64_t>& tokens, int64_t size) {
  std::vector<float> found;
  for (int64_t token : tokens) found.insert(found.end(), rows.begin() + token * size, rows.begin() + (token + 1) * size);
  return found;
}

// Rows of `tokens` in the slots from `start` on; `visible` [tokens, tokens].
std::vector<float> attend(const AttentionKernels& kernels, const Tree& tree, Caches& caches,
                          const std::vector<int64_t>& tokens, int64_t start,
                          const std::vector<uint8_t>& visible, const std::vector<int64_t>& first) {
  AttentionCall call;
  call.batch = 1;
  call.rows = call.key_rows = call.columns = static_cast<int64_t>(tokens.size());
  call.heads = tree.heads();
  call.kv_heads = tree.kv_heads;
  call.dim = tree.dim;
  call.slots = tree.slots();
  call.rotary = tree.rotary;
  call.cache_type = tree.type;
  call.scale = tree.scale();
  const auto q = picked(tree.q, tokens, tree.heads() * tree.dim);
  const auto k = picked(tree.k, tokens, tree.kv_heads * tree.dim);
  const auto v = picked(tree.v, tokens, tree.kv_heads * tree.dim);
  const auto cos = picked(tree.cos, tokens, tree.rotary / 2), sin = picked(tree.sin, tokens, tree.rotary / 2);
  std::vector<float> out(q.size());
  call.q = q.data();
  call.k = k.data();
  call.v = v.data();
  call.cos = tree.rotary > 0 ? cos.data() : nullptr;
  call.sin = tree.rotary > 0 ? sin.data() : nullptr;
  call.keys = caches.keys.data();
  call.values = caches.values.data();
  call.write_indices = call.lengths = &start;
  call.visible = visible.data();
  call.first = first.data();
  call.out = out.data();
  edgespec::attend(kernels, call);
  return out;
}

std::vector<float> prefill(const AttentionKernels& kernels, const Tree& tree, Caches& caches, int64_t piece) {
  std::vector<float> out;
  for (int64_t begin = 0; begin < tree.prefix; begin += piece) {
    const int64_t count = std::min(piece, tree.prefix - begin);
    std::vector<int64_t> tokens(static_cast<size_t>(count)), first;
    std::iota(tokens.begin(), tokens.end(), begin);
    std::vector<uint8_t> visible(static_cast<size_t>(count * count), 0);
    for (int64_t row = 0; row < count; ++row) {
      std::memset(&visible[static_cast<size_t>(row * count)], 1, static_cast<size_t>(row + 1));
      first.push_back(tree.first_of(begin + row));
    }
    const auto some_rows = attend(kernels, tree, caches, tokens, begin, visible, first);
    out.insert(out.end(), some_rows.begin(), some_rows.end());
  }
  return out;
}

std::vector<float> run_tree(const AttentionKernels& kernels, const Tree& tree, Caches& caches) {
  const int64_t count = tree.nodes();
  std::vector<int64_t> tokens(static_cast<size_t>(count)), first;
  std::iota(tokens.begin(), tokens.end(), tree.prefix);
  std::vector<uint8_t> visible(static_cast<size_t>(count * count), 0);
  for (int64_t node = 0; node < count; ++node) {
    for (int64_t seen : tree.path(node)) visible[static_cast<size_t>(node * count + seen)] = 1;
    first.push_back(tree.first_of(tree.prefix + tree.depth(node)));
  }
  return attend(kernels, tree, caches, tokens, tree.prefix, visible, first);
}

// The last node of a path by plain decoding.
std::vector<float> decode(const AttentionKernels& kernels, const Tree& tree, Caches caches, int64_t node) {
  std::vector<float> out;
  int64_t position = tree.prefix;
  for (int64_t one : tree.path(node)) {
    out = attend(kernels, tree, caches, {tree.prefix + one}, position, {1}, {tree.first_of(position)});
    ++position;
  }
  return out;
}

// Element d of a cached row.
double cached(const Tree& tree, const std::vector<uint8_t>& cache, int64_t head, int64_t slot, int64_t d) {
  const uint8_t* row = cache.data() + (head * tree.slots() + slot) * tree.row_bytes();
  float number;
  uint16_t half;
  switch (tree.type) {
    case CacheType::kFloat32: std::memcpy(&number, row + 4 * d, 4); return static_cast<double>(number);
    case CacheType::kFloat16: std::memcpy(&half, row + 2 * d, 2); return float_of_half(half);
    default: std::memcpy(&number, row + tree.dim, 4); return static_cast<double>(number) * static_cast<int8_t>(row[d]);
  }
}

// Element d of a head of the queries after its rotation.
double turned(const Tree& tree, int64_t token, int64_t head, int64_t d) {
  const float* x = tree.q.data() + (token * tree.heads() + head) * tree.dim;
  const int64_t half = tree.rotary / 2;
  if (d >= tree.rotary) return static_cast<double>(x[d]);
  const int64_t i = d % half;
  const double cos = static_cast<double>(tree.cos[static_cast<size_t>(token * half + i)]);
  const double sin = static_cast<double>(tree.sin[static_cast<size_t>(token * half + i)]);
  const double x1 = static_cast<double>(x[i]), x2 = static_cast<double>(x[i + half]);
  return d < half ? x1 * cos - x2 * sin : x1 * sin + x2 * cos;
}

void check_reference(const Tree& tree, const Caches& caches, const std::vector<float>& found) {
  for (int64_t node = 0; node < tree.nodes(); ++node) {
    std::vector<int64_t> slots(static_cast<size_t>(tree.prefix));
    std::iota(slots.begin(), slots.end(), 0);
    for (int64_t one : tree.path(node)) slots.push_back(tree.prefix + one);
    slots.erase(slots.begin(), slots.begin() + tree.first_of(static_cast<int64_t>(slots.size()) - 1));
    for (int64_t head = 0; head < tree.heads(); ++head) {
      std::vector<double> weights, sums(static_cast<size_t>(tree.dim), 0.0);
      double total = 0, largest = 0;
      for (int64_t slot : slots) {
        double score = 0;
        for (int64_t d = 0; d < tree.dim; ++d) {
          score += turned(tree, tree.prefix + node, head, d) * cached(tree, caches.keys, head / tree.group, slot, d);
        }
        weights.push_back(std::exp(score * static_cast<double>(tree.scale())));
        total += weights.back();
      }
      for (size_t i = 0; i < slots.size(); ++i) {
        for (int64_t d = 0; d < tree.dim; ++d) {
          const double value = cached(tree, caches.values, head / tree.group, slots[i], d);
          sums[static_cast<size_t>(d)] += weights[i] / total * value;
          largest = std::max(largest, std::fabs(value));
        }
      }
      for (int64_t d = 0; d < tree.dim; ++d) {
        const float one = found[static_cast<size_t>((node * tree.heads() + head) * tree.dim + d)];
        const double off = std::fabs(static_cast<double>(one) - sums[static_cast<size_t>(d)]);
        if (off <= 2e-6 * largest) continue;
        return expect(false, tree.name() + " is not that of float64");
      }
    }
  }
}

void check_tree(const Tree& tree) {
  Caches plain(tree);
  const std::vector<float> prompt = prefill(attention_portable, tree, plain, tree.prefix);
  const Caches before = plain;
  const std::vector<float> wanted = run_tree(attention_portable, tree, plain);
  check_reference(tree, plain, wanted);
  add_to_digest(prompt);
  add_to_digest(wanted);
  for (const Level& level : usable_levels()) {
    const std::string what = std::string(level.name) + ": " + tree.name();
    Caches caches(tree);
    expect(same_bits(prefill(*level.attention, tree, caches, 37), prompt), what + ": a prompt in pieces has other bits");
    expect(same_bits(run_tree(*level.attention, tree, caches), wanted), what + " has other bits");
    expect(same_bits(caches.keys, plain.keys) && same_bits(caches.values, plain.values), what + ": other caches");
    const int64_t node = tree.nodes() - 1, size = tree.heads() * tree.dim;
    const std::vector<float> alone = decode(*level.attention, tree, before, node);
    expect(std::memcmp(alone.data(), &wanted[static_cast<size_t>(node * size)], alone.size() * sizeof(float)) == 0,
           what + ": a node has other bits in plain decoding");
  }
}

void check_attention() {
  ProofNumbers numbers;
  for (CacheType type : {CacheType::kFloat32, CacheType::kFloat16, CacheType::kInt8}) {
    int64_t group = 1;
    for (int64_t dim : {1, 2, 17, 38, 64, 80, 128}) {
      check_tree(Tree(type, dim, group, 5, 0, numbers));
      group = group % 5 + 1;
    }
    check_tree(Tree(type, 24, 3, 253, 0, numbers));
    check_tree(Tree(type, 20, 2, 520, 300, numbers));
    check_tree(Tree(type, 16, 1, 40, 4, numbers));
  }
}

// A NaN of one path leaves the others as they are.
void check_attention_with_nan() {
  ProofNumbers numbers;
  Tree tree(CacheType::kFloat32, 24, 2, 9, 0, numbers);
  tree.parents = {-1, 0, 0, 2, 1, 1, 0};
  const int64_t size = tree.kv_heads * tree.dim, row = tree.heads() * tree.dim;
  Tree harmed = tree;
  harmed.k[static_cast<size_t>((tree.prefix + 2) * size)] = std::nanf("");
  harmed.v[static_cast<size_t>((tree.prefix + 2) * size + tree.dim)] = INFINITY;
  for (const Level& level : usable_levels()) {
    Caches caches(tree);
    prefill(*level.attention, tree, caches, 5);
    Caches others = caches;
    const auto calm = run_tree(*level.attention, tree, caches);
    const auto found = run_tree(*level.attention, harmed, others);
    bool holds = true;
    for (int64_t node = 0; node < tree.nodes(); ++node) {
      const size_t at = static_cast<size_t>(node * row);
      const bool same = std::memcmp(&calm[at], &found[at], static_cast<size_t>(row) * sizeof(float)) == 0;
      holds = holds && (node == 2 || node == 3 ? !same && std::isnan(found[at]) : same);
    }
    expect(holds, std::string(level.name) + ": a NaN harms its own path alone");
  }
}

}  // namespace
}  // namespace edgespec

int main() {
  std::string names;
  for (const auto& level : edgespec::usable_levels()) names += (names.empty() ? "" : ",") + std::string(level.name);
  std::printf("levels: %s\n", names.c_str());
  edgespec::check_products();
  edgespec::check_products_of_extremes();
  edgespec::check_products_of_no_numbers();
  edgespec::check_attention();
  edgespec::check_attention_with_nan();
  std::printf("digest: %016llx\n", static_cast<unsigned long long>(edgespec::digest));
  return edgespec::failures == 0 ? 0 : 1;
}
