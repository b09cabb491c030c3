"""`python -m problems.benchmark path-grid`: its products, times and table."""

import json
import re

import pytest
import torch

from problems.benchmark import command, pages, views
from problems.benchmark.clock import CpuClock
from problems.benchmark.paths import grid, measure_path_grid, path_calls, products
from problems.benchmark.paths.choose_again import GPUS
from problems.benchmark.paths.grid_rows import NOT_TIMED, TimedProduct, as_row, read_row
from problems.benchmark.paths.grid_table import path_grid_table
from problems.benchmark.paths.products import Product
from referee.report import markdown
from tests.support.processes import ROOT


def made_up(product: Product, chosen: str, cold: dict, warm: dict) -> TimedProduct:
    """Return a product with made-up microseconds of each path."""
    return TimedProduct(product, chosen, {"cold": cold, "warm": warm})


def forward(m: int, n: int, k: int) -> Product:
    """Return a forward in float32 at `highest`."""
    return Product("", products.FORWARD, *products.HIGHEST, m, n, k)


# The first product was not timed on its chosen path, so the table leaves it out. The rows of the
# weight are aligned in the second and the third product, but not in the fourth.
FORWARDS = [
    made_up(
        forward(8, 16384, 16384),
        "skinny",
        {"sm90": 900.0, "torch": 800.0},
        {"sm90": 900.0, "torch": 800.0},
    ),
    made_up(
        forward(16, 64, 64),
        "skinny",
        {"skinny": 10.0, "sm90": 5.0, "torch": 20.0},
        {"skinny": 4.13, "sm90": 8.0, "torch": 4.0},
    ),
    made_up(
        forward(512, 512, 512),
        "sm90",
        {"skinny": 40.0, "sm90": 10.0, "torch": 80.0},
        {"skinny": 40.0, "sm90": 10.0, "torch": 40.0},
    ),
    made_up(
        forward(64, 64, 62),
        "torch",
        {"skinny": 40.0, "sm90": 5.0, "torch": 10.0},
        {"skinny": 40.0, "sm90": 30.0, "torch": 10.0},
    ),
]
GRADIENTS = [
    made_up(
        Product("", products.GRADIENT_OF_X, *products.FLOAT16, 256, 512, 128),
        "sm90",
        {"sm90": 10.4, "torch": 10.0},
        {"sm90": 10.2, "torch": 10.0},
    )
]
FORWARDS_ROW = {
    "operation": "forward",
    "dtype": "float32",
    "precision": "highest",
    "columns": "M N K chosen skinny_cold_us sm90_cold_us torch_cold_us "
    "skinny_warm_us sm90_warm_us torch_warm_us",
    "products": [
        "8 16384 16384 skinny - 900.00 800.00 - 900.00 800.00",
        "16 64 64 skinny 10.00 5.00 20.00 4.13 8.00 4.00",
        "512 512 512 sm90 40.00 10.00 80.00 40.00 10.00 40.00",
        "64 64 62 torch 40.00 5.00 10.00 40.00 30.00 10.00",
    ],
}
TABLE = """\
product | rows of the weight | products | torch / chosen, cold | torch / best, cold | slower, cold \
| torch / chosen, warm | torch / best, warm | slower, warm
forward, float32, highest | aligned | 2 | 4.000 | 5.657 | 0 | 1.968 | 2.000 | 1
forward, float32, highest | not aligned | 1 | 1.000 | 2.000 | 0 | 1.000 | 1.000 | 0
gradient of x, float16 |  | 1 | 0.962 | 1.000 | 1 | 0.980 | 1.000 | 0
"""
CELLS = [line.split(" | ") for line in TABLE.splitlines()]


def test_a_row_has_a_line_for_each_product_and_is_read_back():
    assert as_row(FORWARDS) == FORWARDS_ROW
    assert as_row(GRADIENTS)["products"] == ["256 512 128 sm90 10.40 10.00 10.20 10.00"]
    for all_timed in (FORWARDS, GRADIENTS):
        assert read_row(as_row(all_timed)) == all_timed


