"""ReLU of random tensors is torch's: hypothesis draws the layouts, dtypes and values."""

import torch

from model import Model
from model_new import ModelNew
from tests.support import properties
from tests.support.compare import BITS, checked_call, outcome, relu_by_definition
from tests.support.properties import (
    MAX_ELEMENTS,
    TensorDescription,
    assert_same_outcome,
    given,
    settings,
    st,
)
from tests.support.tensors import DTYPES, FLOATING, step

DTYPES = tuple(DTYPES)
FLOATING = tuple(FLOATING)
VALUES = ("integers", "special", "bits")
REFUSED = (torch.bool, torch.complex64, torch.uint16, torch.uint32, torch.uint64)
REFUSED += (torch.float8_e4m3fn,)
MODES = (torch.enable_grad, torch.no_grad, torch.inference_mode)
FEW = settings(max_examples=settings.default.max_examples // 30)


def check_forward(x):
    """Assert that the layout and values are torch's.

    The bits, NaN payloads included, are those of x < 0 ? 0 : x or torch's.
    """
    got = checked_call(lambda: ModelNew()(x), [x], x.nbytes)
    want = Model()(x)
    assert_same_outcome(got, want)
    got, *allowed = (t.view(BITS[x.element_size()]) for t in (got, want, relu_by_definition(x)))
    assert any(torch.equal(got, bits) for bits in allowed)


@given(properties.tensors(DTYPES, VALUES), st.sampled_from(MODES))
def test_results_match_torch(device, x, mode):
    """This holds for any layout, dtype and values, and in every grad mode."""
    with mode():
        check_forward(x.make(device))


@FEW
@given(properties.tensors(DTYPES, VALUES, **properties.LARGE))
def test_results_of_large_tensors_match_torch(device, x):
    """Several threads compute these."""
    check_forward(x.make(device))


@st.composite
def differentiated(draw, **limits):
    """Draw x and the output's gradient, of one dtype and shape."""
    x = draw(properties.tensors(FLOATING, VALUES, **limits))
    layout = properties.draw_layout(draw, x.layout.shape, limits.get("max_elements", MAX_ELEMENTS))
    return x, properties.draw_tensor(draw, (x.dtype,), VALUES, layout)


def check_gradients(x, grad_output):
    """Assert that the output, its gradient and the second gradient are torch's."""
    pair = x, grad_output
    results = checked_call(lambda: step(ModelNew(), *pair, direction=grad_output), pair, x.nbytes)
    for got, want in zip(results, step(Model(), *pair, direction=grad_output), strict=True):
        assert_same_outcome(got, want)


@given(differentiated())
def test_gradients_match_torch(device, pair):
    """This holds for first and second gradients, for any layouts and values."""
    check_gradients(*(x.make(device) for x in pair))


@FEW
@given(differentiated(**properties.LARGE))
def test_gradients_of_large_tensors_match_torch(device, pair):
    """Several threads compute these."""
    check_gradients(*(x.make(device) for x in pair))


@given(properties.layouts(), st.sampled_from(REFUSED))
def test_other_dtypes_give_the_error_or_result_of_torch(device, layout, dtype):
    """The error depends on torch: from 2.15 on, its CPU supports uint16, uint32 and uint64."""
    x = TensorDescription(layout, torch.int64, "integers", 0).make(device).to(dtype)
    assert_same_outcome(*(outcome(module, x.clone()) for module in (ModelNew(), Model())))
