// The fused pass of Linear -> ReLU -> divide on a CPU: forward after torch's own product, bias
// included, and backward before torch's own products. launchers.h declares the functions; forward.h
// and backward.h call them on torch's threads. Each call handles a range of the elements.
//
//     forward    out [m, n], in place: out = relu(out) / divisor, and a mask of one bit an element
//     backward   grad_z [m, n] = mask bit ? grad_output / divisor : 0
//                grad_bias [n] = the sums of grad_z's columns
//
// A row of the mask has (n + 7) / 8 whole bytes. If n is not a multiple of 8, a row ends with
// unused bits, which are 0. The elements of two rows are then adjacent in memory, but their bits
// are not.
//
// For large matrices, the bandwidth of the memory is the limit. So each element is loaded once, and
// everything is done with it while it is in the L1 cache. The kernels do so for one strip after the
// other: a strip is up to 512 adjacent elements, which are a part of one row or several whole rows.
//
// grad_bias is summed in double and rounded once. So its error is no larger than that of torch's
// sum in float32, whatever the order of torch's additions. For float64, both sum in float64; here
// the terms are added in groups and in pairs, as torch adds them.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu/elements.h"
#include "cpu/map_blocks.h"
#include "launchers.h"

namespace kernels::cpu {
namespace {

struct Config {
  // The most elements of a strip. In float32, 512 elements of grad_output and of grad_z and 512
  // sums in double take 8 KiB. An L1 cache has 32 KiB or more.
  static constexpr int64_t kStrip = 512;
  // Backward adds the strips of grad_z to their sums four at a time: each sum is then loaded and
  // stored once for four terms.
  static constexpr int64_t kStripsAdded = 4;
  // Backward first sums the columns of each run of rows, and then the sums of the runs. A run has
  // 64 rows, or more if they are short: run_rows, below.
  static constexpr int64_t kRunRows = 64;
};
static_assert(Config::kStrip % kBlock == 0, "a full strip has whole blocks");
static_assert(Config::kStrip % 8 == 0, "the next strip of a row begins with a byte of the mask");

// How many bytes of a mask hold `bits` adjacent bits.
int64_t bytes_of_bits(int64_t bits) { return (bits + 7) / 8; }

// ------------------------------------------------------------------------- functions of a block
//
// E is a dtype's struct of cpu/elements.h.

// out = x / divisor
template <typename E>
void divide_block(const typename E::Bits* __restrict__ x, typename E::Compute divisor,
                  typename E::Bits* __restrict__ out) {
  for (int64_t i = 0; i < kBlock; ++i) out[i] = E::narrow(E::widen(x[i]) / divisor);
}

// values = x, in the type that arithmetic is done in
template <typename E>
void widen_block(const typename E::Bits* __restrict__ x, typename E::Compute* __restrict__ values) {
  for (int64_t i = 0; i < kBlock; ++i) values[i] = E::widen(x[i]);
}

#ifdef __F16C__
// divide_block and widen_block for float16, by the machine's instructions that convert eight
// numbers. These take a fifth of the time (EPYC) of the loops above, for which GCC 12 makes no
// vector instructions.
typedef float EightFloats __attribute__((vector_size(32), aligned(4), may_alias));
typedef short EightHalves __attribute__((vector_size(16), aligned(2), may_alias));

EightFloats widen_eight(const uint16_t* x) {
  return __builtin_ia32_vcvtph2ps256(*reinterpret_cast<const EightHalves*>(x));
}

template <>
void divide_block<Float16>(const uint16_t* x, float divisor, uint16_t* out) {
  constexpr int kToNearest = 0;
  for (int64_t i = 0; i < kBlock; i += 8) {
    const EightFloats quotients = widen_eight(x + i) / divisor;
    *reinterpret_cast<EightHalves*>(out + i) = __builtin_ia32_vcvtps2ph256(quotients, kToNearest);
  }
}

template <>
void widen_block<Float16>(const uint16_t* x, float* values) {
  for (int64_t i = 0; i < kBlock; i += 8) {
    *reinterpret_cast<EightFloats*>(values + i) = widen_eight(x + i);
  }
}
#endif

// --------------------------------------------------------------------------------------- masks

// Calls body(i, byte, count) for each byte of the mask of `rows` whole rows of n elements. The
// byte's lowest `count` bits belong to the elements i, i + 1, ..., counted from the first row's
// first element. With n = 10, for example, the calls of the first two rows are
//
//     body(0, mask, 8)    body(8, mask + 1, 2)    body(10, mask + 2, 8)    body(18, mask + 3, 2)
template <typename Byte, typename Body>
void for_mask_bytes(Byte* mask, int64_t rows, int64_t n, const Body& body) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < n; column += 8) {
      body(row * n + column, mask, std::min<int64_t>(n - column, 8));
      ++mask;
    }
  }
}

