"""A float32 product in Triton, made of three TF32 products: Triton's counterpart of `highest`.

`input_precision="tf32x3"` makes each float32 two TF32 numbers and adds three products of them. The
result is about as accurate as a float32 product. The kernel has no bias, ReLU or division.
"""

import torch
import triton
import triton.language as tl


def _tiling(rows: int, columns: int, k: int, stages: int, warps: int) -> triton.Config:
    """Return the sizes of a tile, with its pipeline stages and warps."""
    sizes = {"BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": k}
    return triton.Config(sizes, num_stages=stages, num_warps=warps)


# The best of these is found in the first call of each shape, which is not timed.
TILINGS = [
    _tiling(128, 128, 32, 3, 8),
    _tiling(128, 256, 32, 3, 8),
    _tiling(64, 128, 32, 4, 4),
    _tiling(128, 64, 32, 4, 4),
]


@triton.autotune(configs=TILINGS, key=["m", "n", "k"])
@triton.jit
def _product_kernel(  # noqa: PLR0913, PLR0917, sizes and tiles are a kernel's arguments
    x,
    weight,
    out,
    m,
    n,
    k,
    BLOCK_M: tl.constexpr,  # noqa: N803, Triton's own style
    BLOCK_N: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr,  # noqa: N803
):
    """Compute a tile of out [m, n] = x [m, k] weight [n, k]^T, all contiguous."""
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    index = tl.program_id(0)
    # Tiles are numbered along M first, within a band of eight rows of tiles. So blocks that run at
    # the same time read the same few tiles of the weight, which stay in L2.
    band_tiles = 8 * tiles_n
    first_row = index // band_tiles * 8  # of tiles, in the band of this tile
    band_rows = min(tiles_m - first_row, 8)  # the last band may have fewer than eight
    index_in_band = index % band_tiles
    tile_m = first_row + index_in_band % band_rows
    tile_n = index_in_band // band_rows

    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    x_tile = x + rows[:, None] * k + depth[None, :]
    weight_tile = weight + columns[None, :] * k + depth[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, k, BLOCK_K):
        is_before_k = first + depth < k
        a = tl.load(x_tile, mask=(rows[:, None] < m) & is_before_k[None, :], other=0.0)
        b = tl.load(weight_tile, mask=(columns[None, :] < n) & is_before_k[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="tf32x3")
        x_tile += BLOCK_K
        weight_tile += BLOCK_K
    is_inside = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(out + rows[:, None] * n + columns[None, :], total, mask=is_inside)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x weight^T for contiguous float32 matrices x [M, K] and weight [N, K] on a GPU."""
    m, k = x.shape
    n = len(weight)
    out = torch.empty(m, n, device=x.device)

    def grid(tiling: dict) -> tuple[int]:
        return (triton.cdiv(m, tiling["BLOCK_M"]) * triton.cdiv(n, tiling["BLOCK_N"]),)

    _product_kernel[grid](x, weight, out, m, n, k)
    return out
