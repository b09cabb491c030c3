"""The CPU twin of the float32 GEMMs adds as tensor cores do: by known sums, and by a GPU's bits."""

from dataclasses import replace

import pytest
import torch

from model_new import LinearReluDivideNew
from problems.operands import draw_case
from tests.support import split_twin as twin
from tests.support.compare import assert_same_bits
from tests.support.split_twin import SM80, SM80_ON_HOPPER, SM90, linear, product
from tests.support.tensors import linear_path

pytestmark = pytest.mark.usefixtures("one_thread")
DIVISOR = 2.0
UNIT = 2.0**-24


def add(total, products, alignment):
    """Return the total after a tensor core has added up to 16 products."""
    x = torch.zeros(1, 16, dtype=torch.float64)
    x[0, : len(products)] = torch.tensor(products, dtype=torch.float64)
    total = torch.full((1, 1), total, dtype=torch.float64)
    return twin.accumulate(total, x, torch.ones(1, 16, dtype=torch.float64), alignment).item()


def test_an_accumulation_truncates_toward_zero():
    """A term counts down to the last bit that the alignment keeps."""
    unit = 2.0**-23  # the last place of 1
    for alignment in (None, 0, 1, 2, 3):
        assert add(1.0, [1.5 * unit], alignment) == 1 + unit
        assert add(-1.0, [-1.5 * unit], alignment) == -1 - unit
        assert add(0.0, [0.0], alignment) == 0
        assert add(0.0, [3 * 2.0**-12, -(2.0**-14)], alignment) == 11 * 2.0**-14
    # 16 products that are each equal to the last bit that is kept, or half of it.
    for alignment in (0, 1, 2, 3):
        last = unit / 2**alignment
        assert add(1.0, [last] * 16, alignment) == 1 + 16 * last
        assert add(1.0, [last / 2] * 16, alignment) == 1
    assert add(1.0, [unit / 16] * 16, None) == 1 + unit


def test_subnormal_factors_have_the_exponent_of_the_smallest_normal_number():
    """So the last place of their sum is that of 2^-14. A TF32 number of this size is normal."""
    unit = 2.0**-14 * 2.0**-23
    terms = torch.tensor([[2.0**-24, 0.9 * unit]], dtype=torch.float64)
    zero, ones = torch.zeros(1, 1, dtype=torch.float64), torch.ones_like(terms)
    assert twin.accumulate(zero, terms, ones, 0).item() == 2.0**-24
    assert twin.accumulate(zero, terms, ones, 2).item() == 2.0**-24 + 0.75 * unit
    exact = terms.sum().item()
    assert twin.accumulate(zero, terms, ones, 0, torch.float32).item() == pytest.approx(exact, 1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [300, 1024, 2048, 4096, 8192])
@pytest.mark.parametrize(("path", "kernel"), [("sm80", SM80_ON_HOPPER), ("sm90", SM90)])
def test_kernels_have_the_bits_of_the_twin(path, kernel, k):
    """The twin does not cut tiles along K, and sm90 does not on 132 multiprocessors."""
    if torch.cuda.get_device_properties(0).multi_processor_count != 132:
        pytest.skip("tiles may be cut")
    x, weight, bias = draw_case("normal", 1024, k, 2816)
    module = LinearReluDivideNew(k, 2816, DIVISOR)
    module.load_state_dict({"linear.weight": weight, "linear.bias": bias})
    with linear_path(path), torch.no_grad():
        out = module.cuda()(x.cuda()).cpu()
    for rows, columns in ((slice(8), slice(16)), (slice(-8, None), slice(-16, None))):
        want = linear(x[rows], weight[columns], bias[columns], DIVISOR, kernel)
        assert_same_bits(out[rows, columns], want)


@pytest.mark.gpu
def test_tensor_cores_accumulate_as_the_twin_does():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the twin has Hopper's alignment")
    for k in (16, 32, 64):
        for draw in (torch.randn, torch.rand):
            x = draw(128, k).half()
            weight = draw(128, k).half()
            got = torch.mm(x.cuda(), weight.cuda().t(), out_dtype=torch.float32).cpu()
            assert torch.equal(got.double(), twin.unpromoted_sum(x, weight, 16, SM90))


@pytest.mark.parametrize("cores", [twin.AMPERE, twin.HOPPER])
def test_an_addition_truncates_at_most_ten_units(cores):
    """docs/SPLIT-PROOF.md uses this. Small terms beside a large sum come near it."""
    last = 2.0 ** -(23 + cores.alignment)  # the last bit that is kept of a sum in [1, 2)
    ends_in_ones = [1.999] * (2**cores.alignment - 1)
    small = [0.999] * (cores.terms - len(ends_in_ones))
    for terms, least in ((small, 4.9), (small + ends_in_ones, 8.9), ([5.5] * cores.terms, 4.0)):
        exact = 1 + last * sum(terms)
        error = exact - add(1.0, [last * term for term in terms], cores.alignment)
        assert least <= error / UNIT <= 10


def test_lo_products_precede_hi_ones():
    """If they were added to the sum of the hi products, 64, they would be truncated to nothing."""
    x = torch.full((1, 64), 1 + 2.0**-20)
    for interval in (32, 64):
        out = product(x, torch.ones(1, 64), replace(SM80, interval=interval))
        assert out.item() == 64 + 2.0**-14


def test_compensation_adds_the_rounding_error_to_the_next_accumulation():
    """Each interval adds 3/8 of the last place of the sum, which is lost without compensation."""
    x = torch.zeros(1, 320)
    x[0, ::32] = 0.375 * 2.0**-23
    x[0, 0] = 1
    ones = torch.ones(1, 320)
    assert product(x, ones, replace(SM80, compensates=False, interval=32)).item() == 1
    assert product(x, ones, SM80).item() == 1 + 3 * 2.0**-23


def test_fma_sum_rounds_once_for_each_term():
    x = torch.tensor([[1 + 2.0**-11, 1 + 2.0**-12]])
    weight = torch.tensor([[-1.0, 1 + 2.0**-12]])
    assert twin.fma_sum(x, weight).item() == 2.0**-24
    x = torch.tensor([[2.0**24, 1.0, 1.0, 1.0]])
    assert twin.fma_sum(x, torch.ones(1, 4)).item() == 2.0**24
