// The pool that memory_pool.h describes.
//
// A block in the address space, with the names that map_block uses. The header (H) precedes the
// data (d). map_block maps more than it needs, and unmaps the dots again:
//
//     mapped     block_begin
//     |          |    data                               block_end
//     |          |    |                                  |               mapped_end
//     |..........|HHHH|dddddddddddddddddddddddddddddddddd|...............|
//                     |                                  |
//                     a multiple of kHugePage            a multiple of kHugePage

#include "cpu/memory_pool.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#ifdef __linux__
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>
#endif

namespace kernels::cpu {

#if defined(MADV_HUGEPAGE) && defined(MADV_FREE)
namespace {

// Precedes the data of each block, in pages of its own, so that the data begins with a huge page.
struct Header {
  size_t bytes;  // the size of the data, a multiple of kHugePage
  Header* next;  // in the pool's list, while the block is free
};
constexpr size_t kHeaderBytes = 64 << 10;  // Linux has ordinary pages of 4 to 64 KiB

Header* header_of(void* data) {
  return reinterpret_cast<Header*>(static_cast<char*>(data) - kHeaderBytes);
}

void* data_of(Header* header) { return reinterpret_cast<char*>(header) + kHeaderBytes; }

void unmap(Header* header) { munmap(header, kHeaderBytes + header->bytes); }

// Returns the memory limit of the container (control groups of version 2 or 1), or a number larger
// than any memory if there is no limit. (For version 1, that number is in the file.)
size_t cgroup_limit() {
  constexpr const char* kPaths[] = {"/sys/fs/cgroup/memory.max",
                                    "/sys/fs/cgroup/memory/memory.limit_in_bytes"};
  for (const char* path : kPaths) {
    FILE* const file = fopen(path, "r");
    if (file == nullptr) continue;
    unsigned long long limit;
    const bool is_limited = fscanf(file, "%llu", &limit) == 1;  // version 2 may say "max"
    fclose(file);
    if (is_limited) return limit;
  }
  return SIZE_MAX;
}

size_t pool_capacity() {
  const char* const setting = getenv("KERNELS_CPU_POOL");
  if (setting != nullptr && strcmp(setting, "0") == 0) return 0;
  const size_t installed = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  const size_t limit = cgroup_limit();
  const size_t available = limit < installed ? limit : installed;
  return available / 8;
}

bool is_address_space_limited() {
  rlimit limit;
  return getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
}

// The free blocks: a linked list, the newest first.
struct Pool {
  const size_t capacity = pool_capacity();  // the most bytes of free blocks
  std::mutex mutex;                         // guards the list

  // Removes and returns the newest block with exactly `size` bytes of data, or returns null.
  Header* take(size_t size) {
    const std::lock_guard lock(mutex);
    for (Header** link = &first; *link != nullptr; link = &(*link)->next) {
      if ((*link)->bytes == size) return remove(link);
    }
    return nullptr;
  }

  // Adds a block, and unmaps the oldest ones while the pool is larger than its capacity.
  void add(Header* header) {
    const std::lock_guard lock(mutex);
    header->next = first;
    first = header;
    bytes += header->bytes;
    while (bytes > capacity) unmap(remove_oldest());
  }

  bool unmap_all() {
    const std::lock_guard lock(mutex);
    const bool has_any = first != nullptr;
    while (first != nullptr) unmap(remove(&first));
    return has_any;
  }

 private:
  Header* first = nullptr;
  size_t bytes = 0;  // of all blocks' data

  // Removes the block that *link points to.
  Header* remove(Header** link) {
    Header* const header = *link;
    *link = header->next;
    bytes -= header->bytes;
    return header;
  }

  Header* remove_oldest() {
    Header** link = &first;
    while ((*link)->next != nullptr) link = &(*link)->next;
    return remove(link);
  }
};

Pool& pool() {
  // The pool is never destroyed, because tensors may be freed while the process ends.
  static Pool& instance = *new Pool;
  // A fork waits until no other thread is inside the pool. The child's copy of the list is then
  // whole, and its mutex unlocked.
  static const auto lock = [] { instance.mutex.lock(); };
  static const auto unlock = [] { instance.mutex.unlock(); };
  [[maybe_unused]] static const int error = pthread_atfork(lock, unlock, unlock);
  return instance;
}

size_t round_up_to_huge_pages(size_t bytes) {
  return (bytes + kHugePage - 1) / kHugePage * kHugePage;
}

char* map_memory(size_t bytes) {
  void* const mapped =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return mapped == MAP_FAILED ? nullptr : static_cast<char*>(mapped);
}

// Maps a block of `bytes` bytes of data, a multiple of kHugePage. Returns null where the system
// declines.
Header* map_block(size_t bytes) {
  // mmap may align to an ordinary page only. Two huge pages more than the data leave room for a
  // header and for the alignment of the data.
  static_assert(kHeaderBytes <= kHugePage, "two huge pages have room for header and alignment");
  const size_t mapped_bytes = bytes + 2 * kHugePage;
  char* mapped = map_memory(mapped_bytes);
  if (mapped == nullptr && release_memory()) mapped = map_memory(mapped_bytes);
  if (mapped == nullptr) return nullptr;
  const uintptr_t least_data = reinterpret_cast<uintptr_t>(mapped) + kHeaderBytes;
  char* const data = reinterpret_cast<char*>(round_up_to_huge_pages(least_data));
  char* const block_begin = data - kHeaderBytes;
  char* const block_end = data + bytes;
  char* const mapped_end = mapped + mapped_bytes;
  if (block_begin > mapped) munmap(mapped, block_begin - mapped);
  if (block_end < mapped_end) munmap(block_end, mapped_end - block_end);
  Header* const header = header_of(data);
  header->bytes = bytes;
  // This is only advice: where the system declines it, the memory works too, but is slower.
  madvise(data, bytes, MADV_HUGEPAGE);
  return header;
}

}  // namespace

void* take_memory(size_t bytes) {
  if (bytes > SIZE_MAX / 2) return nullptr;  // adding to it could overflow
  bytes = round_up_to_huge_pages(bytes);
  Header* header = pool().take(bytes);
  if (header == nullptr) header = map_block(bytes);
  return header == nullptr ? nullptr : data_of(header);
}

void give_memory(void* data) {
  Header* const header = header_of(data);
  if (header->bytes > pool().capacity || is_address_space_limited()) {
    unmap(header);
    return;
  }
  // MADV_FREE lets Linux reclaim the pages while the block is in the pool. The call takes time,
  // because Linux interrupts the process's other running threads for every huge page: for 1 GiB, 1
  // to 9 ms while torch's threads spin, and 0.3 ms when they sleep (Linux 6.18, virtual machines).
  if (madvise(data, header->bytes, MADV_FREE) != 0) {
    unmap(header);
    return;
  }
  pool().add(header);
}

bool release_memory() { return pool().unmap_all(); }

#else  // no huge pages, or no memory that the system may reclaim

void* take_memory(size_t) { return nullptr; }
void give_memory(void*) {}
bool release_memory() { return false; }

#endif

}  // namespace kernels::cpu
