// Stands in for kernels/common/launch.cuh: CUDA kernels compiled by a C++ compiler and run on a
// CPU, so that a machine without a GPU can check what they read and write.
//
// Blocks run one after another. The threads of a block are fibers: each runs until it waits for the
// others at __syncthreads, or for those of its warp at a shuffle or a ballot.

#pragma once

#include <cuda_runtime.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#undef __shared__
#define __shared__ static  // one block runs at a time
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__

using std::max;
using std::min;
inline int64_t min(int64_t a, int b) { return std::min<int64_t>(a, b); }

struct Index {
  unsigned x = 0, y = 0;
};
inline Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

constexpr int kMostThreads = 1024, kWarp = 32;
constexpr size_t kStackBytes = 64 << 10;

using Place = void* [5];  // of __builtin_setjmp; swapcontext takes two system calls

struct Fiber {
  bool has_ended = false;
  unsigned barriers = 0, exchanges = 0;  // that it has reached
};

inline std::vector<Fiber> fibers;              // of the block that runs
inline Place places[kMostThreads], scheduler;  // where each goes on
inline int current;                            // the fiber that runs
inline uint64_t exchanged[2][kMostThreads];    // of this exchange of each thread, and of the next
inline void (*kernel)(void*);
inline void* arguments;

[[gnu::noinline]] inline void go_to(Place& other) { __builtin_longjmp(other, 1); }
[[gnu::noinline]] inline void switch_to(Place& other, Place& own) {
  if (__builtin_setjmp(own) == 0) go_to(other);
}

// A fiber: the same thread of one block after the other.
inline void run_threads() {
  for (;;) {
    kernel(arguments);
    fibers[current].has_ended = true;
    switch_to(scheduler, places[current]);
  }
}

// Lets others run until all those from `first` to `last` have ended or have_reached(fiber).
template <typename Reached>
void wait(int first, int last, const Reached& has_reached) {
  const int own = current;
  const auto is_there = [&](const Fiber& fiber) { return fiber.has_ended || has_reached(fiber); };
  while (!std::all_of(fibers.begin() + first, fibers.begin() + last, is_there)) {
    switch_to(scheduler, places[own]);
  }
  threadIdx.x = own;
}

// Gives a value to the warp's other threads.
inline void exchange(uint64_t value) {
  const int first = current / kWarp * kWarp;
  const int last = std::min<int>(first + kWarp, static_cast<int>(fibers.size()));
  const unsigned reached = ++fibers[current].exchanges;
  exchanged[reached % 2][current] = value;
  wait(first, last, [=](const Fiber& fiber) { return fiber.exchanges >= reached; });
}

// The value that a lane has given, or 0 if it had ended before.
inline uint64_t given_by(int lane) {
  const size_t thread = current / kWarp * kWarp + lane;
  const unsigned reached = fibers[current].exchanges;
  if (thread >= fibers.size() || fibers[thread].exchanges < reached) return 0;
  return exchanged[reached % 2][thread];
}

[[gnu::noinline]] inline void start(int thread) {
  static const std::unique_ptr<char[]> stacks(new char[kMostThreads * kStackBytes]);
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = stacks.get() + thread * kStackBytes;
  context.uc_stack.ss_size = kStackBytes;
  makecontext(&context, run_threads, 0);
  if (__builtin_setjmp(scheduler) == 0) setcontext(&context);
}

inline void run_block(int threads) {
  static int started = 0;
  fibers.assign(threads, Fiber());
  for (bool runs = true; runs;) {
    runs = false;
    for (int i = 0; i < threads; ++i) {
      if (fibers[i].has_ended) continue;
      runs = true;
      current = i, threadIdx.x = i;
      if (i < started) {
        switch_to(places[i], scheduler);
      } else {
        start(started++);
      }
    }
  }
}

inline void run_grid(dim3 grid, int threads) {
  blockDim.x = threads, gridDim = {grid.x, grid.y};
  for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y) {
    for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) run_block(threads);
  }
}

}  // namespace emulator

// ---------------------------------------------------------------------------- CUDA's functions

inline void __syncthreads() {
  const unsigned reached = ++emulator::fibers[emulator::current].barriers;
  emulator::wait(0, static_cast<int>(emulator::fibers.size()),
                 [=](const emulator::Fiber& fiber) { return fiber.barriers >= reached; });
}

inline uint32_t __ballot_sync(unsigned, bool vote) {
  emulator::exchange(vote);
  uint32_t votes = 0;
  for (int lane = 0; lane < emulator::kWarp; ++lane) {
    votes |= static_cast<uint32_t>(emulator::given_by(lane)) << lane;
  }
  return votes;
}

template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(value));
  emulator::exchange(bits);
  bits = emulator::given_by(emulator::current % emulator::kWarp ^ mask);
  memcpy(&value, &bits, sizeof(value));
  return value;
}

template <typename To, typename From>
To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &value, sizeof(to));
  return to;
}
inline int __float_as_int(float v) { return bits_as<int>(v); }
inline uint32_t __float_as_uint(float v) { return bits_as<uint32_t>(v); }
inline float __int_as_float(int v) { return bits_as<float>(v); }
inline float __uint_as_float(uint32_t v) { return bits_as<float>(v); }

// ------------------------------------------------------------------------------------- launches

namespace kernels {

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int blocks_of(int64_t size, int64_t block) {
  return static_cast<int>(divide_up(size, block));
}

inline bool has_aligned_rows(const void* first, int64_t stride = 0) {
  return reinterpret_cast<uintptr_t>(first) % 16 == 0 && stride % 16 == 0;
}
inline void start_next_kernel() {}
inline void wait_for_previous_kernel() {}

inline const char* launched = "";  // the kernel, within the name of a function

template <auto kKernel, typename... Params>
int launch(dim3 grid, int block, cudaStream_t, Params... params) {
  static_assert(std::is_same_v<decltype(kKernel), void (*)(Params...)>,
                "the arguments have the types of the kernel's parameters");
  launched = __PRETTY_FUNCTION__;
  auto call = [&] { kKernel(params...); };
  emulator::kernel = [](void* pointer) { (*static_cast<decltype(call)*>(pointer))(); };
  emulator::arguments = &call;
  emulator::run_grid(grid, block);
  return cudaSuccess;
}

// Declared for launchers beside emulated kernels, which no test calls.
struct Grid {
  int blocks, threads;
  size_t bytes;
  cudaStream_t stream;
  bool has_pdl;
};
template <typename... Parameters>
void launch_grid(const Grid&, void (*)(Parameters...), const Parameters&...);
void check(cudaError_t);
int device_attribute(cudaDeviceAttr);

}  // namespace kernels
