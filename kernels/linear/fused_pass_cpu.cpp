// The fused pass of Linear -> ReLU -> divide on a CPU, and its backward, of the share that one
// thread has. launchers.h declares these functions and says what they compute; linear_op.cpp calls
// them on torch's threads, after torch's own product.
//
//     forward    out [m, n], in place: out = relu(out) / divisor, and a mask of one bit an element
//     backward   grad_z [m, n] = mask bit ? grad_output / divisor : 0
//                grad_bias [n] = the sums of grad_z's columns
//
// A row of the mask has (n + 7) / 8 whole bytes. Where n is not a multiple of 8, a row therefore
// ends with unused bits: the elements of adjacent rows are adjacent in memory, and their bits are
// not.
//
// The memory's bandwidth is the limit for large matrices: each element is read once, and all of its
// results are written while it is in the L1 cache.

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
  // The elements that are handled at a time, and that stay in the L1 cache meanwhile: a part of a
  // row, or several whole rows, which are adjacent in memory.
  static constexpr int64_t kStrip = 512;
  // The strips of grad_z that backward adds to its sums at a time: each sum is then loaded and
  // stored once for so many terms.
  static constexpr int64_t kStripsAdded = 4;
  // Backward sums the columns of a run of rows at first, and then the sums of the runs. A run has
  // so many rows, or kStripsAdded strips of short rows if those are more.
  static constexpr int64_t kRunRows = 64;
};
static_assert(Config::kStrip % kBlock == 0, "only the last block of a strip may be a part of one");

int64_t bytes_of_bits(int64_t bits) { return (bits + 7) / 8; }

// ------------------------------------------------------------------------- functions of a block

// out = x / divisor
template <typename E>
void divide_block(const typename E::Bits* __restrict__ x, typename E::Compute divisor,
                  typename E::Bits* __restrict__ out) {
  for (int64_t i = 0; i < kBlock; ++i) out[i] = E::narrow(E::widen(x[i]) / divisor);
}

// The values of a block's elements.
template <typename E>
void widen_block(const typename E::Bits* __restrict__ x, typename E::Compute* __restrict__ values) {
  for (int64_t i = 0; i < kBlock; ++i) values[i] = E::widen(x[i]);
}

#ifdef __F16C__
// The same by the machine's conversions of 8 float16 numbers. They take a fifth of the time (EPYC)
// of Float16's, of which GCC 12 makes no vectors.
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

// Calls body(i, byte, bits) for each byte of a mask of rows of n elements: `bits` of the byte's
// bits, the lowest ones, belong to the elements i, i + 1 ... of the rows' adjacent elements.
template <typename Byte, typename Body>
void for_mask_bytes(Byte* mask, int64_t rows, int64_t n, const Body& body) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < n; column += 8) {
      body(row * n + column, mask, std::min<int64_t>(n - column, 8));
      ++mask;
    }
  }
}

// The bits of a strip's elements, one after another. No unused bits separate rows.
struct PackedMask {
  // A byte more than a strip needs, so that each byte has a next one.
  uint8_t bytes[Config::kStrip / 8 + 1] = {};

  // Eight bits from any element on.
  int eight_bits(int64_t i) const {
    const int two_bytes = bytes[i / 8] | bytes[i / 8 + 1] << 8;
    return two_bytes >> i % 8 & 0xff;
  }
};

// Writes a strip's bits to the mask, to whole bytes for each row. A strip of one row may be a part
// of a row.
void write_mask(const PackedMask& packed, int64_t rows, int64_t columns, uint8_t* mask) {
  if (rows == 1) {
    std::copy_n(packed.bytes, bytes_of_bits(columns), mask);
    return;
  }
  if (columns == 1) {  // as below, in less time
    for (int64_t i = 0; i < rows; ++i) mask[i] = packed.bytes[i / 8] >> i % 8 & 1;
    return;
  }
  for_mask_bytes(mask, rows, columns, [&](int64_t i, uint8_t* byte, int64_t bits) {
    const int used_bits = (1 << bits) - 1;
    *byte = static_cast<uint8_t>(packed.eight_bits(i) & used_bits);
  });
}

// A byte for each element of a strip, 0 where the gradient is not kept.
struct Flags {
  // A block more than a strip needs, because the last block that is read may be a part of one, and
  // because 8 bytes are written at a time.
  uint8_t bytes[Config::kStrip + kBlock];

  // The flags of the elements of whole rows.
  void read(const uint8_t* mask, int64_t rows, int64_t n) {
    if (n == 1) {  // a byte of the mask has one bit, and is a flag
      std::copy_n(mask, rows, bytes);
    } else {
      for_mask_bytes(mask, rows, n, [&](int64_t i, const uint8_t* byte, int64_t) {
        // Eight copies of the byte, and bit k of copy k.
        const uint64_t eight_flags = *byte * 0x0101010101010101u & 0x8040201008040201u;
        memcpy(bytes + i, &eight_flags, sizeof(eight_flags));
      });
    }
    std::fill_n(bytes + rows * n, kBlock, uint8_t{0});
  }
};

