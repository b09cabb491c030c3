// Elementwise operators of dense tensors: their outputs, and their loops on a CPU's threads.

#pragma once

#include <ATen/Parallel.h>
#include <c10/util/FunctionRef.h>

#include <algorithm>

#include "cpu/large_outputs.h"  // so that large_outputs.cpp is built
#include "torch_support/tensor.h"

namespace kernels {

// From this size on a CPU's outputs go to memory, past the caches, and are put in huge pages. glibc
// maps what is larger than this anew each time; smaller blocks come from memory that was touched
// before.
constexpr size_t kStreamBytes = 32 << 20;

// The memory of large outputs on a CPU.
class LargeAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    // A tensor that takes this allocator along may be resized to anything.
    void* const data = bytes < kStreamBytes ? nullptr : cpu::take_memory(bytes);
    if (data == nullptr) return c10::GetAllocator(at::kCPU)->allocate(bytes);
    c10::profiledCPUMemoryReporter().New(data, bytes);
    // Copy-on-write clones (_lazy_clone) need a context that is the data itself.
    return {data, data, release, at::kCPU};
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

// Dense memory on the device of `like`, on a CPU as that of large outputs.
inline Tensor allocate_output(const Tensor& like, at::IntArrayRef sizes, at::ScalarType type,
                              std::optional<at::IntArrayRef> strides) {
  static LargeAllocator large;
  const size_t bytes = c10::multiply_integers(sizes) * c10::elementSize(type);
  c10::Allocator* const allocator = bytes < kStreamBytes ? c10::GetAllocator(at::kCPU) : &large;
  try {
    return allocate(like, sizes, type, strides, allocator);
  } catch (const c10::Error&) {  // once more without the memory that is kept for later
    if (!cpu::release_memory()) throw;
  }
  return allocate(like, sizes, type, strides, allocator);
}

// The same like `like`, which is dense, with the strides that torch's elementwise ops give their
// outputs. The first two rules matter where a dimension has size 1.
inline Tensor allocate_like(const Tensor& like) {
  const auto make = [&](std::optional<at::IntArrayRef> strides) {
    return allocate_output(like, like.sizes(), like.scalar_type(), strides);
  };
  if (like.is_contiguous()) return make(std::nullopt);
  if (like.is_contiguous(at::MemoryFormat::ChannelsLast)) {
    return make(c10::get_channels_last_strides_2d(like.sizes()));
  }
  return make(like.strides());
}

// work(begin, end, streams) over the elements 0 <= i < n that it writes to `out`, on torch's
// threads if they are more than at::internal::GRAIN_SIZE; begin is a multiple of 64.
//
// Fresh huge pages are touched at their ends first. Linux clears a huge page so that it comes last
// to where it was touched; touched at the end, it is cleared at ascending addresses, which takes
// half the time (AMD EPYC, Linux 6.18).
inline void for_elements(const Tensor& out, c10::function_ref<void(int64_t, int64_t, bool)> work) {
  constexpr int64_t kGrain = 32768, kStep = 64;
  const int64_t n = out.numel(), size = out.element_size();
  if (n <= kGrain) return work(0, n, false);
  char* const data = static_cast<char*>(out.mutable_data_ptr());
  const bool streams = out.nbytes() >= kStreamBytes;
  at::parallel_for(0, (n + kStep - 1) / kStep, kGrain / kStep, [=](int64_t begin, int64_t end) {
    begin *= kStep, end = std::min(end * kStep, n);
    if (!streams) return work(begin, end, false);
    while (begin < end) {
      const uintptr_t page = reinterpret_cast<uintptr_t>(data + begin * size) / cpu::kHugePage + 1;
      char* const next_page = reinterpret_cast<char*>(page * cpu::kHugePage);
      const int64_t next = std::min<int64_t>((next_page - data) / size, end);
      *static_cast<volatile char*>(data + next * size - 1) = 0;
      work(begin, next, true);
      begin = next;
    }
  });
}

}  // namespace kernels
