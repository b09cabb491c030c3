// The mask of the fused pass on a CPU, run by run.
//
// If n is not a multiple of 8, each row of the mask ends with unused bits, which are 0. The
// elements of two rows are then adjacent in memory, but their bits are not. So the kernels use two
// other forms of a run's mask, without unused bits between its rows: PackedMask, with a bit for
// each element, and Flags, with a byte.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "common/sizes.h"
#include "cpu/blocks.h"
#include "cpu/map_blocks.h"

namespace kernels::cpu {
namespace {

// The most elements of a run. In float32, 512 elements of grad_output and of grad_z and 512 sums in
// double take 8 KiB, and the four runs that are added at a time 20 KiB. An L1 cache has 32 KiB or
// more.
constexpr int64_t kMaxRun = 512;
static_assert(kMaxRun % kBlock == 0, "a full run has whole blocks");
static_assert(kMaxRun % 8 == 0, "the next run of a row begins with a byte of the mask");

// A run: up to kMaxRun adjacent elements of a matrix [m, n], which are a part of one row, or
// several whole rows. It has `rows` rows from `row` on, and `columns` columns from `column` on.
struct Run {
  int64_t row;
  int64_t rows;
  int64_t column;
  int64_t columns;

  int64_t first_element(int64_t n) const { return row * n + column; }
  int64_t elements() const { return rows * columns; }

  // `column` is a multiple of 8.
  int64_t first_mask_byte(int64_t n) const { return row * bytes_of_bits(n) + column / 8; }
  int64_t mask_bytes() const { return rows * bytes_of_bits(columns); }
};

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

// The bits of a run's elements without the unused bits at the ends of rows: element i of the
// run has bit i % 8 of byte i / 8.
struct PackedMask {
  // One byte more than a run's bits: eight_bits reads two bytes.
  uint8_t bytes[kMaxRun / 8 + 1] = {};

  int eight_bits(int64_t i) const {
    const int two_bytes = bytes[i / 8] | bytes[i / 8 + 1] << 8;
    return (two_bytes >> (i % 8)) & 0xff;
  }
};

// Writes a run's bits to the mask, where each row has bytes of its own. If the run has one row,
// `columns` may be a part of it; otherwise the rows are whole.
void write_mask(const PackedMask& packed, int64_t rows, int64_t columns, uint8_t* mask) {
  if (rows == 1) {
    std::copy_n(packed.bytes, bytes_of_bits(columns), mask);
    return;
  }
  if (columns == 1) {  // the same as below, but faster
    for (int64_t i = 0; i < rows; ++i) mask[i] = (packed.bytes[i / 8] >> (i % 8)) & 1;
    return;
  }
  for_mask_bytes(mask, rows, columns, [&](int64_t i, uint8_t* byte, int64_t count) {
    const int all_used_bits = (1 << count) - 1;
    *byte = static_cast<uint8_t>(packed.eight_bits(i) & all_used_bits);
  });
}

// The mask of a run with a byte for each element: flag i is 0 if the gradient of element i does
// not pass.
struct Flags {
  // One block more than a run: `read` writes up to 7 bytes beyond the last element, and
  // divide_and_select reads whole blocks.
  uint8_t bytes[kMaxRun + kBlock];

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

// selected[i] = flags[i] != 0 ? values[i] : 0 for a block, as select_block does by a mask's bits.
template <typename Bits>
void select_block_by_flags(const Bits* __restrict__ values, const uint8_t* __restrict__ flags,
                           Bits* __restrict__ selected) {
  for (int64_t i = 0; i < kBlock; ++i) selected[i] = values[i] & ones_if<Bits>(flags[i] != 0);
}

}  // namespace
}  // namespace kernels::cpu