// to[i] = flags[i] != 0 ? from[i] : 0 for a block, as select_block does it by bits.
template <typename Bits>
void select_block_by_flags(const Bits* __restrict__ from, const uint8_t* __restrict__ flags,
                           Bits* __restrict__ to) {
  for (int64_t i = 0; i < kBlock; ++i) to[i] = from[i] & ones_if<Bits>(flags[i] != 0);
}

// ------------------------------------------------------------------------------------- forward

// out = relu(out) / divisor for the `count` adjacent elements of a strip. Fills in `packed` unless
// it is null.
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

// ------------------------------------------------------------------------------------ backward

// grad_z = mask bit ? grad_output / divisor : 0 for the `count` adjacent elements of a strip whose
// bits are adjacent, too. The first is the lowest bit of mask[0].
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

// The same by flags, for strips of several rows whose bits are not adjacent.
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

// sums[i] += the sum of element i of kStripsAdded strips, which are `stride` elements apart and
// have `count` elements each.
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
    for (int64_t k = 0; k < kBlock; ++k) {
      const double first_two = double{values[0][k]} + double{values[1][k]};
      const double last_two = double{values[2][k]} + double{values[3][k]};
      sums[i + k] += first_two + last_two;
    }
  }
  for (; i < count; ++i) {
    const auto value = [=](int64_t strip) { return double{E::widen(strips[strip * stride + i])}; };
    sums[i] += (value(0) + value(1)) + (value(2) + value(3));
  }
}

// sums[i] += element i of one strip of `count` elements.
template <typename E>
void add_strip(const typename E::Bits* strip, double* __restrict__ sums, int64_t count) {
  int64_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    typename E::Compute values[kBlock];
    widen_block<E>(strip + i, values);
    for (int64_t k = 0; k < kBlock; ++k) sums[i + k] += double{values[k]};
  }
  for (; i < count; ++i) sums[i] += double{E::widen(strip[i])};
}

// Adds the rows of sums [rows, columns] to its first row, in pairs: the second half of the rows to
// the first, until one is left. An element's error then grows with log2(rows).
void add_rows(double* sums, int64_t rows, int64_t columns) {
  while (rows > 1) {
    const int64_t kept_rows = (rows + 1) / 2;
    double* const added = sums + kept_rows * columns;
    const int64_t count = (rows - kept_rows) * columns;
    for (int64_t i = 0; i < count; ++i) sums[i] += added[i];
    rows = kept_rows;
  }
}

// x rounded "to odd": if no float equals x, the one of its two neighbors whose last bit is 1. A
// float rounded so is never halfway between two half-precision numbers if x is not, so that
// rounding it again gives the half-precision number that is nearest to x.
float round_to_odd(double x) {
  const float nearest = static_cast<float>(x);
  const bool is_exact = static_cast<double>(nearest) == x;
  const bool is_nan = x != x;
  const uint32_t bits = Float32::narrow(nearest);
  const bool is_odd = (bits & 1) != 0;
  if (is_exact || is_nan || is_odd) return nearest;
  const bool is_nearest_smaller = std::abs(static_cast<double>(nearest)) < std::abs(x);
  return Float32::widen(is_nearest_smaller ? bits + 1 : bits - 1);
}

// The element that is nearest to x, which is rounded once.
template <typename E>
typename E::Bits element_nearest_to(double x) {
  constexpr bool kIsHalfPrecision = sizeof(typename E::Bits) == 2;
  if constexpr (kIsHalfPrecision) {
    return E::narrow(round_to_odd(x));
  } else {
    return E::narrow(static_cast<typename E::Compute>(x));
  }
}

// The rows of a strip of backward: 1 if a row is longer than a strip. A multiple of kBlock rows has
// whole blocks for any n, which take less time than a part of one.
int64_t strip_rows(int64_t n) {
  const int64_t rows = Config::kStrip / n;
  if (rows >= kBlock) return rows / kBlock * kBlock;
  return std::max<int64_t>(rows, 1);
}

// The rows of a run, which depend on nothing but n: the number of threads does not change the order
// of the additions.
int64_t run_rows(int64_t n) {
  return std::max(Config::kRunRows, Config::kStripsAdded * strip_rows(n));
}

// A thread's unit of work in backward: of the matrix's rows a run, and of its columns a strip.
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
  int64_t run;
  int64_t first_row;
  int64_t rows;
  int64_t first_column;
  int64_t columns;
  int64_t rows_of_strip;  // the last strip of a unit may have fewer

  Unit(int64_t index, int64_t m, int64_t n) {
    const int64_t units_of_run = linear_epilogue_backward_strips(n);
    run = index / units_of_run;
    first_row = run * run_rows(n);
    rows = std::min(run_rows(n), m - first_row);
    first_column = index % units_of_run * Config::kStrip;
    columns = std::min(Config::kStrip, n - first_column);
    rows_of_strip = std::min(strip_rows(n), rows);
  }
};

