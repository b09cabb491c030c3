"""Which path computes a product on a GPU: host code, compiled and run alone."""

import shutil
import subprocess
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parent.parent / "kernels"

# Prints the path of each problem: float bits, is it at `highest`, m, n, k, relu, vectors,
# capability, multiprocessors.
PROGRAM = r"""
#include <cstdio>

#include "linear/binding/paths.h"

int main() {
  using namespace kernels;
  long long bits, highest, m, n, k, relu, has_vectors;
  Gpu gpu;
  while (scanf("%lld %lld %lld %lld %lld %lld %lld %d %d", &bits, &highest, &m, &n, &k, &relu,
               &has_vectors, &gpu.capability, &gpu.multiprocessors) == 9) {
    Linear linear{};
    linear.dtype = bits == 64   ? DType::kFloat64
                   : bits == 32 ? DType::kFloat32
                                : DType::kFloat16;
    linear.precision = highest ? Precision::kHighest : Precision::kHigh;
    linear.m = m, linear.n = n, linear.k = k, linear.relu = relu;
    const char* const names[] = {"skinny", "sm90", "sm80", "torch"};
    puts(names[static_cast<int>(choose_path(linear, gpu, has_vectors))]);
  }
}
"""


@pytest.fixture(scope="module")
def paths_of(tmp_path_factory):
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("paths")
    source, program = folder / "main.cpp", folder / "main"
    source.write_text(PROGRAM)
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-I", KERNELS]
    subprocess.run([compiler, *flags, "-o", program, source], check=True)

    def call(problems):
        text = "\n".join(" ".join(map(str, map(int, problem))) for problem in problems)
        return subprocess.check_output([program], input=text, text=True).split()

    return call


def problem(m, n, k, bits=32, highest=True, relu=True, vectors=True, capability=90, sms=132):
    return bits, highest, m, n, k, relu, vectors, capability, sms


