// The memory of large outputs on a CPU: huge pages, and a pool of free blocks that Linux may
// reclaim.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <mutex>

#ifdef __linux__
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>
#endif

#include "launchers.h"

namespace kernels::cpu {

#if defined(MADV_HUGEPAGE) && defined(MADV_FREE)
namespace {

// Precedes each block, in pages of its own, so that the block begins with a huge page.
struct Header {
  size_t bytes;
  Header* next;
};
constexpr size_t kHeaderBytes = 64 << 10;  // Linux has ordinary pages of 4 to 64 KiB

Header* header_of(void* data) {
  return reinterpret_cast<Header*>(static_cast<char*>(data) - kHeaderBytes);
}
void* data_of(Header* header) { return reinterpret_cast<char*>(header) + kHeaderBytes; }
void unmap(Header* header) { munmap(header, kHeaderBytes + header->bytes); }

// The memory limit of the container, by control groups of version 2 or 1.
size_t cgroup_limit() {
  for (const char* path :
       {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    FILE* const file = fopen(path, "r");
    if (file == nullptr) continue;
    unsigned long long limit;
    const bool is_limited = fscanf(file, "%llu", &limit) == 1;  // or "max"
    fclose(file);
    if (is_limited) return limit;
  }
  return SIZE_MAX;
}

size_t most_bytes() {
  const char* const wanted = getenv("KERNELS_CPU_POOL");
  if (wanted != nullptr && strcmp(wanted, "0") == 0) return 0;
  const size_t installed = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  const size_t limit = cgroup_limit();
  return (limit < installed ? limit : installed) / 8;
}

// Free blocks keep their address space.
bool is_address_space_limited() {
  rlimit limit;
  return getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
}

// The free blocks, the newest first.
struct Pool {
  std::mutex mutex;
  Header* first = nullptr;
  size_t bytes = 0;
  const size_t most = most_bytes();

  // Unlinks the block that `link` points to.
  Header* take(Header** link) {
    Header* const header = *link;
    *link = header->next;
    bytes -= header->bytes;
    return header;
  }
};

Pool& pool() {
  static Pool& instance = *new Pool;  // outlives what is freed as the process ends
  // No fork happens while another thread changes the list: the child's is whole and unlocked.
  static const auto unlock = [] { instance.mutex.unlock(); };
  [[maybe_unused]] static const int error =
      pthread_atfork([] { instance.mutex.lock(); }, unlock, unlock);
  return instance;
}

size_t whole_pages(size_t bytes) { return (bytes + kHugePage - 1) / kHugePage * kHugePage; }

void* map(size_t bytes) {
  void* const mapped =
      mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return mapped == MAP_FAILED ? nullptr : mapped;
}

}  // namespace

void* take_memory(size_t bytes) {
  if (bytes > SIZE_MAX / 2) return nullptr;
  bytes = whole_pages(bytes);
  {
    Pool& all = pool();
    const std::lock_guard lock(all.mutex);
    for (Header** link = &all.first; *link != nullptr; link = &(*link)->next) {
      if ((*link)->bytes == bytes) return data_of(all.take(link));
    }
  }
  void* mapped = map(bytes);
  if (mapped == nullptr && release_memory()) mapped = map(bytes);
  if (mapped == nullptr) return nullptr;
  char* const start = static_cast<char*>(mapped);
  char* const data =
      reinterpret_cast<char*>(whole_pages(reinterpret_cast<uintptr_t>(mapped) + kHeaderBytes));
  Header* const header = header_of(data);
  char* const first = reinterpret_cast<char*>(header);
  if (first > start) munmap(start, first - start);
  if (data < start + kHugePage) munmap(data + bytes, start + kHugePage - data);
  header->bytes = bytes;
  // Only advice: where the kernel declines it, nothing changes but the time.
  madvise(data, bytes, MADV_HUGEPAGE);
  return data;
}

void give_memory(void* data) {
  Header* const header = header_of(data);
  Pool& all = pool();
  // Linux interrupts the process's other running threads for every huge page: 1 GiB takes 1 to 9 ms
  // while torch's threads spin, and 0.3 when they sleep (Linux 6.18, virtual machines).
  if (header->bytes > all.most || is_address_space_limited() ||
      madvise(data, header->bytes, MADV_FREE) != 0) {
    unmap(header);
    return;
  }
  const std::lock_guard lock(all.mutex);
  header->next = all.first;
  all.first = header;
  all.bytes += header->bytes;
  while (all.bytes > all.most) {
    Header** last = &all.first;
    while ((*last)->next != nullptr) last = &(*last)->next;
    unmap(all.take(last));
  }
}

bool release_memory() {
  Pool& all = pool();
  const std::lock_guard lock(all.mutex);
  const bool has_any = all.first != nullptr;
  while (all.first != nullptr) unmap(all.take(&all.first));
  return has_any;
}
#else
void* take_memory(size_t) { return nullptr; }
void give_memory(void*) {}
bool release_memory() { return false; }
#endif

}  // namespace kernels::cpu