// The operands of backward, as linear_epilogue_backward has them, with the types of the dtype E.
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

  // Writes grad_z of a unit. Unless `sums` [runs, n] is null, writes the sums of the unit's columns
  // to row unit.run of it.
  void write_unit(const Unit& unit, double* sums) const {
    // A sum for each element of a strip: for each column several, if a strip has several rows.
    double strip_sums[Config::kStrip];
    if (sums != nullptr) std::fill_n(strip_sums, unit.rows_of_strip * unit.columns, 0.0);
    const int64_t most_rows = Config::kStripsAdded * unit.rows_of_strip;
    const int64_t end = unit.first_row + unit.rows;
    for (int64_t first_row = unit.first_row; first_row < end; first_row += most_rows) {
      const int64_t last_row = std::min(first_row + most_rows, end);
      for (int64_t row = first_row; row < last_row; row += unit.rows_of_strip) {
        const int64_t rows = std::min(unit.rows_of_strip, last_row - row);
        write_strip(row, rows, unit.first_column, unit.columns);
      }
      if (sums != nullptr) add_strips(unit, first_row, last_row, strip_sums);
    }
    if (sums == nullptr) return;
    add_rows(strip_sums, unit.rows_of_strip, unit.columns);
    std::copy_n(strip_sums, unit.columns, sums + unit.run * n + unit.first_column);
  }

  // Adds the unit's strips of the rows first_row <= row < last_row, at most kStripsAdded strips, to
  // their sums.
  void add_strips(const Unit& unit, int64_t first_row, int64_t last_row, double* strip_sums) const {
    const Bits* const first = grad_z + first_row * n + unit.first_column;
    const int64_t stride = unit.rows_of_strip * n;  // from strip to strip
    if (last_row - first_row == Config::kStripsAdded * unit.rows_of_strip) {
      add_four_strips<E>(first, stride, strip_sums, unit.rows_of_strip * unit.columns);
      return;
    }
    const Bits* strip = first;
    for (int64_t row = first_row; row < last_row; row += unit.rows_of_strip) {
      const int64_t rows = std::min(unit.rows_of_strip, last_row - row);
      add_strip<E>(strip, strip_sums, rows * unit.columns);
      strip += stride;
    }
  }
};

}  // namespace

void linear_epilogue(DType dtype, void* out, double divisor, uint8_t* mask, int64_t n,
                     int64_t begin, int64_t end) {
  for_floating(dtype, [=](auto element) {
    using E = decltype(element);
    using Bits = typename E::Bits;
    const int64_t row_bytes = bytes_of_bits(n);
    // One strip in each iteration, by its bytes of the mask. Where there is no mask, they count the
    // elements all the same.
    for (int64_t byte = begin; byte < end;) {
      const int64_t row = byte / row_bytes;
      const int64_t column = byte % row_bytes * 8;
      int64_t rows = 1;
      if (column == 0) {
        const int64_t whole_rows = std::min(Config::kStrip / n, (end - byte) / row_bytes);
        rows = std::max<int64_t>(whole_rows, 1);
      }
      const int64_t columns = std::min({n - column, Config::kStrip, (end - byte) * 8});
      PackedMask packed;
      relu_and_divide<E>(static_cast<Bits*>(out) + row * n + column, rows * columns,
                         static_cast<typename E::Compute>(divisor),
                         mask == nullptr ? nullptr : &packed);
      if (mask != nullptr) write_mask(packed, rows, columns, mask + byte);
      byte += rows * bytes_of_bits(columns);
    }
  });
}

int64_t linear_epilogue_backward_runs(int64_t m, int64_t n) {
  return (m + run_rows(n) - 1) / run_rows(n);
}

int64_t linear_epilogue_backward_strips(int64_t n) {
  return (n + Config::kStrip - 1) / Config::kStrip;
}

void linear_epilogue_backward(DType dtype, const void* grad_output, const uint8_t* mask,
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

void linear_epilogue_backward_sum(DType dtype, double* sums, void* grad_bias, int64_t m,
                                  int64_t n) {
  const bool is_empty = m == 0;
  add_rows(sums, linear_epilogue_backward_runs(m, n), n);
  for_floating(dtype, [=](auto element) {
    using E = decltype(element);
    auto* const to = static_cast<typename E::Bits*>(grad_bias);
    for (int64_t j = 0; j < n; ++j) to[j] = element_nearest_to<E>(is_empty ? 0 : sums[j]);
  });
}

}  // namespace kernels::cpu
