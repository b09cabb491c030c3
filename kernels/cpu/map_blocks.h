// The loop of the CPU kernels: calls an elementwise function for 64 elements at a time, and may
// write the results by stores that bypass the caches.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#ifdef __SSE2__
#include <emmintrin.h>  // immintrin.h takes GCC 0.4 s to compile
#endif

#include "common/sizes.h"

namespace kernels {
namespace {

// The elements of a block. Their bits of a mask fill 8 bytes.
constexpr int64_t kBlock = 64;

#ifdef __SSE2__
// Copies a block to `out`, which is aligned to 16 bytes, by non-temporal stores. An ordinary store
// first reads the cache line that it is about to overwrite; a non-temporal store does not.
template <typename T>
void store_past_caches(const T* block, T* out) {
  constexpr int64_t kElementsOfStore = sizeof(__m128i) / sizeof(T);
  for (int64_t i = 0; i < kBlock; i += kElementsOfStore) {
    // Do not keep the cast pointers in `auto` variables: these would lose __m128i's may_alias. GCC
    // would then believe that nobody reads what map_blocks has stored in `block`, and remove those
    // stores.
    const __m128i vector = _mm_load_si128(reinterpret_cast<const __m128i*>(block + i));
    _mm_stream_si128(reinterpret_cast<__m128i*>(out + i), vector);
  }
}
#endif

// Divides n elements into blocks of kBlock, and calls map(i, x_block, out_block, mask_bytes) for
// each:
//
//   i           the index of the block's first element, a multiple of kBlock
//   x_block     the block's elements of x, which map reads
//   out_block   the block's elements of out, which map writes
//   mask_bytes  how many bytes of a mask the block has: 8, as a compile-time constant, or 1 to 8
//               for a last block that is shorter
//
// The x_block of a shorter block is a copy, filled up with zeros to kBlock elements. Its out_block
// is a buffer, of which only the elements before n are copied to out. x and out may be the same.
//
// If bypasses_caches, whole blocks are written by non-temporal stores, where the machine has them
// and out is aligned to 16 bytes.
template <typename T, typename Map>
void map_blocks(const T* x, T* out, int64_t n, [[maybe_unused]] bool bypasses_caches,
                const Map& map) {
  constexpr std::integral_constant<size_t, kBlock / 8> kMaskBytes;
  int64_t i = 0;
#ifdef __SSE2__
  if (bypasses_caches && reinterpret_cast<uintptr_t>(out) % sizeof(__m128i) == 0) {
    for (; i + kBlock <= n; i += kBlock) {
      alignas(64) T block[kBlock];
      map(i, x + i, block, kMaskBytes);
      store_past_caches(block, out + i);
    }
    // Non-temporal stores are not ordered with ordinary ones. Without a fence, another thread could
    // learn that this one has ended before it sees the results.
    _mm_sfence();
  }
#endif
  for (; i + kBlock <= n; i += kBlock) map(i, x + i, out + i, kMaskBytes);
  const int64_t rest = n - i;
  if (rest == 0) return;
  T x_block[kBlock] = {};
  T out_block[kBlock];
  std::copy_n(x + i, rest, x_block);
  const auto mask_bytes = static_cast<size_t>(bytes_of_bits(rest));
  map(i, x_block, out_block, mask_bytes);
  std::copy_n(out_block, rest, out + i);
}

}  // namespace
}  // namespace kernels
