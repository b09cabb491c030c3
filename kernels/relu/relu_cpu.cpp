// ReLU on the CPU, as launchers.h describes it: one thread's elements.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/elements.h"
#include "cpu/large_outputs.h"
#include "launchers.h"

namespace kernels::cpu {

void relu(DType dtype, const void* x, void* out, uint8_t* mask, int64_t begin, int64_t end,
          bool streams) {
  for_floating(dtype, [=](auto element) {
    using E = decltype(element);
    using Bits = typename E::Bits;
    map_blocks(static_cast<const Bits*>(x) + begin, static_cast<Bits*>(out) + begin, end - begin,
               streams, [=](int64_t i, const Bits* from, Bits* made, auto mask_bytes) {
                 relu_block<E>(from, made);
                 if (mask == nullptr) return;
                 const uint64_t bits = mask_of_block(made);
                 memcpy(mask + (begin + i) / 8, &bits, mask_bytes);
               });
  });
}

void relu_backward(DType dtype, const void* grad_output, bool is_constant, const uint8_t* mask,
                   void* grad_input, int64_t begin, int64_t end, bool streams) {
  for_floating(dtype, [=](auto element) {
    using Bits = typename decltype(element)::Bits;
    const auto from = static_cast<const Bits*>(grad_output);
    const auto out = static_cast<Bits*>(grad_input) + begin;
    Bits same[kBlock];
    std::fill_n(same, kBlock, *from);
    // A constant has no elements from begin on: those of out stand for them.
    map_blocks(is_constant ? out : from + begin, out, end - begin, streams,
               [&](int64_t i, const Bits* block, Bits* made, auto mask_bytes) {
                 uint64_t bits = 0;
                 memcpy(&bits, mask + (begin + i) / 8, mask_bytes);
                 select_block(is_constant ? same : block, bits, made);
               });
  });
}

}  // namespace kernels::cpu
