"""Products on both sides of the limits of kernels/linear/operator/choose_path.h, for `paths`.

`path-grid` times other products, those of grid.py.

A product is out [M, N] = x [M, K] times weight [N, K] transposed, as in choose_path.h.
"""

from dataclasses import dataclass

FORWARD = "forward"
FORWARD_OF_TRANSPOSED_X = "forward, transposed x"
# A gradient is a product too: of grad_z, the gradient of the ReLU's input, and one operand.
GRADIENT_OF_X = "gradient of x"  # grad_z times the weight
GRADIENT_OF_WEIGHT = "gradient of weight"  # grad_z transposed times x
OPERATIONS = [FORWARD, FORWARD_OF_TRANSPOSED_X, GRADIENT_OF_X, GRADIENT_OF_WEIGHT]

# dtype and precision
HIGHEST = ("float32", "highest")
HIGH = ("float32", "high")
FLOAT16 = ("float16", "")
BFLOAT16 = ("bfloat16", "")


@dataclass(frozen=True)
class Product:
    """A product to time.

    Attributes:
        limit: the name of the limit in choose_path.h that the product is near; "" if it is one of
            grid.py.
        operation: what the product is for, one of `OPERATIONS`.
        dtype: "float32", "float16" or "bfloat16"; in tests also "float64".
        precision: "highest" or "high"; "" for half types.
        m: rows of x, and of out.
        n: rows of the weight, columns of out.
        k: columns of x and of the weight.
    """

    limit: str
    operation: str
    dtype: str
    precision: str
    m: int
    n: int
    k: int

    @property
    def multiplications(self) -> int:
        """The number of times that an element of x is multiplied by one of the weight."""
        return self.m * self.n * self.k

    @property
    def is_forward(self) -> bool:
        """False for a gradient."""
        return self.operation in (FORWARD, FORWARD_OF_TRANSPOSED_X)

    @property
    def x_is_transposed(self) -> bool:
        """As `Product` of choose_path.h explains it."""
        return self.operation in (FORWARD_OF_TRANSPOSED_X, GRADIENT_OF_WEIGHT)

    @property
    def weight_has_vector_rows(self) -> bool:
        """As `Product` of choose_path.h explains it. A gradient's second operand is transposed."""
        vector_elements = 4 if self.dtype == "float32" else 8
        return self.is_forward and self.k % vector_elements == 0


