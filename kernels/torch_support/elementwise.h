// Helpers for elementwise operators such as ReLU: the allocation of outputs, for which a CPU has
// the pool of cpu/memory_pool.h, and the loop over the elements on a CPU's threads.

#pragma once

#include <ATen/Parallel.h>
#include <c10/util/FunctionRef.h>

#include <algorithm>

#include "cpu/memory_pool.h"
#include "torch_support/tensor.h"

namespace kernels {

// ---------------------------------------------------------------------- allocation of outputs

// The size from which an output on a CPU is large: it comes from the pool, and is written by stores
// that bypass the caches. Smaller outputs gain nothing once a program has freed one of
// them: glibc's malloc then maps fresh memory only for larger blocks, at most for those of more
// than 32 MiB.
constexpr size_t kLargeOutputBytes = 32 << 20;

// The pool as an allocator of torch. If the pool has no memory, torch's own allocator is used.
class LargeAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    // A tensor that is resized calls its first allocator again, also for a small size.
    if (bytes < kLargeOutputBytes) return torch_cpu_allocator()->allocate(bytes);
    void* const data = cpu::take_memory(bytes);
    if (data == nullptr) return torch_cpu_allocator()->allocate(bytes);
    c10::profiledCPUMemoryReporter().New(data, bytes);
    // Copy-on-write clones (_lazy_clone) need a context that is the data itself.
    void* const context = data;
    return {data, context, release, at::kCPU};
  }

  void copy_data(void* destination, const void* source, size_t bytes) const override {
    default_copy_data(destination, source, bytes);
  }

 private:
  static void release(void* data) {
    c10::profiledCPUMemoryReporter().Delete(data);
    cpu::give_memory(data);
  }
};

// Returns an uninitialised tensor on a CPU. If there is not enough memory, the pool's free blocks
// are returned to the system, and the allocation is tried once more.
inline Tensor allocate_cpu_output(const Tensor& like, at::IntArrayRef sizes, at::ScalarType type,
                                  std::optional<at::IntArrayRef> strides) {
  static LargeAllocator large_allocator;
  const size_t bytes = c10::multiply_integers(sizes) * c10::elementSize(type);
  const bool is_large = bytes >= kLargeOutputBytes;
  c10::Allocator* const allocator = is_large ? &large_allocator : torch_cpu_allocator();
  try {
    return allocate(like, sizes, type, strides, allocator);
  } catch (const c10::Error&) {
    const bool has_freed_memory = cpu::release_memory();
    if (!has_freed_memory) throw;
  }
  return allocate(like, sizes, type, strides, allocator);
}

inline Tensor allocate_output(const Tensor& like, at::IntArrayRef sizes, at::ScalarType type,
                              std::optional<at::IntArrayRef> strides) {
  if (like.is_cpu()) return allocate_cpu_output(like, sizes, type, strides);
  return allocate(like, sizes, type, strides);
}

// Returns an output with the sizes and dtype of `like`, a dense tensor, and with the strides that
// torch's elementwise operators would give it. They are those of `like`, but torch normalizes the
// strides of dimensions of size 1 in contiguous and channels_last tensors.
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

// Computes the elements begin <= i < end of an output (map_blocks.h explains bypasses_caches).
using RangeFunction = c10::function_ref<void(int64_t begin, int64_t end, bool bypasses_caches)>;

// Calls `work` for the elements begin <= i < end of a block of the pool, one huge page at a time.
// The last byte of a range is written before `work` gets the range, because Linux clears a huge
// page when it is first touched, and clears the touched part last. If that part is the page's end,
// Linux clears the page at ascending addresses, which takes half the time (AMD EPYC, Linux 6.18).
inline void for_elements_by_pages(char* block, int64_t element_bytes, int64_t begin, int64_t end,
                                  RangeFunction work) {
  const int64_t page_elements = static_cast<int64_t>(cpu::kHugePage) / element_bytes;
  while (begin < end) {
    const int64_t page_end = (begin / page_elements + 1) * page_elements;
    const int64_t range_end = std::min(page_end, end);
    volatile char* const last_byte = block + range_end * element_bytes - 1;
    *last_byte = 0;
    work(begin, range_end, /*bypasses_caches=*/true);
    begin = range_end;
  }
}

// Writes all elements of `out`, which is on a CPU, by calls of `work` for ranges of them. If there
// are more than kGrain elements, several of torch's threads make the calls. Each range begins at a
// multiple of kRangeStep, and so of 8, as the functions of launchers.h demand.
inline void for_each_range(const Tensor& out, RangeFunction work) {
  constexpr int64_t kRangeStep = 64;
  static_assert(cpu::kHugePage % (kRangeStep * sizeof(double)) == 0,
                "a range that begins with a huge page begins at a multiple of kRangeStep");
  const int64_t n = out.numel();
  if (n <= kGrain) return work(0, n, /*bypasses_caches=*/false);

  const int64_t element_bytes = out.element_size();
  char* const data = static_cast<char*>(out.mutable_data_ptr());
  const bool is_large = out.nbytes() >= kLargeOutputBytes;
  // for_elements_by_pages counts pages from element 0, so `out` has to begin with a huge page, as
  // the pool's blocks do. If the pool has no memory, `out` is in torch's memory, which may begin
  // anywhere.
  const bool begins_with_page = reinterpret_cast<uintptr_t>(data) % cpu::kHugePage == 0;
  const bool goes_by_pages = is_large && begins_with_page;

  const int64_t steps = (n + kRangeStep - 1) / kRangeStep;
  at::parallel_for(0, steps, kGrain / kRangeStep, [=](int64_t first_step, int64_t last_step) {
    const int64_t begin = first_step * kRangeStep;
    const int64_t end = std::min(last_step * kRangeStep, n);
    if (goes_by_pages) return for_elements_by_pages(data, element_bytes, begin, end, work);
    work(begin, end, /*bypasses_caches=*/is_large);
  });
}

}  // namespace kernels