// The bits of a strip's elements without the unused bits at the ends of rows: element i of the
// strip has bit i % 8 of byte i / 8.
struct PackedMask {
  // One byte more than a strip's bits: eight_bits reads two bytes.
  uint8_t bytes[Config::kStrip / 8 + 1] = {};

  // The bits of the elements i to i + 7. Bits beyond the strip's last element mean nothing.
  int eight_bits(int64_t i) const {
    const int two_bytes = bytes[i / 8] | bytes[i / 8 + 1] << 8;
    return two_bytes >> i % 8 & 0xff;
  }
};

// Writes a strip's bits to the mask, where each row has bytes of its own. If the strip has one row,
// `columns` may be a part of it; otherwise the rows are whole.
void write_mask(const PackedMask& packed, int64_t rows, int64_t columns, uint8_t* mask) {
  if (rows == 1) {
    std::copy_n(packed.bytes, bytes_of_bits(columns), mask);
    return;
  }
  if (columns == 1) {  // the same as below, but faster
    for (int64_t i = 0; i < rows; ++i) mask[i] = packed.bytes[i / 8] >> i % 8 & 1;
    return;
  }
  for_mask_bytes(mask, rows, columns, [&](int64_t i, uint8_t* byte, int64_t count) {
    const int all_used_bits = (1 << count) - 1;
    *byte = static_cast<uint8_t>(packed.eight_bits(i) & all_used_bits);
  });
}

// The bits of a strip's elements as bytes: flag i is 0 if the gradient of element i is not kept.
struct Flags {
  // One block more than a strip: `read` writes up to 7 bytes beyond the last element, and
  // divide_and_select reads whole blocks.
  uint8_t bytes[Config::kStrip + kBlock];

  // Reads the mask of `rows` whole rows of n elements. The flags beyond the last element are 0.
  void read(const uint8_t* mask, int64_t rows, int64_t n) {
    if (n == 1) {  // each byte of the mask has one bit: it is 0 or 1, as a flag
      std::copy_n(mask, rows, bytes);
    } else {
      for_mask_bytes(mask, rows, n, [&](int64_t i, const uint8_t* byte, int64_t) {
        // Eight copies of the byte, of which copy k keeps bit k alone.
        const uint64_t eight_flags = *byte * 0x0101010101010101u & 0x8040201008040201u;
        // At the end of a row, this also writes flags of the next row. They are written again.
        memcpy(bytes + i, &eight_flags, sizeof(eight_flags));
      });
    }
    const int64_t count = rows * n;
    std::fill_n(bytes + count, kBlock, uint8_t{0});
  }
};

// selected[i] = flags[i] != 0 ? values[i] : 0 for a block. select_block does the same by a mask's
// bits.
template <typename Bits>
void select_block_by_flags(const Bits* __restrict__ values, const uint8_t* __restrict__ flags,
                           Bits* __restrict__ selected) {
  for (int64_t i = 0; i < kBlock; ++i) selected[i] = values[i] & ones_if<Bits>(flags[i] != 0);
}

// ------------------------------------------------------------------------------------- forward

// out = relu(out) / divisor, in place, for a strip of `count` elements. Writes the mask's bits of
// these elements to `packed` unless it is null.
template <typename E>
void relu_and_divide(typename E::Bits* out, int64_t count, typename E::Compute divisor,
                     PackedMask* packed) {
  using Bits = typename E::Bits;
  map_blocks(out, out, count, /*bypasses_caches=*/false,
             [=](int64_t i, const Bits* z_block, Bits* out_block, auto) {
               Bits positive_block[kBlock];
               relu_block<E>(z_block, positive_block);
               if (packed != nullptr) {
                 const uint64_t bits = mask_of_block(positive_block);
                 memcpy(packed->bytes + i / 8, &bits, sizeof(bits));
               }
               divide_block<E>(positive_block, divisor, out_block);
             });
}

// A strip of forward: `rows` rows from `row` on, and `columns` columns from `column` on.
//
// Forward's ranges are ranges of the mask's bytes, because no two threads may write to one byte.
// Byte number b has 8 elements, from row b / row_bytes and column b % row_bytes * 8 on, or fewer at
// the end of a row. Without a mask, the bytes still number the elements.
struct ForwardStrip {
  int64_t row;
  int64_t rows;
  int64_t column;
  int64_t columns;

