"""Products of many sizes, for `path-grid`.

The limits of kernels/linear/operator/choose_path.h are fitted to their times. So the sizes range
from those that only torch wins to those that only our kernels win.
"""

import itertools
from dataclasses import dataclass

from problems.benchmark.paths.products import (
    FLOAT16,
    FORWARD,
    FORWARD_OF_TRANSPOSED_X,
    GRADIENT_OF_WEIGHT,
    GRADIENT_OF_X,
    HIGH,
    HIGHEST,
    Product,
)

# Larger products are left out, because they take long and are far from every limit.
MOST_ELEMENTS = 2**28  # of x, of the weight, and of out
MOST_MULTIPLICATIONS = 2**37
MOST_MULTIPLICATIONS_AT_HIGHEST = 2**35


@dataclass(frozen=True)
class Sizes:
    """The products of each of the M with each of the N and each of the K."""

    m: tuple[int, ...]
    n: tuple[int, ...]
    k: tuple[int, ...]


_GRADIENT_SIZES = {
    HIGHEST: Sizes(
        m=(16, 32, 64, 128, 256, 512, 2048, 8192, 32768),
        n=(16, 32, 64, 128, 256, 512, 2048, 8192),
        k=(32, 64, 128, 256, 1024, 4096),
    ),
    HIGH: Sizes(
        m=(128, 512, 1024, 2048, 8192),
        n=(512, 1024, 2048, 4096, 8192),
        k=(256, 512, 1024, 2048, 4096, 8192),
    ),
    FLOAT16: Sizes(
        m=(256, 512, 1024, 2048, 4096, 8192),
        n=(512, 1024, 2048, 3072, 4096, 5120, 8192),
        k=(128, 256, 1024, 4096),
    ),
}

# For each operation and setting, the sizes of its products.
_SIZES = {
    (FORWARD, HIGHEST): [
        # The rows of the weight are aligned to 16 bytes.
        Sizes(
            m=(2, 8, 12, 16, 24, 32, 64, 128, 256, 512, 1024, 2048, 4096, 16384, 65536),
            n=(4, 8, 16, 32, 64, 96, 128, 256, 512, 1024, 2048, 4096, 16384),
            k=(16, 64, 128, 256, 512, 1024, 4096, 16384),
        ),
        # They are not, so the weight is copied first.
        Sizes(
            m=(16, 32, 64, 128, 512, 2048, 8192),
            n=(16, 64, 128, 512, 2048, 8192),
            k=(62, 254, 1022, 4094, 16382),
        ),
        # The rows of out are not aligned.
        Sizes(m=(64, 512, 4096, 16384), n=(66, 258, 1026, 4098), k=(16, 44, 64, 256)),
    ],
    (FORWARD, HIGH): [
        Sizes(
            m=(8, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
            n=(128, 512, 1024, 1536, 2048, 4096, 8192, 16384),
            k=(256, 512, 1024, 2048, 4096, 8192),
        )
    ],
    (FORWARD_OF_TRANSPOSED_X, HIGH): [
        Sizes(m=(512, 1024, 4096), n=(1024, 2048, 8192), k=(1024, 4096)),
    ],
    (FORWARD, FLOAT16): [
        Sizes(
            m=(256, 512, 1024, 2048, 4096, 8192),
            n=(512, 1024, 2048, 3072, 4096, 5120, 8192),
            k=(256, 512, 1024, 4096),
        )
    ],
    (GRADIENT_OF_X, HIGHEST): [_GRADIENT_SIZES[HIGHEST]],
    (GRADIENT_OF_X, HIGH): [_GRADIENT_SIZES[HIGH]],
    (GRADIENT_OF_X, FLOAT16): [_GRADIENT_SIZES[FLOAT16]],
    (GRADIENT_OF_WEIGHT, HIGHEST): [_GRADIENT_SIZES[HIGHEST]],
    (GRADIENT_OF_WEIGHT, HIGH): [_GRADIENT_SIZES[HIGH]],
    (GRADIENT_OF_WEIGHT, FLOAT16): [_GRADIENT_SIZES[FLOAT16]],
}


def _is_small_enough(product: Product) -> bool:
    """Return whether the product is within the limits above."""
    m, n, k = product.m, product.n, product.k
    is_at_highest = product.precision == "highest"
    most = MOST_MULTIPLICATIONS_AT_HIGHEST if is_at_highest else MOST_MULTIPLICATIONS
    return max(m * k, n * k, m * n) <= MOST_ELEMENTS and product.multiplications <= most


def _products() -> list[Product]:
    """Return the products of all sizes in `_SIZES` that are small enough."""
    found = []
    for (operation, (dtype, precision)), grids in _SIZES.items():
        for sizes in grids:
            for m, n, k in itertools.product(sizes.m, sizes.n, sizes.k):
                found.append(Product("", operation, dtype, precision, m, n, k))
    return [product for product in found if _is_small_enough(product)]


PRODUCTS = _products()
