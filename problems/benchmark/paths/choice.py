"""The path that kernels/linear/operator/choose_path.h takes for a product.

That file needs neither torch nor a GPU. So a small program, print_paths.cpp, is compiled from it
alone.
"""

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kernels.build.toolchain import cxx_compiler
from problems.benchmark.paths.products import Product
from problems.benchmark.tree import ROOT

SOURCE = Path(__file__).with_name("print_paths.cpp")
BITS = {"float64": 64, "float32": 32, "float16": 16, "bfloat16": 16}


@dataclass(frozen=True)
class Gpu:
    """A GPU, as choose_path knows it.

    Attributes:
        capability: the compute capability times 10, 90 for Hopper.
        multiprocessors: how many the GPU has.
    """

    capability: int
    multiprocessors: int


def chosen_paths(products: list[Product], gpu: Gpu) -> list[str]:
    """Return the path of each product on a GPU: "skinny", "sm90", "sm80" or "torch"."""
    lines = [_line(product, gpu) for product in products]
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "print_paths")
        include = f"-I{ROOT / 'kernels'}"
        subprocess.run([cxx_compiler(), "-std=c++17", include, SOURCE, "-o", program], check=True)
        return subprocess.check_output([program], input="\n".join(lines), text=True).split()


def _line(product: Product, gpu: Gpu) -> str:
    """Return the ten numbers that print_paths.cpp reads, in its order."""
    numbers = [
        BITS[product.dtype],
        product.precision == "highest",
        product.m,
        product.n,
        product.k,
        product.is_forward,
        product.weight_has_vector_rows,
        product.x_is_transposed,
        gpu.capability,
        gpu.multiprocessors,
    ]
    return " ".join(str(int(number)) for number in numbers)
