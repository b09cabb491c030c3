// Replaces kernels/common/launch.cuh: runs CUDA kernels on a CPU, compiled by a C++ compiler. So a
// machine without a GPU can check what they read and write.
//
// The program includes a kernel's unchanged .cu file. The test's include path has this folder
// before kernels/, so the #include "common/launch.cuh" of the .cu file finds this one.
//
// Blocks run one after another, on one thread of the CPU. A CUDA thread is a fiber: a function with
// a stack of its own, which runs until it has to wait. It then returns to the scheduler
// (run_block), which runs the next fiber. A fiber waits
//
//   at __syncthreads()                    for all fibers of its block
//   at __ballot_sync, __shfl_xor_sync     for the fibers of its warp: they exchange values
//
// No fiber waits for one whose thread has ended. Fibers are made once: fiber i runs thread i of
// each block, one block after another.

#pragma once

#include <cuda_runtime.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "common/sizes.h"

// ------------------------------------------------------------------------------ CUDA's keywords

#undef __shared__
#define __shared__ static  // one block runs at a time
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#undef __noinline__
#define __noinline__

using std::max;
using std::min;
inline int64_t min(int64_t a, int b) { return std::min<int64_t>(a, b); }  // as CUDA has it

struct Index {
  unsigned x = 0;
  unsigned y = 0;
};
inline Index threadIdx;
inline Index blockIdx;
inline Index blockDim;
inline Index gridDim;

// -------------------------------------------------------------------------------------- fibers

namespace emulator {

constexpr int kMaxThreads = 1024;  // of a block
constexpr int kWarpSize = 32;
constexpr size_t kStackBytes = 64 << 10;

// Where a fiber, or the scheduler, goes on: a buffer of __builtin_setjmp. It is faster than
// swapcontext of ucontext.h, which makes two system calls at each switch. Only start() needs
// ucontext.h, because a new fiber needs a stack of its own.
using Continuation = void* [5];

// How far the thread of a fiber has come in the block that runs.
struct Fiber {
  bool has_ended = false;
  unsigned barriers = 0;   // the calls of __syncthreads that it has reached
  unsigned exchanges = 0;  // the exchanges of its warp that it has reached
};

inline std::vector<Fiber> fibers;  // of the block that runs
inline Continuation continuations[kMaxThreads];
inline Continuation scheduler;
inline int current;  // the number of the fiber that runs, which is its threadIdx.x

// The values that threads gave at their last two exchanges. Exchange number i has row i % 2. A
// thread can be one exchange ahead of its warp's other threads, but not two, because it waits for
// them at each one.
inline uint64_t exchanged[2][kMaxThreads];

// The kernel that is launched, as a function of one pointer, and that pointer.
inline void (*kernel)(void*);
inline void* arguments;

// Goes on at `other`. This function and the next one are not inlined, because __builtin_longjmp may
// not be in the function of its __builtin_setjmp.
[[gnu::noinline]] inline void go_to(Continuation& other) { __builtin_longjmp(other, 1); }

// Saves in `own` where the caller goes on, and goes on at `other`.
[[gnu::noinline]] inline void switch_to(Continuation& other, Continuation& own) {
  const bool has_come_back = __builtin_setjmp(own) != 0;
  if (!has_come_back) go_to(other);
}

// The function of a fiber. It runs its thread of a block and returns to the scheduler. When the
// scheduler switches to it again, it runs the same thread of the next block.
inline void run_threads_of_all_blocks() {
  for (;;) {
    kernel(arguments);
    fibers[current].has_ended = true;
    switch_to(scheduler, continuations[current]);
  }
}

// Lets other fibers run until, for each of the fibers first <= i < last, its thread has ended or
// has_reached(fiber) is true.
template <typename Reached>
void wait(int first, int last, const Reached& has_reached) {
  const auto is_ready = [&](const Fiber& fiber) { return fiber.has_ended || has_reached(fiber); };
  while (!std::all_of(fibers.begin() + first, fibers.begin() + last, is_ready)) {
    switch_to(scheduler, continuations[current]);
  }
}

// Gives a value to the warp's other threads, and waits for theirs.
inline void exchange(uint64_t value) {
  const int first = current / kWarpSize * kWarpSize;
  const int last = std::min<int>(first + kWarpSize, static_cast<int>(fibers.size()));
  ++fibers[current].exchanges;
  const unsigned number = fibers[current].exchanges;
  exchanged[number % 2][current] = value;
  wait(first, last, [=](const Fiber& fiber) { return fiber.exchanges >= number; });
}

// Returns the value that a lane of the warp gave at the current thread's last exchange. It is 0 if
// the lane has no thread, or its thread ended before that exchange.
inline uint64_t value_of_lane(int lane) {
  const size_t thread = current / kWarpSize * kWarpSize + lane;
  const unsigned number = fibers[current].exchanges;
  if (thread >= fibers.size() || fibers[thread].exchanges < number) return 0;
  return exchanged[number % 2][thread];
}

// Makes the fiber of a thread, and runs it until it waits or its thread ends. The scheduler calls
// this function, and the fiber then returns to it.
[[gnu::noinline]] inline void start(int thread) {
  static const std::unique_ptr<char[]> stacks(new char[kMaxThreads * kStackBytes]);
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = stacks.get() + thread * kStackBytes;
  context.uc_stack.ss_size = kStackBytes;
  makecontext(&context, run_threads_of_all_blocks, 0);
  const bool has_come_back = __builtin_setjmp(scheduler) != 0;
  if (!has_come_back) setcontext(&context);
}

// The scheduler: runs the fibers of a block in turns until all have ended.
inline void run_block(int threads) {
  static int started = 0;  // the number of fibers that exist
  fibers.assign(threads, Fiber());
  bool has_fibers_left = true;
  while (has_fibers_left) {
    has_fibers_left = false;
    for (int i = 0; i < threads; ++i) {
      if (fibers[i].has_ended) continue;
      has_fibers_left = true;
      current = i;
      threadIdx.x = i;
      if (i < started) {
        switch_to(continuations[i], scheduler);
      } else {
        ++started;
        start(i);
      }
    }
  }
}

inline void run_grid(dim3 grid, int threads) {
  blockDim.x = threads;
  gridDim = {grid.x, grid.y};
  for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y) {
    for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) run_block(threads);
  }
}

}  // namespace emulator

