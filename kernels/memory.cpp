// The memory of large outputs on a CPU, as launchers.h describes it.

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "launchers.h"

namespace kernels {
namespace cpu {

#if defined(MADV_HUGEPAGE) && defined(MADV_FREE)
namespace {

struct Block {
  void* data;
  size_t bytes;
};

// Blocks that nobody uses, the oldest first.
struct Kept {
  std::mutex mutex;
  std::vector<Block> blocks;
  size_t bytes = 0;
  const size_t most = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE) / 8;
};

Kept& kept() {
  static Kept& instance = *new Kept;  // outlives what is freed as the process ends
  return instance;
}

size_t whole_pages(size_t bytes) { return (bytes + kHugePage - 1) / kHugePage * kHugePage; }

}  // namespace

void* take_memory(size_t bytes) {
  bytes = whole_pages(bytes);
  Kept& all = kept();
  // Nobody waits: in the child of a fork the mutex may be locked for good.
  if (const std::unique_lock lock(all.mutex, std::try_to_lock); lock) {
    for (size_t i = all.blocks.size(); i-- > 0;) {
      if (all.blocks[i].bytes != bytes) continue;
      void* const data = all.blocks[i].data;
      all.blocks.erase(all.blocks.begin() + i);
      all.bytes -= bytes;
      return data;
    }
  }
  void* const mapped =
      mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  char* const start = static_cast<char*>(mapped);
  char* const data = reinterpret_cast<char*>(whole_pages(reinterpret_cast<uintptr_t>(mapped)));
  if (data > start) munmap(start, data - start);
  if (data < start + kHugePage) munmap(data + bytes, start + kHugePage - data);
  // Only advice: where the kernel declines it, nothing changes but the time.
  madvise(data, bytes, MADV_HUGEPAGE);
  return data;
}

void give_memory(void* data, size_t bytes) {
  bytes = whole_pages(bytes);
  Kept& all = kept();
  std::vector<Block> surplus;
  const std::unique_lock lock(all.mutex, std::try_to_lock);
  // Of every huge page Linux tells the other threads that run, so that 1 GiB takes 1 to 9 ms while
  // torch's still wait for work, and 0.3 when they sleep (Linux 6.18, virtual machines).
  if (lock && bytes <= all.most && madvise(data, bytes, MADV_FREE) == 0) {
    all.blocks.push_back({data, bytes});
    all.bytes += bytes;
    while (all.bytes > all.most) {
      surplus.push_back(all.blocks.front());
      all.bytes -= all.blocks.front().bytes;
      all.blocks.erase(all.blocks.begin());
    }
  } else {
    surplus.push_back({data, bytes});
  }
  for (const Block& block : surplus) munmap(block.data, block.bytes);
}
#else
void* take_memory(size_t) { return nullptr; }
void give_memory(void*, size_t) {}
#endif

}  // namespace cpu
}  // namespace kernels
