"""`python -m problems.benchmark paths`: its products, times and tables."""

import re

import pytest
import torch

from model_new import linear_ops
from problems.benchmark import command, rounds, views
from problems.benchmark.paths import measure_paths, path_calls, products, products_table
from problems.benchmark.paths.choice import chosen_paths
from problems.benchmark.paths.choose_again import GPUS
from problems.benchmark.tables import TABLES
from referee.report import markdown
from tests.support.processes import KERNELS

H200 = GPUS["NVIDIA H200"]
# Two results of `paths`. The first chosen path is not good. The second is good, although it is not
# the fastest.
ROWS = [
    {
        "limit": "skinny_wins",
        "operation": "forward",
        "dtype": "float32",
        "precision": "highest",
        "m": 8,
        "n": 16384,
        "k": 256,
        "seconds": {"skinny": 1.2e-5, "sm90": 3e-5, "torch": 1e-5},
        "chosen": "skinny",
    },
    {
        "limit": "kLeastHalfGradient",
        "operation": "gradient of x",
        "dtype": "float16",
        "precision": "",
        "m": 4096,
        "n": 2048,
        "k": 192,
        "seconds": {"sm90": 2e-5, "torch": 2.05e-5},
        "chosen": "torch",
    },
]
TABLE = """\
product | limit | M | N | K | skinny, us | sm90, us | torch, us | chosen | chosen / best
forward, float32, highest | skinny_wins | 8 | 16384 | 256 | 12.0 | 30.0 | 10.0 | skinny | 1.200
gradient of x, float16 | kLeastHalfGradient | 4096 | 2048 | 192 |  | 20.0 | 20.5 | torch | 1.025
"""
CELLS = [line.split(" | ") for line in TABLE.splitlines()]
SUMMARY = (
    "The chosen path took at most 3% longer than the fastest path for 1 of 2 products. For 0 of "
    "the other 1, torch was chosen. The largest chosen / best was 1.200, for forward, float32, "
    "highest, M 8, N 16384, K 256: skinny was chosen, and torch was the fastest."
)


def test_the_table_and_the_summary_of_paths_compare_the_chosen_path_with_the_fastest():
    assert TABLES["paths"](ROWS) == CELLS
    assert products_table.summary(ROWS) == SUMMARY


def test_a_page_shows_the_worst_choices_that_are_not_good(monkeypatch):
    environment = {"device": "a GPU", "threads": None, "torch": "2", "cuda": "13.0"}
    results = {
        "command": "c",
        "commit": "abc",
        "date": "2026-01-02T03:04:05",
        "environment": environment,
        "rows": ROWS,
    }
    text = views.view_paths([results])
    heading, summary, table = text.split("\n\n")
    assert heading == "a GPU, torch 2, CUDA 13.0; `c`; commit abc, 2026-01-02"
    assert summary == SUMMARY
    assert table == markdown.table(CELLS[:2])

    monkeypatch.setattr(products_table, "EXCEPTIONS", 1)
    slower = {**ROWS[0], "seconds": {"skinny": 2e-5, "torch": 1e-5}, "m": 4}
    [_, shown] = products_table.exceptions_table([*ROWS, slower])
    assert shown[2:5] == ["4", "16384", "256"]


@pytest.mark.parametrize("operation", products.OPERATIONS)
def test_a_call_computes_a_product_of_the_right_size(operation):
    product = products.Product("", operation, "float32", "highest", m=24, n=40, k=16)
    call, operand = path_calls._make_call(linear_ops, product, "cpu")
    found = call(operand)
    results = [found] if product.is_forward else found
    assert [list(result.shape) for result in results if result.numel() > 0] == [[24, 40]]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_each_path_of_each_kind_of_product_is_timed(device, monkeypatch):
    """On a CPU, torch computes the products of all paths."""
    if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    settings = [products.HIGHEST, products.HIGH, products.BFLOAT16]
    made = [
        products.Product("", operation, dtype, precision, 24, 40, 16)
        for operation in products.OPERATIONS
        for dtype, precision in settings
    ]
    monkeypatch.setattr(products, "PRODUCTS", made)
    monkeypatch.setattr(rounds, "ROUNDS", 3)
    monkeypatch.setattr(path_calls, "current_gpu", lambda: H200)
    rows = measure_paths.measure_paths(device)
    assert [row["operation"] for row in rows] == [product.operation for product in made]
    for row in rows:
        has_skinny = "forward" in row["operation"] and row["dtype"] == "float32"
        assert ("skinny" in row["seconds"]) == has_skinny
        assert {"sm90", "torch", row["chosen"]} <= row["seconds"].keys()
        assert min(row["seconds"].values()) > 0
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("what", command.NEEDS_HOPPER)
def test_the_measurements_of_paths_need_a_gpu(what, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main([what, "--device", "cpu"])
    assert f"error: {what} needs a CUDA GPU of compute capability 9.0" in capsys.readouterr().err


def test_the_products_that_paths_times_are_on_both_sides_of_each_limit():
    """If a limit moves beyond them, _PAIRS of paths/products.py needs other sizes."""
    path_of = dict(zip(products.PRODUCTS, chosen_paths(products.PRODUCTS, H200), strict=True))
    pairs = zip(products.PRODUCTS[::2], products.PRODUCTS[1::2], strict=True)
    assert [pair for pair in pairs if path_of[pair[0]] == path_of[pair[1]]] == []


def test_the_limits_that_paths_names_are_in_choose_path():
    text = (KERNELS / "linear" / "operator" / "choose_path.h").read_text()
    names = set(re.findall(r"\w+", text))
    assert {product.limit for product in products.PRODUCTS} <= names
