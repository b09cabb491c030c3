"""The choice of a path for a product on a GPU: choose_path.h, compiled and run alone."""

import re

import pytest

from problems.benchmark import choice
from problems.benchmark.tree import ROOT
from tests.support.processes import compiled

# Reads products and prints the path of each. A product is the ten numbers that `product` returns.
PROGRAM = choice.SOURCE.read_text()


@pytest.fixture(scope="module")
def paths_of(tmp_path_factory):
    flags = ["-Wall", "-Wextra", "-Werror"]
    program = compiled(tmp_path_factory.mktemp("paths"), PROGRAM, "c++", *flags)

    def call(products):
        text = "\n".join(" ".join(map(str, map(int, product))) for product in products)
        return program(text=text)

    return call


def product(
    m,
    n,
    k,
    bits=32,
    highest=True,
    forward=True,
    vectors=True,
    transposed=False,
    capability=90,
    sms=132,
):
    """Return the numbers that PROGRAM reads, in its order.

    Args:
        m: the rows of x.
        n: the rows of weight.
        k: the columns of both.
        bits: the bits of the dtype.
        highest: whether the precision is `highest`.
        forward: whether it is a forward, not a gradient.
        vectors: whether the rows of weight can be read as vectors.
        transposed: whether x is transposed.
        capability: the GPU's compute capability.
        sms: the GPU's multiprocessors.
    """
    return bits, highest, m, n, k, forward, vectors, transposed, capability, sms


HIGH = {"highest": False}
HALF = {"bits": 16}
GRADIENT = {"forward": False}
COLUMNS = {"vectors": False}
LARGE = (4096, 8192, 8192)
# Sizes, options, and the expected path. The sizes are far from the limits so that these can change
# in choose_path.h alone.
TABLE = [
    (LARGE, {}, "sm90"),
    (LARGE, HIGH, "sm90"),
    (LARGE, HIGH | {"transposed": True}, "sm90"),
    (LARGE, HALF, "sm90"),
    (LARGE, GRADIENT, "sm90"),
    (LARGE, GRADIENT | HALF, "sm90"),
    (LARGE, COLUMNS, "sm90"),
    (LARGE, {"bits": 64}, "torch"),
    (LARGE, {"capability": 80}, "sm80"),
    (LARGE, {"capability": 80} | HIGH, "torch"),
    (LARGE, {"capability": 80} | HALF, "torch"),
    (LARGE, {"capability": 86}, "torch"),
    (LARGE, {"capability": 100}, "torch"),
    ((1, 4096, 4096), {}, "skinny"),
    ((1, 4096, 4096), HIGH, "skinny"),
    ((1, 4096, 4096), HALF, "torch"),
    ((1, 4096, 4096), GRADIENT, "torch"),
    ((1, 4096, 4096), COLUMNS, "torch"),
    ((1, 4096, 4096), {"capability": 80}, "torch"),
    ((32, 512, 1024), {}, "skinny"),
    ((32, 512, 1024), HIGH, "torch"),
    ((4096, 8192, 8), {}, "torch"),  # few terms
    ((64, 8192, 128), GRADIENT, "torch"),
    ((4096, 16, 8192), {}, "torch"),  # few features
    ((1024, 1024, 8192), HIGH | {"transposed": True}, "torch"),
    ((128, 128, 8192), HALF, "torch"),
    ((1024, 4608, 8192), HALF, "torch"),  # 72 tiles of 256 x 256 for 66 clusters: a second wave
    ((1024, 4608, 8192), HALF | {"sms": 144}, "sm90"),
]


def test_each_product_of_the_table_takes_the_expected_path(paths_of):
    got = paths_of(product(*sizes, **options) for sizes, options, _ in TABLE)
    wrong = [(*line, path) for line, path in zip(TABLE, got, strict=True) if line[2] != path]
    assert wrong == []


def test_sizes_beyond_32_bits_are_handled(paths_of):
    large = 1 << 31
    products = [product(large, 256, 4096), product(1024, large, 1024, highest=False)]
    assert paths_of(products) == ["sm90", "sm90"]


@pytest.mark.parametrize(
    "title, options", [("Forwards:", {}), ("Gradients of x, ", GRADIENT | COLUMNS)]
)
def test_the_examples_in_design_are_right(title, options, paths_of):
    """A row of a table is `| M, N, K | path | path | path |`: at highest, high, in half types."""
    text = (ROOT / "docs" / "DESIGN.md").read_text()
    _, _, text = text.partition(f"\n{title}")
    _, table, *_ = text.split("\n\n", 2)
    rows = re.findall(r"^\| (\d+), (\d+), (\d+) \| (\w+) \| (\w+) \| (\w+) \|$", table, re.M)
    assert len(rows) >= 5
    products = [
        product(*map(int, sizes), **options, **setting)
        for *sizes, _, _, _ in rows
        for setting in ({}, HIGH, HALF)
    ]
    stated = [path for row in rows for path in row[3:]]
    assert paths_of(products) == stated