def test_the_table_compares_the_chosen_path_and_the_fastest_with_torch():
    rows = [as_row(FORWARDS), as_row(GRADIENTS)]
    assert path_grid_table(rows) == CELLS
    results = {
        "benchmark": "path-grid",
        "command": "c",
        "commit": "abc",
        "date": "2026-01-02T03:04:05",
        "environment": {"device": "a GPU", "threads": None, "torch": "2", "cuda": "13.0"},
        "rows": rows,
    }
    heading, table = views.view_table([results]).split("\n\n")
    assert heading == "a GPU, torch 2, CUDA 13.0; `c`; commit abc, 2026-01-02"
    assert table == markdown.table(CELLS)


def test_the_products_of_the_grid_are_unique_and_not_too_large():
    assert len(set(grid.PRODUCTS)) == len(grid.PRODUCTS)
    for product in grid.PRODUCTS:
        m, n, k = product.m, product.n, product.k
        assert max(m * n, m * k, n * k) <= 2**28
        assert product.multiplications <= (2**35 if product.precision == "highest" else 2**37)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_tiny_grid_is_timed_on_each_path(device, monkeypatch, tmp_path, capsys):
    """On a CPU, torch computes the products of all paths, and both clocks are the CPU's."""
    if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    if device == "cpu":
        monkeypatch.setattr(measure_path_grid, "CudaClock", lambda device: CpuClock())
        monkeypatch.setattr(measure_path_grid, "WarmCudaClock", CpuClock)
        monkeypatch.setattr(path_calls, "current_gpu", lambda: GPUS["NVIDIA H200"])
        monkeypatch.setattr(command, "check_device", lambda what, device: None)
        monkeypatch.setitem(
            command.WITHOUT_OPTIONS,
            "path-grid",
            lambda: measure_path_grid.measure_path_grid("cpu"),
        )
    made = [
        forward(24, 40, 16),
        forward(24, 40, 32),
        Product("", products.GRADIENT_OF_WEIGHT, *products.FLOAT16, 24, 40, 16),
    ]
    monkeypatch.setattr(grid, "PRODUCTS", made)
    most = made[0].multiplications
    monkeypatch.setattr(measure_path_grid, "MOST_MULTIPLICATIONS_OF_SKINNY", most)

    path = tmp_path / "path-grid.json"
    assert command.main(["path-grid", "--device", device, "--json", str(path)]) == 0

    forwards, gradients = json.loads(path.read_text())["rows"]
    found = read_row(forwards) + read_row(gradients)
    assert [timed.product for timed in found] == made
    paths = [{"skinny", "sm90", "torch"}, {"sm90", "torch"}, {"sm90", "torch"}]
    for timed, paths_of_product in zip(found, paths, strict=True):
        for state in ("cold", "warm"):
            times = timed.microseconds[state]
            assert set(times) == paths_of_product
            assert min(times.values()) > 0
    assert forwards["products"][1].count(f" {NOT_TIMED} ") == 2
    assert "torch / chosen, cold" in capsys.readouterr().out
    assert torch.get_float32_matmul_precision() == "highest"


# ------------------------------------------------------------------------------- choose-again


@pytest.fixture
def results(monkeypatch, tmp_path):
    """Return the path of a copy of the stored results, in which every chosen path is "torch"."""
    text = (pages.RESULTS / pages.PATH_GRID).read_text()
    path = tmp_path / pages.PATH_GRID
    path.write_text(re.sub(r"^( +\"\d+ \d+ \d+) \w+", r"\1 torch", text, flags=re.MULTILINE))
    assert path.read_text() != text
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    monkeypatch.setattr(pages, "make_pages", lambda: None)
    return path


def test_the_stored_results_have_the_choices_of_the_present_limits(results):
    stored = (ROOT / "docs" / "benchmarks" / pages.PATH_GRID).read_text()
    assert command.main(["choose-again"]) == 0
    assert results.read_text() == stored


def test_results_of_an_unknown_gpu_get_no_choices(results):
    results.write_text(results.read_text().replace("NVIDIA H200", "a GPU"))
    with pytest.raises(ValueError, match="has no a GPU"):
        command.main(["choose-again"])
