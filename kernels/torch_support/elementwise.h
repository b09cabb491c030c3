// For operators of dense tensors that compute each output element from the input element in the
// same place, as ReLU does: the allocation of outputs, and the loop over the elements on a CPU's
// threads. relu/relu_op.cpp uses both.
//
// Large outputs on a CPU are in huge pages, from a pool (cpu/memory_pool.h), because the page
// faults of fresh memory take longer than the arithmetic.

#pragma once

#include <ATen/Parallel.h>
#include <c10/util/FunctionRef.h>

#include <algorithm>

#include "cpu/memory_pool.h"
#include "torch_support/tensor.h"

namespace kernels {

// ---------------------------------------------------------------------- allocation of outputs

// A CPU's outputs of at least so many bytes come from the pool, and are written by stores that
// bypass the caches. Smaller ones gain nothing: glibc's malloc maps fresh memory for a block of
// more than 32 MiB each time, but takes smaller blocks from memory that was touched before.
constexpr size_t kLargeOutputBytes = 32 << 20;

inline c10::Allocator* torch_cpu_allocator() { return c10::GetAllocator(at::kCPU); }

// The pool as an allocator of torch. Where the pool has no memory, torch's own allocator takes its
// place.
class LargeAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    // A tensor keeps its allocator. When it is resized, it calls this again, also for a small size.
    if (bytes < kLargeOutputBytes) return torch_cpu_allocator()->allocate(bytes);
    void* const data = cpu::take_memory(bytes);
    if (data == nullptr) return torch_cpu_allocator()->allocate(bytes);
    c10::profiledCPUMemoryReporter().New(data, bytes);
    // Copy-on-write clones (_lazy_clone) need a context that is the data itself.
    void* const context = data;
    return {data, context, release, at::kCPU};
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  static void release(void* data) {
    c10::profiledCPUMemoryReporter().Delete(data);
    cpu::give_memory(data);
  }
};

// Uninitialised dense memory on a CPU. If there is not enough, the pool's free blocks are returned
// to the system, and the allocation is tried once more.
inline Tensor allocate_cpu_output(const Tensor& like, at::IntArrayRef sizes, at::ScalarType type,
                                  std::optional<at::IntArrayRef> strides) {
  static LargeAllocator large_allocator;
  const size_t bytes = c10::multiply_integers(sizes) * c10::elementSize(type);
  const bool is_large = bytes >= kLargeOutputBytes;
  c10::Allocator* const allocator = is_large ? &large_allocator : torch_cpu_allocator();
  try {
    return allocate(like, sizes, type, strides, allocator);
  } catch (const c10::Error&) {
    const bool has_released_some = cpu::release_memory();
    if (!has_released_some) throw;
  }
  return allocate(like, sizes, type, strides, allocator);
}

// Uninitialised dense memory on the device of `like`. A GPU's allocation that fails does so at
// once: the pool has only memory of the CPU.
inline Tensor allocate_output(const Tensor& like, at::IntArrayRef sizes, at::ScalarType type,
                              std::optional<at::IntArrayRef> strides) {
  if (like.is_cpu()) return allocate_cpu_output(like, sizes, type, strides);
  return allocate(like, sizes, type, strides);
}

// An output with the sizes and the dtype of `like`, which is dense, and with the strides that
// torch's elementwise operators give their outputs. Those are the strides of `like`, except that
// torch normalizes the strides of dimensions of size 1 in contiguous and channels_last tensors.
inline Tensor allocate_like(const Tensor& like) {
  const at::IntArrayRef sizes = like.sizes();
  const at::ScalarType type = like.scalar_type();
  if (like.is_contiguous()) return allocate_output(like, sizes, type, std::nullopt);
  if (like.is_contiguous(at::MemoryFormat::ChannelsLast)) {
    const auto strides = c10::get_channels_last_strides_2d(sizes);
    return allocate_output(like, sizes, type, at::IntArrayRef(strides));
  }
  return allocate_output(like, sizes, type, like.strides());
}

// ------------------------------------------------------------------------- a CPU's threads

// Writes all elements of `out` by calls work(begin, end, bypasses_caches), each of which writes the
// elements begin <= i < end. If there are more than kGrain elements, several of torch's threads
// make the calls.
//
// Each `begin` is a multiple of kRangeStep, which is a multiple of 8. So no two threads write to
// one byte of a mask, and `begin` is one that the functions of launchers.h take. bypasses_caches
// tells whether `out` is so large that no cache holds it.
//
// In a block of the pool, a range also ends where a huge page ends, and its last byte is touched
// before `work` writes to it. Linux clears a huge page when it is first touched, and clears the
// touched part of it last. If that is the end of the page, Linux clears it at ascending addresses,
// which takes half the time (AMD EPYC, Linux 6.18).
inline void for_elements(const Tensor& out, c10::function_ref<void(int64_t, int64_t, bool)> work) {
  constexpr int64_t kGrain = 32768;  // elements, as at::internal::GRAIN_SIZE
  constexpr int64_t kRangeStep = 64;
  const int64_t n = out.numel();
  if (n <= kGrain) return work(0, n, false);

  const int64_t element_bytes = out.element_size();
  char* const data = static_cast<char*>(out.mutable_data_ptr());
  const bool bypasses_caches = out.nbytes() >= kLargeOutputBytes;
  // True in a block of the pool. Memory of torch's allocator, which is used if the pool has none,
  // may begin anywhere, and ranges must not end with huge pages then: if the data begins 16 bytes
  // before a huge page, for example, the page begins with element 4 of a float32 output, in the
  // middle of a byte of the mask.
  const bool begins_with_page = reinterpret_cast<uintptr_t>(data) % cpu::kHugePage == 0;
  static_assert(cpu::kHugePage % (kRangeStep * sizeof(double)) == 0,
                "a range that begins with a huge page begins at a multiple of kRangeStep");
  const int64_t page_elements = static_cast<int64_t>(cpu::kHugePage) / element_bytes;

  const auto work_by_pages = [=](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t page_end = (begin / page_elements + 1) * page_elements;
      const int64_t range_end = std::min(page_end, end);
      volatile char* const last_byte = data + range_end * element_bytes - 1;
      *last_byte = 0;
      work(begin, range_end, true);
      begin = range_end;
    }
  };
  const int64_t steps = (n + kRangeStep - 1) / kRangeStep;
  at::parallel_for(0, steps, kGrain / kRangeStep, [=](int64_t first_step, int64_t last_step) {
    const int64_t begin = first_step * kRangeStep;
    const int64_t end = std::min(last_step * kRangeStep, n);
    if (bypasses_caches && begins_with_page) return work_by_pages(begin, end);
    work(begin, end, bypasses_caches);
  });
}

}  // namespace kernels