  // The strip that begins with byte `byte` of the mask. The bytes from `end` on are not part of it.
  ForwardStrip(int64_t byte, int64_t end, int64_t n) {
    const int64_t row_bytes = bytes_of_bits(n);
    row = byte / row_bytes;
    column = byte % row_bytes * 8;
    columns = std::min({n - column, Config::kStrip, (end - byte) * 8});
    rows = 1;
    if (column == 0) {
      const int64_t whole_rows = std::min(Config::kStrip / n, (end - byte) / row_bytes);
      rows = std::max<int64_t>(whole_rows, 1);
    }
  }

  int64_t bytes() const { return rows * bytes_of_bits(columns); }
};

// ------------------------------------------------------------------------------------ backward

// grad_z = mask bit ? grad_output / divisor : 0 for a strip of `count` elements whose bits are
// adjacent, too. The first element has the lowest bit of mask[0].
template <typename E>
void divide_and_select(const typename E::Bits* grad_output, const uint8_t* mask,
                       typename E::Compute divisor, typename E::Bits* grad_z, int64_t count) {
  using Bits = typename E::Bits;
  map_blocks(grad_output, grad_z, count, /*bypasses_caches=*/false,
             [=](int64_t i, const Bits* grad_block, Bits* z_block, auto mask_bytes) {
               Bits quotients[kBlock];
               divide_block<E>(grad_block, divisor, quotients);
               uint64_t bits = 0;
               memcpy(&bits, mask + i / 8, mask_bytes);
               select_block(quotients, bits, z_block);
             });
}

// The same by flags, for a strip of several rows whose bits are not adjacent.
template <typename E>
void divide_and_select(const typename E::Bits* grad_output, const Flags& flags,
                       typename E::Compute divisor, typename E::Bits* grad_z, int64_t count) {
  using Bits = typename E::Bits;
  map_blocks(grad_output, grad_z, count, /*bypasses_caches=*/false,
             [&](int64_t i, const Bits* grad_block, Bits* z_block, auto) {
               Bits quotients[kBlock];
               divide_block<E>(grad_block, divisor, quotients);
               select_block_by_flags(quotients, flags.bytes + i, z_block);
             });
}

// Adds four strips of `count` elements to their sums: sums[i] += element i of each strip. From one
// strip to the next are `stride` elements.
template <typename E>
void add_four_strips(const typename E::Bits* strips, int64_t stride, double* __restrict__ sums,
                     int64_t count) {
  static_assert(Config::kStripsAdded == 4, "a sum of four is written out");
  int64_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    typename E::Compute values[4][kBlock];
    for (int64_t strip = 0; strip < 4; ++strip) {
      widen_block<E>(strips + strip * stride + i, values[strip]);
    }
    for (int64_t j = 0; j < kBlock; ++j) {
      const double first_two = double{values[0][j]} + double{values[1][j]};
      const double last_two = double{values[2][j]} + double{values[3][j]};
      sums[i + j] += first_two + last_two;
    }
  }
  for (; i < count; ++i) {
    const auto value = [=](int64_t strip) { return double{E::widen(strips[strip * stride + i])}; };
    sums[i] += (value(0) + value(1)) + (value(2) + value(3));
  }
}

// Adds one strip of `count` elements to its sums: sums[i] += element i.
template <typename E>
void add_strip(const typename E::Bits* strip, double* __restrict__ sums, int64_t count) {
  int64_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    typename E::Compute values[kBlock];
    widen_block<E>(strip + i, values);
    for (int64_t j = 0; j < kBlock; ++j) sums[i + j] += double{values[j]};
  }
  for (; i < count; ++i) sums[i] += double{E::widen(strip[i])};
}

// Sums the rows of sums [rows, columns] into its first row, pairwise: adds the second half of the
// rows to the first half, until one row is left. The error of a sum then grows with log2(rows)
// alone, which matters for float64. Five rows, for example:
//
//     0 1 2 3 4   ->   0+3 1+4 2   ->   0+3+2 1+4   ->   0+3+2+1+4
void sum_rows(double* sums, int64_t rows, int64_t columns) {
  while (rows > 1) {
    const int64_t kept_rows = (rows + 1) / 2;
    double* const second_half = sums + kept_rows * columns;
    const int64_t count = (rows - kept_rows) * columns;
    for (int64_t i = 0; i < count; ++i) sums[i] += second_half[i];
    rows = kept_rows;
  }
}

