// Shared by the programs of this folder: random operands for emulated CUDA kernels, checks of
// results, and the names of the kernels that ran.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "common/launch.cuh"
#include "launchers.h"

namespace {

using namespace kernels;

// ---------------------------------------------------------------------------- random numbers

std::mt19937_64 generator;

// An integer from `least` to `most`, both included.
int64_t draw(int64_t least, int64_t most) {
  return least + static_cast<int64_t>(generator() % static_cast<uint64_t>(most - least + 1));
}

// True with probability 1 / n.
bool one_in(int64_t n) { return draw(1, n) == 1; }

// --------------------------------------------------------------------------------- operands

// An operand of `bytes` bytes at `data`, between guards, which are memory that no kernel may write.
// Operand and guards are random, with many zeros.
//
//     memory |  guard  |  ... data, bytes ...  |  guard  |
//                      ^ a multiple of kGuard, plus `misalignment` bytes
struct Buffer {
  static constexpr int64_t kGuard = 64;
  std::vector<uint8_t> memory;
  std::vector<uint8_t> before;  // a copy of `memory`, from before the kernel ran
  uint8_t* data;
  int64_t bytes;

  Buffer(int64_t bytes, int64_t misalignment) : memory(bytes + 3 * kGuard), bytes(bytes) {
    for (uint8_t& byte : memory) byte = one_in(9) ? 0 : static_cast<uint8_t>(generator());
    const uintptr_t first = reinterpret_cast<uintptr_t>(memory.data()) + kGuard;
    const int64_t padding = (kGuard - first % kGuard) % kGuard;
    data = memory.data() + kGuard + padding + misalignment;
    before = memory;
  }
  Buffer(const Buffer&) = delete;

  // Element i as an unsigned integer of `size` bytes, now and before the kernel ran.
  uint64_t element(int64_t i, int size) const { return read(data + i * size, size); }
  uint64_t element_before(int64_t i, int size) const {
    return read(before.data() + (data - memory.data()) + i * size, size);
  }

  // Returns whether the guards are unchanged.
  bool has_intact_guards() const {
    const int64_t start = data - memory.data();
    const int64_t end = start + bytes;
    return std::equal(before.begin(), before.begin() + start, memory.begin()) &&
           std::equal(before.begin() + end, before.end(), memory.begin() + end);
  }

  static uint64_t read(const uint8_t* from, int size) {
    uint64_t element = 0;
    memcpy(&element, from, size);
    return element;
  }
};

// A mask of `bits` bits.
struct Mask : Buffer {
  int64_t bits;

  explicit Mask(int64_t bits) : Buffer((bits + 7) / 8, 0), bits(bits) {}

  bool bit(int64_t i) const { return (data[i / 8] >> i % 8 & 1) != 0; }

  // Returns whether the last byte's unused bits are 0.
  bool unused_bits_are_zero() const {
    for (int64_t i = bits; i < 8 * bytes; ++i) {
      if (bit(i)) return false;
    }
    return true;
  }
};

// ----------------------------------------------------------------------- checks and reports

// Ends the program with a message unless a result is right. n is the number of elements, and i the
// index of the one that was checked, or -1 if no single one was.
void require(bool is_right, const char* what, DType dtype, int64_t n, int64_t i = -1) {
  if (is_right) return;
  printf("%s: dtype %d, %ld elements, element %ld, %s\n", what, static_cast<int>(dtype),
         static_cast<long>(n), static_cast<long>(i), launched);
  exit(1);
}

std::set<std::string> all_launched;  // the names of the kernels that ran

// Takes the status that a launcher returns, and notes which kernel it launched.
void note_launch(int status) {
  if (status != cudaSuccess) {
    printf("status %d\n", status);
    exit(1);
  }
  // The name of the kernel is relu_kernel in "... [with auto kKernel = kernels::relu_kernel<float>;
  // Params = ...]". It begins after the "::" before "_kernel".
  const std::string function = launched;
  const size_t first = function.rfind("::", function.find("_kernel")) + 2;
  const size_t end = function.find_first_of("<;]", first);
  all_launched.insert(function.substr(first, end - first));
}

// Prints the kernels that ran, a line each.
void print_launched() {
  for (const std::string& name : all_launched) puts(name.c_str());
}

}  // namespace