// ---------------------------------------------------------------------------- CUDA's functions

inline void __syncthreads() {
  emulator::Fiber& own = emulator::fibers[emulator::current];
  ++own.barriers;
  const unsigned number = own.barriers;
  emulator::wait(0, static_cast<int>(emulator::fibers.size()),
                 [=](const emulator::Fiber& fiber) { return fiber.barriers >= number; });
}

inline uint32_t __ballot_sync(unsigned, bool vote) {
  emulator::exchange(vote ? 1 : 0);
  uint32_t votes = 0;
  for (int lane = 0; lane < emulator::kWarpSize; ++lane) {
    votes |= static_cast<uint32_t>(emulator::value_of_lane(lane)) << lane;
  }
  return votes;
}

inline int __ffs(int bits) { return __builtin_ffs(bits); }

template <typename T>
T __shfl_xor_sync(unsigned, T value, int lane_mask) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "an exchange has 8 bytes for each thread");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(value));
  emulator::exchange(bits);
  const int own_lane = emulator::current % emulator::kWarpSize;
  bits = emulator::value_of_lane(own_lane ^ lane_mask);
  memcpy(&value, &bits, sizeof(value));
  return value;
}

template <typename To, typename From>
To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From), "the bits of one type are all bits of the other");
  To to;
  memcpy(&to, &value, sizeof(to));
  return to;
}
inline int __float_as_int(float v) { return bits_as<int>(v); }
inline uint32_t __float_as_uint(float v) { return bits_as<uint32_t>(v); }
inline float __int_as_float(int v) { return bits_as<float>(v); }
inline float __uint_as_float(uint32_t v) { return bits_as<float>(v); }

// ------------------------------------------------- the functions of kernels/common/launch.cuh

namespace kernels {

constexpr int divide_up_to_int(int64_t a, int64_t b) { return static_cast<int>(divide_up(a, b)); }

inline bool has_aligned_rows(const void* first, int64_t stride = 0) {
  return reinterpret_cast<uintptr_t>(first) % 16 == 0 && stride % 16 == 0;
}
inline void start_next_kernel() {}
inline void wait_for_previous_kernel() {}

// The signature of the last launch<...>, as the compiler prints it. It has the kernel's name.
inline const char* launched = "";

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

// Kernels' files also have host code that uses these names. No test calls that code, so
// declarations are enough.
struct Grid {
  int blocks;
  int threads;
  size_t shared_bytes;
  cudaStream_t stream;
  bool has_pdl;
};
template <typename... Parameters>
void launch_or_throw(const Grid&, void (*)(Parameters...), const Parameters&...);
void check(cudaError_t);
int device_attribute(cudaDeviceAttr);

}  // namespace kernels