# For each operation and setting: a limit, and two sizes (M, N, K), one on each side of it, the
# first for our kernel. For the two, choose_path returns different paths on an H200.
# tests/benchmark/test_benchmark_paths.py checks this.
#
# A comment of a group has the inequality of choose_path.h that the first size of a pair satisfies
# and the second does not. A comment of a pair has its left side for both sizes. A limit without an
# inequality here is a limit of M, N or K alone.
_PAIRS = {
    (FORWARD, HIGHEST): [
        # skinny_wins:
        #   ceil(M / 16) ceil(N / 32) tiles <= 132 multiprocessors times 4, 2 or 1: 528, 264 or 132
        #   M max(N, 32) K multiplications <= 2^28
        ("skinny_wins", (8, 16896, 256), (8, 17408, 256)),  # 528, 544 tiles
        ("skinny_wins", (8, 20480, 512), (8, 20480, 448)),  # K
        ("skinny_wins", (16, 16384, 512), (16, 16384, 448)),  # K
        ("skinny_wins", (16, 8192, 256), (16, 8704, 256)),  # 256, 272 tiles
        ("skinny_wins", (16, 8192, 256), (16, 8192, 192)),  # K
        ("skinny_wins", (32, 4096, 256), (32, 4096, 192)),  # K
        ("skinny_wins", (32, 2048, 128), (32, 2304, 128)),  # 128, 144 tiles
        ("skinny_wins", (32, 4096, 2048), (32, 4096, 2304)),  # 2^28, 1.1 * 2^28 multiplications
        ("skinny_wins", (4096, 16, 2048), (4096, 16, 2304)),  # the same, by max(N, 32)
        # sm90_fp16x3_wins, and sm90_fp16x3_forward_wins for a weight that is not copied:
        #   (M (N - 112) + 2^17) K >= 3 * 2^26 = 201.3 million, in millions
        ("kLeastKAtHighest", (16384, 1024, 16), (16384, 1024, 12)),
        ("kTooFewRows", (20, 16384, 1024), (16, 16384, 1024)),
        ("kTooFewColumns", (2048, 68, 8192), (2048, 64, 8192)),
        ("kUncountedColumns", (8192, 144, 512), (8192, 140, 512)),  # 201.3, 184.5
        ("kAddedElements", (64, 4096, 528), (64, 4096, 512)),  # 203.8, 197.7
        ("kLeastWork", (512, 1024, 352), (512, 1024, 320)),  # 210.5, 191.4
        ("kLeastWork", (3328, 1024, 64), (3072, 1024, 64)),  # 202.6, 187.7
        # sm90_fp16x3_forward_wins for a weight with unaligned rows, which is copied:
        #   M (N - 112) K >= 2^29, in units of 2^29
        ("kLeastWorkForCopy", (68, 8192, 1022), (64, 8192, 1022)),  # 1.05, 0.98
        ("kLeastWorkForCopy", (1024, 1024, 606), (1024, 1024, 574)),  # 1.05, 0.998
        ("kLeastWorkForCopy", (8192, 256, 478), (8192, 256, 446)),  # 1.05, 0.98
    ],
    # sm90_fp16x3_gradient_wins: N K >= 2^17 (kLeastWeight), and for the costs
    #   M N - 150 M - 100 N - 2^29 / (K - 40) >= 0, in thousands
    (GRADIENT_OF_X, HIGHEST): [
        ("kLeastKOfFp16x3Gradient", (8192, 4096, 64), (8192, 4096, 56)),
        ("kLeastWeight", (32768, 256, 512), (32768, 256, 448)),  # 2^17, 0.9 * 2^17 elements
        ("kRowCost", (8192, 192, 4096), (8192, 160, 4096)),  # +192, -66
        ("kColumnCost", (128, 8192, 4096), (112, 8192, 4096)),  # +78, -51
        ("kCallCost", (1536, 2048, 256), (1280, 2048, 256)),  # +225, -261
    ],
    (GRADIENT_OF_WEIGHT, HIGHEST): [
        ("kRowCost", (8192, 192, 4096), (8192, 160, 4096)),  # +192, -66
        ("kColumnCost", (128, 8192, 4096), (112, 8192, 4096)),  # +78, -51
    ],
    (FORWARD, HIGH): [
        # skinny_wins, as above
        ("skinny_wins", (8, 16896, 256), (8, 17408, 256)),  # 528, 544 tiles
        ("skinny_wins", (8, 4096, 4096), (9, 4096, 4096)),  # M
        # sm90_one_product_wins, and sm90_one_product_wins_float32: our time / torch's <= 1
        ("kLeastKOfOneProduct", (8192, 8192, 256), (8192, 8192, 224)),
        ("kConversionPerElement", (704, 16384, 4096), (672, 16384, 4096)),  # 0.97, 1.02
        ("kConversionPerElement", (8192, 864, 4096), (8192, 832, 4096)),  # 0.99, 1.03
        ("kStart", (2048, 2048, 1280), (2048, 2048, 1152)),  # 0.997, 1.02
        ("wave_utilization", (1024, 6400, 8192), (1024, 6336, 8192)),  # 0.995, 1.002
    ],
    (FORWARD_OF_TRANSPOSED_X, HIGH): [
        ("kCopyPerElement", (4096, 1664, 4096), (4096, 1600, 4096)),  # 0.97, 1.01
    ],
    (GRADIENT_OF_X, HIGH): [
        ("kStart", (2048, 2048, 2560), (2048, 2048, 2432)),  # 0.997, 1.01
        ("kConversionPerElement", (8192, 1024, 2048), (8192, 960, 2048)),  # 0.96, 1.02
    ],
    (GRADIENT_OF_WEIGHT, HIGH): [
        ("kCopyPerElement", (4096, 1920, 2048), (4096, 1856, 2048)),  # 0.97, 1.001
    ],
    # sm90_one_product_wins, and sm90_one_product_wins_half: utilization >= K / (K + 640) in a
    # forward, and >= 0.9 in a gradient, where M N >= 3 * 2^22 (kLeastHalfGradient)
    (FORWARD, FLOAT16): [
        ("kLeastKOfOneProduct", (2048, 4096, 256), (2048, 4096, 224)),
        ("kPassAsK", (512, 5376, 1024), (512, 5120, 1024)),  # 0.636, 0.606; limit 0.615
        ("kPassAsK", (1024, 7424, 4096), (1024, 7296, 4096)),  # 0.879, 0.864; limit 0.865
    ],
    (FORWARD, BFLOAT16): [
        ("kPassAsK", (1024, 7424, 4096), (1024, 7296, 4096)),  # 0.879, 0.864; limit 0.865
    ],
    (GRADIENT_OF_X, FLOAT16): [
        ("kLeastKOfOneProduct", (4096, 4096, 256), (4096, 4096, 224)),
        ("kLeastHalfGradient", (4096, 3072, 1024), (4096, 2816, 1024)),  # 3 * 2^22, 2.75 * 2^22
        ("kLeastUtilizationOfGradient", (2048, 7680, 4096), (2048, 7552, 4096)),  # 0.909, 0.894
    ],
    (GRADIENT_OF_WEIGHT, FLOAT16): [
        ("kLeastUtilizationOfGradient", (2048, 7680, 4096), (2048, 7552, 4096)),  # 0.909, 0.894
    ],
}

PRODUCTS = [
    Product(limit, operation, dtype, precision, *size)
    for (operation, (dtype, precision)), pairs in _PAIRS.items()
    for limit, *sizes in pairs
    for size in sizes
]