HIGH, HALF, GRADIENT = {"highest": False}, {"bits": 16}, {"relu": False}
# Problems on either side of each limit of the table at the head of paths.h.
TABLE = [
    ((8, 16896, 64), {}, "skinny"),  # 4 tiles a multiprocessor
    ((8, 16897, 64), {}, "torch"),
    ((8, 16897, 512), {}, "skinny"),
    ((8, 8192, 64), HIGH, "skinny"),
    ((8, 8192, 64), HALF, "torch"),
    ((8, 8192, 64), GRADIENT, "torch"),
    ((8, 8192, 64), {"vectors": False}, "torch"),
    ((8, 8192, 64), {"capability": 80}, "torch"),
    ((9, 8192, 8192), HIGH, "torch"),
    ((16, 8448, 256), {}, "skinny"),  # 2 tiles
    ((16, 8449, 256), {}, "torch"),
    ((16, 8449, 512), {}, "skinny"),
    ((16, 8448, 255), {}, "torch"),
    ((17, 8192, 8192), {}, "sm90"),
    ((17, 2112, 16), {}, "skinny"),  # 1 tile
    ((17, 2112, 15), {}, "torch"),
    ((17, 2113, 16), {}, "torch"),
    ((17, 2113, 256), {}, "skinny"),
    ((17, 4224, 255), {}, "torch"),
    ((17, 4225, 256), {}, "torch"),
    ((32, 2048, 4096), {}, "skinny"),  # m n k = 2^28
    ((32, 2048, 4097), {}, "sm90"),
    ((32, 4096, 1024), {}, "skinny"),  # 2^27
    ((32, 4096, 1025), {}, "sm90"),
    ((4096, 16, 2048), {}, "skinny"),  # n < 32: m k = 2^23
    ((4096, 16, 2049), {}, "torch"),
    ((1024, 16, 8193), {}, "torch"),
    ((4096, 32, 2048), {}, "torch"),
    ((4225, 8, 8192), {}, "torch"),
    ((4096, 7, 8192), {}, "torch"),
    ((1024, 8192, 8192), {}, "sm90"),
    ((1024, 8192, 31), {}, "torch"),
    ((1024, 8192, 32), {}, "sm90"),  # (m n + 2^17) k >= 2^28
    ((2048, 8192, 15), {}, "torch"),
    ((2048, 8192, 16), {}, "sm90"),
    ((1 << 20, 1023, 16), {}, "torch"),
    ((1 << 20, 1024, 16), {}, "sm90"),  # n n k = 2^24
    ((1 << 16, 2047, 32), {}, "torch"),
    ((1 << 16, 2049, 32), {}, "sm90"),  # n n k = 2^27
    ((1 << 16, 1023, 63), {}, "torch"),
    ((1 << 16, 1023, 64), {}, "sm90"),
    ((4096, 64, 16384), {}, "torch"),
    ((4096, 65, 16384), {}, "sm90"),
    ((4096, 128, 32767), {}, "sm90"),
    ((4096, 128, 32768), {}, "torch"),
    ((4096, 129, 32768), {}, "sm90"),
    ((110, 8192, 8192), GRADIENT, "torch"),
    ((111, 8192, 8192), GRADIENT, "sm90"),
    ((8192, 168, 4096), GRADIENT, "torch"),
    ((8192, 169, 4096), GRADIENT, "sm90"),
    ((2048, 1024, 256), GRADIENT, "torch"),
    ((8192, 1024, 256), GRADIENT, "sm90"),
    ((8192, 8192, 63), GRADIENT, "torch"),
    ((8192, 8192, 64), GRADIENT, "sm90"),
    ((65536, 1024, 127), GRADIENT, "torch"),
    ((65536, 1024, 128), GRADIENT, "sm90"),  # n k = 2^17
    ((64, 8192, 8192), {"vectors": False}, "torch"),
    ((65, 8192, 8192), {"vectors": False}, "sm90"),
    ((128, 511, 8192), {"vectors": False}, "torch"),
    ((128, 512, 8192), {"vectors": False}, "sm90"),  # m n = 2^16
    ((8192, 511, 256), {"vectors": False}, "torch"),
    ((8192, 512, 256), {"vectors": False}, "sm90"),  # n n k = 2^26
    ((512, 1024, 1638), {"vectors": False}, "torch"),
    ((512, 1024, 1639), {"vectors": False}, "sm90"),  # (m n + 2^17) k >= 2^30
    ((1024, 4096, 1024), {"capability": 80}, "sm80"),
    ((1024, 4096, 1024), {"capability": 100}, "sm80"),
    ((1024, 4096, 1023), {"capability": 80}, "torch"),
    ((1024, 4095, 1024), {"capability": 80}, "torch"),
    ((1024, 4096, 1024), {"capability": 86}, "torch"),
    ((1024, 4096, 1024), {"capability": 120}, "torch"),
    ((1024, 4096, 1024), {"capability": 80, **HIGH}, "torch"),
    ((1024, 8192, 8192), HIGH, "sm90"),
    ((512, 8192, 8192), HIGH, "torch"),
    ((1024, 8192, 1023), HIGH, "torch"),
    ((1024, 8192, 1024), HIGH, "sm90"),
    ((8192, 1024, 2559), HIGH, "torch"),
    ((8192, 1024, 2560), HIGH, "sm90"),  # m k (n - 768) = 5 * 2^30
    ((1 << 20, 768, 8192), HIGH, "torch"),
    ((2048, 2048, 4095), {**HIGH, **GRADIENT}, "torch"),
    ((2048, 2048, 4096), {**HIGH, **GRADIENT}, "sm90"),  # 10 * 2^30
    ((1024, 8192, 8192), HALF, "sm90"),
    ((1024, 8192, 1024), HALF, "sm90"),
    ((1024, 8192, 1023), HALF, "torch"),
    ((1024, 8192, 256), {**HALF, **GRADIENT}, "sm90"),
    ((1024, 8192, 255), {**HALF, **GRADIENT}, "torch"),
    ((1024, 4095, 8192), HALF, "torch"),
    ((1024, 4096, 8192), HALF, "sm90"),  # 64 tiles of 256 x 256 for 66 pairs
    ((1024, 4608, 8192), HALF, "torch"),  # 72: a second round
    ((1024, 4608, 8192), {"sms": 144, **HALF}, "sm90"),
    ((1024, 8192, 8192), {"capability": 80, **HALF}, "torch"),
    ((1024, 8192, 8192), {"bits": 64}, "torch"),
]


def test_every_line_of_the_table(paths_of):
    got = paths_of(problem(*sizes, **options) for sizes, options, _ in TABLE)
    wrong = [(*line, path) for line, path in zip(TABLE, got, strict=True) if line[2] != path]
    assert not wrong


def test_sizes_beyond_32_bits(paths_of):
    large = 1 << 31
    problems = [problem(large, 65, 4096), problem(1024, large, 1024, highest=False)]
    assert paths_of(problems) == ["sm90", "sm90"]
