// Non-temporal stores of outputs that no cache holds. large_outputs.cpp has their memory.

#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __SSE2__
#include <emmintrin.h>  // immintrin.h takes GCC 0.4 s
#endif

namespace kernels {
namespace {

// make(i, to) for the elements from i on of an output of n, kBlock of them at a time. `to` is their
// place in `out`, or a block that is then stored past the caches, where the machine has such
// stores: ordinary ones first read the lines that they are about to overwrite. Returns how many
// elements were made.
template <int64_t kBlock, typename T, typename Make>
int64_t make_blocks(T* out, int64_t n, [[maybe_unused]] bool streams, const Make& make) {
  int64_t i = 0;
#ifdef __SSE2__
  if (streams && reinterpret_cast<uintptr_t>(out) % sizeof(__m128i) == 0) {
    for (; i + kBlock <= n; i += kBlock) {
      alignas(64) T block[kBlock];
      make(i, block);
      for (int64_t j = 0; j < kBlock; j += sizeof(__m128i) / sizeof(T)) {
        // No `auto` pointers: these lose __m128i's may_alias, and GCC then loses the block.
        const __m128i v = _mm_load_si128(reinterpret_cast<const __m128i*>(block + j));
        _mm_stream_si128(reinterpret_cast<__m128i*>(out + i + j), v);
      }
    }
    _mm_sfence();  // non-temporal stores are not ordered before what tells other threads of them
  }
#endif
  for (; i + kBlock <= n; i += kBlock) make(i, out + i);
  return i;
}

}  // namespace
}  // namespace kernels
