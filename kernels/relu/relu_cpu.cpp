// ReLU on a CPU, forward and backward. launchers.h declares these functions and says what they
// compute.
//
// The memory's bandwidth is the limit. So a thread makes one pass over its elements, in blocks of
// 64 (make_block), for results and mask together.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/blocks.h"
#include "cpu/map_blocks.h"
#include "launchers.h"

namespace kernels::cpu {

void relu(const ReluArguments& call, int64_t begin, int64_t end, bool bypasses_caches) {
  dispatch_dtype(call.dtype, [=](auto element) {
    using E = decltype(element);
    using Bits = typename E::Bits;
    const Bits* const x = static_cast<const Bits*>(call.x) + begin;
    Bits* const out = static_cast<Bits*>(call.out) + begin;
    uint8_t* const mask = call.mask;
    const auto make_block = [=](int64_t i, const Bits* x_block, Bits* out_block, auto mask_bytes) {
      relu_block<E>(x_block, out_block);
      if (mask == nullptr) return;
      const uint64_t bits = mask_of_block(out_block);
      memcpy(mask + (begin + i) / 8, &bits, mask_bytes);
    };
    map_blocks(x, out, end - begin, bypasses_caches, make_block);
  });
}

void relu_backward(const ReluBackwardArguments& call, int64_t begin, int64_t end,
                   bool bypasses_caches) {
  dispatch_dtype(call.dtype, [=](auto element) {
    using Bits = typename decltype(element)::Bits;
    const Bits* const gradient = static_cast<const Bits*>(call.grad_output);
    Bits* const result = static_cast<Bits*>(call.grad_input) + begin;
    const int64_t n = end - begin;
    const auto load_mask = [=](int64_t i, auto mask_bytes) {
      uint64_t bits = 0;
      memcpy(&bits, call.mask + (begin + i) / 8, mask_bytes);
      return bits;
    };
    if (!call.layout.is_constant()) {
      const auto make_block = [=](int64_t i, const Bits* gradient_block, Bits* result_block,
                                  auto mask_bytes) {
        select_block(gradient_block, load_mask(i, mask_bytes), result_block);
      };
      map_blocks(gradient + begin, result, n, bypasses_caches, make_block);
      return;
    }
    // A constant gradient has one element in memory. Each of its blocks is this block of copies.
    Bits copies[kBlock];
    std::fill_n(copies, kBlock, *gradient);
    const auto make_block = [&](int64_t i, const Bits*, Bits* result_block, auto mask_bytes) {
      select_block(copies, load_mask(i, mask_bytes), result_block);
    };
    // map_blocks needs an operand with as many elements as the result. Here that operand is the
    // result itself; make_block does not read it.
    map_blocks(result, result, n, bypasses_caches, make_block);
  });
}

}  // namespace kernels::cpu