// Rounds x to a float "to odd": if x is between two floats, the result is the one whose last bit is
// 1. Half precision takes two roundings, from double to float and from float to half precision, and
// this is the first.
//
// The usual rounding, to the nearest float, would be wrong here. x = 1 + 2^-11 + 2^-40, for
// example, would become 1 + 2^-11, which is halfway between the float16 numbers 1 and 1 + 2^-10,
// and then 1, although 1 + 2^-10 is nearer to x. Rounded to odd, x becomes 1 + 2^-11 + 2^-23, and
// then 1 + 2^-10.
float round_to_odd(double x) {
  const float nearest = static_cast<float>(x);
  const bool is_exact = static_cast<double>(nearest) == x;
  const bool is_nan = x != x;
  const uint32_t bits = Float32::narrow(nearest);
  const bool is_odd = (bits & 1) != 0;
  if (is_exact || is_nan || is_odd) return nearest;
  // The other neighbour of x. The bits of floats of one sign are in the order of their magnitudes.
  const bool is_nearest_smaller = std::abs(static_cast<double>(nearest)) < std::abs(x);
  return Float32::widen(is_nearest_smaller ? bits + 1 : bits - 1);
}

// The element that is nearest to x.
template <typename E>
typename E::Bits element_nearest_to(double x) {
  constexpr bool kIsHalfPrecision = sizeof(typename E::Bits) == 2;
  if constexpr (kIsHalfPrecision) {
    return E::narrow(round_to_odd(x));
  } else {
    return E::narrow(static_cast<typename E::Compute>(x));
  }
}

// The rows of backward's strips: as many as fit, or 1 if a row is longer than a strip. If 64 or
// more fit, the number is a multiple of 64: the strips then have whole blocks for every n, and
// whole blocks are faster.
int64_t strip_rows(int64_t n) {
  const int64_t rows = Config::kStrip / n;
  if (rows >= kBlock) return rows / kBlock * kBlock;
  return std::max<int64_t>(rows, 1);
}

// The rows of a run: 64, or those of four strips if they are more. Runs do not depend on the number
// of threads, and so neither does the order of the additions.
int64_t run_rows(int64_t n) {
  return std::max(Config::kRunRows, Config::kStripsAdded * strip_rows(n));
}

// The part of the matrix that one thread handles at a time in backward: the rows of a run, and as
// many columns as a strip has. Units are numbered along the rows:
//
//     n = 1300: rows are longer than a strip        n = 200: a strip has two whole rows
//
//        512     512   276 columns                       200 columns
//      +-------+-------+----+                         +--------------+
//      |  0    |  1    | 2  |  a run of 64 rows       |      0       |   a run of 64 rows
//      +-------+-------+----+                         +--------------+
//      |  3    |  4    | 5  |                         |      1       |
//      +-------+-------+----+                         +--------------+
//      a unit has 64 strips of one row                a unit has 32 strips of two rows
struct Unit {
  int64_t run;  // the number of the run
  int64_t first_row;
  int64_t rows;
  int64_t first_column;
  int64_t columns;
  int64_t rows_of_strip;  // of each strip; the last strip of a unit may have fewer

  Unit(int64_t index, int64_t m, int64_t n) {
    const int64_t units_of_run = linear_fused_pass_backward_units_of_run(n);
    run = index / units_of_run;
    first_row = run * run_rows(n);
    rows = std::min(run_rows(n), m - first_row);
    first_column = index % units_of_run * Config::kStrip;
    columns = std::min(Config::kStrip, n - first_column);
    rows_of_strip = std::min(strip_rows(n), rows);
  }
};

// The operands of linear_fused_pass_backward, with the types of E.
template <typename E>
struct Backward {
  using Bits = typename E::Bits;

  const Bits* grad_output;  // [m, n]
  const uint8_t* mask;      // [m, bytes_of_bits(n)]
  typename E::Compute divisor;
  Bits* grad_z;  // [m, n]
  int64_t n;

  // Writes grad_z of one strip: `columns` columns from `column` on, of `rows` rows from `row` on.
  void write_strip(int64_t row, int64_t rows, int64_t column, int64_t columns) const {
    const int64_t first = row * n + column;
    const int64_t count = rows * columns;
    const uint8_t* const strip_mask = mask + row * bytes_of_bits(n) + column / 8;
    const bool has_adjacent_bits = rows == 1 || n % 8 == 0;
    if (has_adjacent_bits) {
      divide_and_select<E>(grad_output + first, strip_mask, divisor, grad_z + first, count);
      return;
    }
    Flags flags;
    flags.read(strip_mask, rows, n);
    divide_and_select<E>(grad_output + first, flags, divisor, grad_z + first, count);
  }

