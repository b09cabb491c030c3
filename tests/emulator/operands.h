// Random operands for CUDA kernels that run on a CPU, and what a test of them says.

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

std::mt19937_64 generator;

int64_t draw(int64_t least, int64_t most) {
  return least + static_cast<int64_t>(generator() % static_cast<uint64_t>(most - least + 1));
}
bool one_in(int64_t n) { return draw(1, n) == 1; }

// Bytes at any address of their size, between bytes that nobody may write.
struct Buffer {
  static constexpr int64_t kGuard = 64;
  std::vector<uint8_t> memory, before;
  uint8_t* data;
  int64_t bytes;

  Buffer(int64_t bytes, int64_t misalignment) : memory(bytes + 3 * kGuard), bytes(bytes) {
    for (uint8_t& byte : memory) byte = one_in(9) ? 0 : static_cast<uint8_t>(generator());
    const uintptr_t first = reinterpret_cast<uintptr_t>(memory.data()) + kGuard;
    data = memory.data() + kGuard + (kGuard - first % kGuard) % kGuard + misalignment;
    before = memory;
  }
  Buffer(const Buffer&) = delete;

  uint64_t element(int64_t i, int size) const { return read(data + i * size, size); }
  uint64_t element_before(int64_t i, int size) const {
    return read(before.data() + (data - memory.data()) + i * size, size);
  }
  bool has_guards() const {
    const int64_t start = data - memory.data();
    return std::equal(before.begin(), before.begin() + start, memory.begin()) &&
           std::equal(before.begin() + start + bytes, before.end(), memory.begin() + start + bytes);
  }

  static uint64_t read(const uint8_t* from, int size) {
    uint64_t element = 0;
    memcpy(&element, from, size);
    return element;
  }
};

// Where an element of this size may begin.
int64_t misalignment(int size) { return one_in(3) ? draw(0, 15) / size * size : 0; }

struct Mask : Buffer {
  int64_t bits;
  explicit Mask(int64_t bits) : Buffer((bits + 7) / 8, 0), bits(bits) {}
  bool bit(int64_t i) const { return data[i / 8] >> i % 8 & 1; }
  bool has_zeros_after() const {
    for (int64_t i = bits; i < 8 * bytes; ++i) {
      if (bit(i)) return false;
    }
    return true;
  }
};

void require(bool is_right, const char* what, DType dtype, int64_t n, int64_t i = -1) {
  if (is_right) return;
  printf("%s: dtype %d, %ld elements, element %ld, %s\n", what, static_cast<int>(dtype),
         static_cast<long>(n), static_cast<long>(i), launched);
  exit(1);
}

std::set<std::string> all_launched;

void note_launch(int status) {
  if (status != cudaSuccess) printf("status %d\n", status), exit(1);
  const std::string function = launched;
  const size_t first = function.rfind("::", function.find("_kernel")) + 2;
  all_launched.insert(function.substr(first, function.find_first_of("<;]", first) - first));
}

// Prints the kernels that ran, a line each.
void print_launched() {
  for (const std::string& name : all_launched) puts(name.c_str());
}

}  // namespace
