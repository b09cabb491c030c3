// The fused pass on a CPU. operator/forward.h and operator/backward.h call it on torch's threads
// through launchers.h, which says what the functions compute.
//
// For large matrices, the bandwidth of the memory is the limit. So each element is loaded from
// memory once, and everything is done with it while it is in the L1 cache, run by run (cpu_mask.h).
//
// grad_bias is summed in double and rounded once. Tests check that its error is no larger than that
// of torch's sum in float32. For float64, torch sums in double as well. Torch and this file
// first add groups of terms, and then the sums of the groups, so that the error stays small.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "common/sizes.h"
#include "cpu/blocks.h"
#include "cpu/map_blocks.h"
#include "launchers.h"
#include "linear/fused_pass/cpu_blocks.h"
#include "linear/fused_pass/cpu_mask.h"

namespace kernels::cpu {
namespace {

struct CpuBackwardConfig {
  // The runs of grad_z are added to their sums four at a time (add_four_runs), so that each sum is
  // loaded and stored once for four terms.
  static constexpr int64_t kRunsAdded = 4;
  // The columns of each row group are summed, and then the sums of the row groups. A row group has
  // 64 rows, or more if they are short (UnitGrid).
  static constexpr int64_t kLeastRowGroup = 64;
};
static_assert(CpuBackwardConfig::kRunsAdded == 4, "add_four_runs adds four");

// ------------------------------------------------------------------------------------- forward

// out = relu(out) / divisor, in place, for a run of `count` elements. Writes the mask's bits of
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

// Returns the run that begins with byte `byte` of the mask and ends before byte `end`.
//
// Forward's ranges are ranges of the mask's bytes, because no two threads may write to one byte.
// Byte number b has 8 elements, from row b / row_bytes and column b % row_bytes * 8 on, or fewer at
// the end of a row.
Run forward_run(int64_t byte, int64_t end, int64_t n) {
  const int64_t row_bytes = bytes_of_bits(n);
  const int64_t bytes_left = end - byte;
  Run run{};
  run.row = byte / row_bytes;
  run.column = byte % row_bytes * 8;
  // At the beginning of a row, the run has as many whole rows as fit, if any do.
  const int64_t whole_rows = std::min(kMaxRun / n, bytes_left / row_bytes);
  if (run.column == 0 && whole_rows > 0) {
    run.rows = whole_rows;
    run.columns = n;
  } else {
    run.rows = 1;
    run.columns = std::min({n - run.column, kMaxRun, bytes_left * 8});
  }
  return run;
}

// ------------------------------------------------------------------------------------ backward

// Writes grad_z of a run of `count` elements whose bits of the mask are adjacent, as the elements
// are. The first element has the lowest bit of mask[0].
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

// The same for a run of several rows whose bits in the mask are not adjacent.
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

// How backward divides a matrix [m, n] into units, the parts that one thread handles at a time: the
// rows of a row group, and the columns of a column group, up to kMaxRun. A unit consists of runs,
// one below the other. Units are numbered along the rows:
//
//     n = 1300: rows are longer than a run          n = 200: a run has two whole rows
//
//        512     512   276 columns                       200 columns
//      +-------+-------+----+                         +--------------+
//      |  0    |  1    | 2  |  row group 0            |      0       |   row group 0
//      +-------+-------+----+                         +--------------+
//      |  3    |  4    | 5  |  row group 1            |      1       |   row group 1
//      +-------+-------+----+                         +--------------+
//      a unit has 64 runs of one row                  a unit has 32 runs of two rows
struct UnitGrid {
  int64_t m;
  int64_t n;
  // As many rows as fit into a run, or 1 if a row is longer. If 64 or more fit, the number is a
  // multiple of 64: the runs then have whole blocks for every n, and whole blocks are faster.
  int64_t rows_of_full_run;
  // 64, or the rows of four runs if they are more. Row groups do not depend on the number of
  // threads, and so neither does the order of the additions.
  int64_t rows_of_full_group;
  int64_t row_groups;
  int64_t column_groups;

  UnitGrid(int64_t m, int64_t n) : m(m), n(n) {
    rows_of_full_run = std::max<int64_t>(kMaxRun / n, 1);
    if (rows_of_full_run >= kBlock) rows_of_full_run = rows_of_full_run / kBlock * kBlock;
    rows_of_full_group = std::max(CpuBackwardConfig::kLeastRowGroup,
                                  CpuBackwardConfig::kRunsAdded * rows_of_full_run);
    row_groups = divide_up(m, rows_of_full_group);
    column_groups = divide_up(n, kMaxRun);
  }

  int64_t units() const { return row_groups * column_groups; }
};

struct Unit {
  int64_t row_group;
  int64_t first_row;
  int64_t rows;
  int64_t first_column;
  int64_t columns;
  int64_t rows_of_run;  // the last run of a unit may have fewer

  Unit(int64_t number, const UnitGrid& grid) {
    row_group = number / grid.column_groups;
    first_row = row_group * grid.rows_of_full_group;
    rows = std::min(grid.rows_of_full_group, grid.m - first_row);
    first_column = number % grid.column_groups * kMaxRun;
    columns = std::min(kMaxRun, grid.n - first_column);
    rows_of_run = std::min(grid.rows_of_full_run, rows);
  }

  int64_t runs() const { return divide_up(rows, rows_of_run); }
  // Runs of rows_of_run rows.
  int64_t full_runs() const { return rows / rows_of_run; }

