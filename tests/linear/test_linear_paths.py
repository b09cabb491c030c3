"""The choice of a path for a product on a GPU: choose_path.h, compiled and run alone."""

import re

import pytest

from problems.benchmark.paths.choice import Gpu, chosen_paths
from problems.benchmark.paths.products import (
    FLOAT16,
    FORWARD,
    FORWARD_OF_TRANSPOSED_X,
    GRADIENT_OF_X,
    HIGH,
    HIGHEST,
    Product,
)
from problems.benchmark.tree import ROOT

H200 = Gpu(capability=90, multiprocessors=132)
FLOAT64 = ("float64", "")
LARGE = (4096, 8192, 8192)
# Operation, setting, sizes (M, N, K), and the expected path. The sizes are far from the limits so
# that these can change in choose_path.h alone.
ON_H200 = [
    (FORWARD, HIGHEST, LARGE, "sm90"),
    (FORWARD, HIGH, LARGE, "sm90"),
    (FORWARD, FLOAT16, LARGE, "sm90"),
    (FORWARD, FLOAT64, LARGE, "torch"),
    (FORWARD_OF_TRANSPOSED_X, HIGH, LARGE, "sm90"),
    (GRADIENT_OF_X, HIGHEST, LARGE, "sm90"),
    (GRADIENT_OF_X, FLOAT16, LARGE, "sm90"),
    # few rows
    (FORWARD, HIGHEST, (1, 4096, 4096), "skinny"),
    (FORWARD, HIGH, (1, 4096, 4096), "skinny"),
    (FORWARD, FLOAT16, (1, 4096, 4096), "torch"),
    (GRADIENT_OF_X, HIGHEST, (1, 4096, 4096), "torch"),
    (FORWARD, HIGHEST, (32, 512, 1024), "skinny"),
    (FORWARD, HIGH, (32, 512, 1024), "torch"),
    # rows of the weight that are not aligned
    (FORWARD, HIGHEST, (4096, 8192, 8190), "sm90"),
    (FORWARD, HIGHEST, (1, 4096, 4094), "torch"),
    # few terms
    (FORWARD, HIGHEST, (4096, 8192, 8), "torch"),
    (GRADIENT_OF_X, HIGHEST, (64, 8192, 128), "torch"),
    # few features
    (FORWARD, HIGHEST, (4096, 16, 8192), "torch"),
    (FORWARD_OF_TRANSPOSED_X, HIGH, (1024, 1024, 8192), "torch"),
    (FORWARD, FLOAT16, (128, 128, 8192), "torch"),
    # 72 tiles of 256 x 256 for 66 clusters: a second wave
    (FORWARD, FLOAT16, (1024, 4608, 8192), "torch"),
    # sizes beyond 32 bits
    (FORWARD, HIGHEST, (1 << 31, 256, 4096), "sm90"),
    (FORWARD, HIGH, (1024, 1 << 31, 1024), "sm90"),
]
# GPU, setting, sizes, and the expected path of a forward.
ON_OTHER_GPUS = [
    (Gpu(90, 144), FLOAT16, (1024, 4608, 8192), "sm90"),  # 72 clusters: one wave
    (Gpu(80, 108), HIGHEST, LARGE, "sm80"),
    (Gpu(80, 108), HIGH, LARGE, "torch"),
    (Gpu(80, 108), FLOAT16, LARGE, "torch"),
    (Gpu(80, 108), HIGHEST, (1, 4096, 4096), "torch"),
    (Gpu(86, 84), HIGHEST, LARGE, "torch"),
    (Gpu(100, 148), HIGHEST, LARGE, "torch"),
]


def product(operation, setting, sizes):
    """Return a product; `setting` is a dtype with a precision."""
    return Product("", operation, *setting, *sizes)


def test_each_product_takes_the_expected_path_on_an_h200():
    got = chosen_paths([product(*row) for *row, _ in ON_H200], H200)
    wrong = [(*row, path) for row, path in zip(ON_H200, got, strict=True) if row[-1] != path]
    assert wrong == []


@pytest.mark.parametrize(("gpu", "setting", "sizes", "expected"), ON_OTHER_GPUS)
def test_a_forward_takes_the_expected_path_on_another_gpu(gpu, setting, sizes, expected):
    assert chosen_paths([product(FORWARD, setting, sizes)], gpu) == [expected]


@pytest.mark.parametrize(
    "title, operation", [("Forwards:", FORWARD), ("Gradients of x, ", GRADIENT_OF_X)]
)
def test_the_examples_in_design_are_right(title, operation):
    """A row of a table is `| M, N, K | path | path | path |`: at highest, high, in half types."""
    text = (ROOT / "docs" / "DESIGN.md").read_text()
    _, _, text = text.partition(f"\n{title}")
    _, table, *_ = text.split("\n\n", 2)
    rows = re.findall(r"^\| (\d+), (\d+), (\d+) \| (\w+) \| (\w+) \| (\w+) \|$", table, re.M)
    assert len(rows) >= 5
    products = [
        product(operation, setting, map(int, sizes))
        for *sizes, _, _, _ in rows
        for setting in (HIGHEST, HIGH, FLOAT16)
    ]
    stated = [path for row in rows for path in row[3:]]
    assert chosen_paths(products, H200) == stated
