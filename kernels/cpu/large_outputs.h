// Non-temporal stores of outputs that no cache holds. large_outputs.cpp has their memory.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#ifdef __SSE2__
#include <emmintrin.h>  // immintrin.h takes GCC 0.4 s
#endif

namespace kernels {
namespace {

constexpr int64_t kBlock = 64;  // elements that are handled together

// map(i, x, out, bytes) for the blocks of x and out of n elements: i is the first, bytes what their
// bits take in a mask. The last block is padded. What streams is stored past the caches, where the
// machine has such stores: ordinary ones first read the lines that they are about to overwrite.
template <typename T, typename Map>
void map_blocks(const T* x, T* out, int64_t n, [[maybe_unused]] bool streams, const Map& map) {
  constexpr std::integral_constant<size_t, kBlock / 8> kMaskBytes;
  int64_t i = 0;
#ifdef __SSE2__
  if (streams && reinterpret_cast<uintptr_t>(out) % sizeof(__m128i) == 0) {
    for (; i + kBlock <= n; i += kBlock) {
      alignas(64) T block[kBlock];
      map(i, x + i, block, kMaskBytes);
      for (int64_t j = 0; j < kBlock; j += sizeof(__m128i) / sizeof(T)) {
        // No `auto` pointers: these lose __m128i's may_alias, and GCC then loses the block.
        const __m128i v = _mm_load_si128(reinterpret_cast<const __m128i*>(block + j));
        _mm_stream_si128(reinterpret_cast<__m128i*>(out + i + j), v);
      }
    }
    _mm_sfence();  // non-temporal stores are not ordered before what tells other threads of them
  }
#endif
  for (; i + kBlock <= n; i += kBlock) map(i, x + i, out + i, kMaskBytes);
  if (i == n) return;
  T rest[kBlock] = {}, made[kBlock];
  std::copy_n(x + i, n - i, rest);
  map(i, rest, made, static_cast<size_t>(n - i + 7) / 8);
  std::copy_n(made, n - i, out + i);
}

}  // namespace
}  // namespace kernels