  // Returns run number i, counted from the top.
  Run run(int64_t i) const {
    const int64_t rows_above = i * rows_of_run;
    return {first_row + rows_above, std::min(rows_of_run, rows - rows_above), first_column,
            columns};
  }
};

// A call of linear_fused_pass_backward, for a dtype whose traits are E (cpu/dtypes.h).
template <typename E>
struct Backward {
  using Bits = typename E::Bits;

  const Bits* grad_output;  // [m, n]
  const uint8_t* mask;      // [m, bytes_of_bits(n)]
  typename E::Compute divisor;
  Bits* grad_z;  // [m, n]
  double* sums;  // [row groups, n]; used if grad_bias is needed
  int64_t n;

  explicit Backward(const FusedPassBackwardArguments& call)
      : grad_output(static_cast<const Bits*>(call.grad_output)),
        mask(call.mask),
        divisor(static_cast<typename E::Compute>(call.divisor)),
        grad_z(static_cast<Bits*>(call.grad_z)),
        sums(static_cast<double*>(call.workspace)),
        n(call.n) {}

  void write_run(const Run& run) const {
    const int64_t first = run.first_element(n);
    const uint8_t* const mask_of_run = mask + run.first_mask_byte(n);
    const bool has_adjacent_bits = run.rows == 1 || n % 8 == 0;
    if (has_adjacent_bits) {
      divide_and_select<E>(grad_output + first, mask_of_run, divisor, grad_z + first,
                           run.elements());
      return;
    }
    Flags flags;
    flags.read(mask_of_run, run.rows, n);
    divide_and_select<E>(grad_output + first, flags, divisor, grad_z + first, run.elements());
  }

  void write_unit(const Unit& unit) const {
    for (int64_t i = 0; i < unit.runs(); ++i) write_run(unit.run(i));
  }

  // Writes grad_z of a unit, and the sums of the unit's columns to row unit.row_group of `sums`.
  void write_and_sum_unit(const Unit& unit) const {
    constexpr int64_t kRunsAdded = CpuBackwardConfig::kRunsAdded;
    // element_sums[i] is the sum over all runs of their element i. If a run has several rows, a
    // column has one sum for each row of the run, which sum_rows adds at the end.
    double element_sums[kMaxRun];
    const int64_t elements_of_run = unit.rows_of_run * unit.columns;
    std::fill_n(element_sums, elements_of_run, 0.0);

    // Runs of grad_z are written, and then added while they are in the L1 cache.
    int64_t i = 0;
    for (; i + kRunsAdded <= unit.full_runs(); i += kRunsAdded) {
      for (int64_t j = i; j < i + kRunsAdded; ++j) write_run(unit.run(j));
      add_four_runs<E>(grad_z + unit.run(i).first_element(n), /*stride=*/unit.rows_of_run * n,
                       element_sums, elements_of_run);
    }
    for (; i < unit.runs(); ++i) {
      const Run run = unit.run(i);
      write_run(run);
      add_run<E>(grad_z + run.first_element(n), element_sums, run.elements());
    }
    sum_rows(element_sums, unit.rows_of_run, unit.columns);
    std::copy_n(element_sums, unit.columns, sums + unit.row_group * n + unit.first_column);
  }
};

}  // namespace

void linear_fused_pass(const FusedPassArguments& call, int64_t begin, int64_t end) {
  dispatch_dtype(call.dtype, [=](auto element) {
    using E = decltype(element);
    auto* const out = static_cast<typename E::Bits*>(call.out);
    const auto divisor = static_cast<typename E::Compute>(call.divisor);
    const bool has_mask = call.mask != nullptr;
    for (int64_t byte = begin; byte < end;) {
      const Run run = forward_run(byte, end, call.n);
      PackedMask packed;
      relu_and_divide<E>(out + run.first_element(call.n), run.elements(), divisor,
                         has_mask ? &packed : nullptr);
      if (has_mask) write_mask(packed, run.rows, run.columns, call.mask + byte);
      byte += run.mask_bytes();
    }
  });
}

size_t linear_fused_pass_backward_workspace_bytes(const FusedPassBackwardArguments& call) {
  if (call.grad_bias == nullptr) return 0;
  return UnitGrid(call.m, call.n).row_groups * call.n * sizeof(double);
}

int64_t linear_fused_pass_backward_units(const FusedPassBackwardArguments& call) {
  return UnitGrid(call.m, call.n).units();
}

void linear_fused_pass_backward(const FusedPassBackwardArguments& call, int64_t begin,
                                int64_t end) {
  dispatch_dtype(call.dtype, [=](auto element) {
    const Backward<decltype(element)> backward(call);
    const UnitGrid grid(call.m, call.n);
    for (int64_t number = begin; number < end; ++number) {
      const Unit unit(number, grid);
      if (call.grad_bias == nullptr) {
        backward.write_unit(unit);
      } else {
        backward.write_and_sum_unit(unit);
      }
    }
  });
}

void linear_fused_pass_backward_sum(const FusedPassBackwardArguments& call) {
  auto* const sums = static_cast<double*>(call.workspace);
  sum_rows(sums, UnitGrid(call.m, call.n).row_groups, call.n);
  dispatch_dtype(call.dtype, [=](auto element) {
    using E = decltype(element);
    auto* const grad_bias = static_cast<typename E::Bits*>(call.grad_bias);
    for (int64_t j = 0; j < call.n; ++j) grad_bias[j] = element_nearest_to<E>(sums[j]);
  });
}

}  // namespace kernels::cpu