  // Writes grad_z of a unit. Also writes the sums of the unit's columns to row unit.run of `sums`
  // [runs, n], unless it is null.
  void write_unit(const Unit& unit, double* sums) const {
    // strip_sums[i] is the sum of element i of each strip. If a strip has several rows, a column
    // thus has several sums, one for each row of the strip, until all strips are added.
    double strip_sums[Config::kStrip];
    if (sums != nullptr) std::fill_n(strip_sums, unit.rows_of_strip * unit.columns, 0.0);
    // Four strips of grad_z are written, and then added while they are in the L1 cache.
    const int64_t rows_at_once = Config::kStripsAdded * unit.rows_of_strip;
    const int64_t unit_end = unit.first_row + unit.rows;
    for (int64_t begin = unit.first_row; begin < unit_end; begin += rows_at_once) {
      const int64_t end = std::min(begin + rows_at_once, unit_end);
      for (int64_t row = begin; row < end; row += unit.rows_of_strip) {
        const int64_t rows = std::min(unit.rows_of_strip, end - row);
        write_strip(row, rows, unit.first_column, unit.columns);
      }
      if (sums != nullptr) add_strips(unit, begin, end, strip_sums);
    }
    if (sums == nullptr) return;
    sum_rows(strip_sums, unit.rows_of_strip, unit.columns);
    std::copy_n(strip_sums, unit.columns, sums + unit.run * n + unit.first_column);
  }

  // Adds the unit's strips of the rows begin <= row < end, at most four strips, to their sums.
  void add_strips(const Unit& unit, int64_t begin, int64_t end, double* strip_sums) const {
    const Bits* strip = grad_z + begin * n + unit.first_column;
    const int64_t stride = unit.rows_of_strip * n;
    const bool has_four = end - begin == Config::kStripsAdded * unit.rows_of_strip;
    if (has_four) {
      add_four_strips<E>(strip, stride, strip_sums, unit.rows_of_strip * unit.columns);
      return;
    }
    for (int64_t row = begin; row < end; row += unit.rows_of_strip) {
      const int64_t rows = std::min(unit.rows_of_strip, end - row);
      add_strip<E>(strip, strip_sums, rows * unit.columns);
      strip += stride;
    }
  }
};

}  // namespace

void linear_fused_pass(DType dtype, void* out, double divisor, uint8_t* mask, int64_t n,
                       int64_t begin, int64_t end) {
  for_floating(dtype, [=](auto element) {
    using E = decltype(element);
    using Bits = typename E::Bits;
    for (int64_t byte = begin; byte < end;) {
      const ForwardStrip strip(byte, end, n);
      PackedMask packed;
      relu_and_divide<E>(static_cast<Bits*>(out) + strip.row * n + strip.column,
                         strip.rows * strip.columns, static_cast<typename E::Compute>(divisor),
                         mask == nullptr ? nullptr : &packed);
      if (mask != nullptr) write_mask(packed, strip.rows, strip.columns, mask + byte);
      byte += strip.bytes();
    }
  });
}

int64_t linear_fused_pass_backward_runs(int64_t m, int64_t n) {
  return (m + run_rows(n) - 1) / run_rows(n);
}

int64_t linear_fused_pass_backward_units_of_run(int64_t n) {
  return (n + Config::kStrip - 1) / Config::kStrip;
}

void linear_fused_pass_backward(DType dtype, const void* grad_output, const uint8_t* mask,
                                double divisor, void* grad_z, double* sums, int64_t m, int64_t n,
                                int64_t begin, int64_t end) {
  for_floating(dtype, [=](auto element) {
    using E = decltype(element);
    using Bits = typename E::Bits;
    const Backward<E> backward{static_cast<const Bits*>(grad_output), mask,
                               static_cast<typename E::Compute>(divisor),
                               static_cast<Bits*>(grad_z), n};
    for (int64_t index = begin; index < end; ++index) {
      backward.write_unit(Unit(index, m, n), sums);
    }
  });
}

void linear_fused_pass_backward_sum(DType dtype, double* sums, void* grad_bias, int64_t m,
                                    int64_t n) {
  const int64_t runs = linear_fused_pass_backward_runs(m, n);
  sum_rows(sums, runs, n);
  for_floating(dtype, [=](auto element) {
    using E = decltype(element);
    auto* const elements = static_cast<typename E::Bits*>(grad_bias);
    for (int64_t j = 0; j < n; ++j) elements[j] = element_nearest_to<E>(runs == 0 ? 0 : sums[j]);
  });
}

}  // namespace kernels::cpu
