"""ReLU on random tensors: hypothesis draws layout, dtype and values; torch says what is right."""

import properties as drawn
import torch
from compare import BITS, outcome, relu_by_definition
from properties import MOST, Drawn, assert_same, given, settings, st
from tensors import DTYPES, FLOATING

from model import Model
from model_new import ModelNew
from referee.cases import Case
from referee.correctness import check_case
from referee.gradients import check_gradient

DTYPES, FLOATING = tuple(DTYPES), tuple(FLOATING)
VALUES = ("integers", "special", "bits")
REFUSED = (
    torch.bool,
    torch.complex64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
)
MODES = {
    "plain": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}
FEW = settings(max_examples=settings.default.max_examples // 30)


def check_forward(x):
    """x through the referee, and bit for bit x < 0 ? 0 : x, NaN payloads included, or torch's."""
    problem = check_case(Model(), ModelNew(), Case("", lambda: x))
    assert problem is None, problem
    integer = BITS[x.element_size()]
    got, *wanted = (f(x).view(integer) for f in (ModelNew(), relu_by_definition, torch.relu))
    assert any(torch.equal(got, want) for want in wanted)


@given(drawn.tensors(DTYPES, VALUES), st.sampled_from(sorted(MODES)))
def test_forward(device, x, mode):
    with MODES[mode]():
        check_forward(x.make(device))


@FEW
@given(drawn.tensors(DTYPES, VALUES, **drawn.LARGE))
def test_forward_of_large_tensors(device, x):
    check_forward(x.make(device))


@st.composite
def differentiated(draw, **limits):
    """x and the output's gradient, of one dtype and shape."""
    x = draw(drawn.tensors(FLOATING, VALUES, **limits))
    layout = drawn.draw_layout(draw, x.layout.shape, limits.get("most", MOST))
    return x, drawn.draw_tensor(draw, (x.dtype,), VALUES, layout)


@given(differentiated())
def test_gradients(device, pair):
    """The output that keeps a mask, its gradient, and the gradient of that."""
    problem = check_gradient(Model(), ModelNew(), *(x.make(device) for x in pair))
    assert problem is None, problem


@FEW
@given(differentiated(**drawn.LARGE))
def test_gradients_of_large_tensors(device, pair):
    problem = check_gradient(Model(), ModelNew(), *(x.make(device) for x in pair))
    assert problem is None, problem


@given(drawn.layouts(), st.sampled_from(REFUSED))
def test_dtypes_that_some_torch_refuses(device, layout, dtype):
    """torch says which: its CPU takes uint16, uint32 and uint64 from 2.15 on."""
    x = Drawn(layout, torch.int64, "integers", 0).make(device).to(dtype)
    assert_same(*(outcome(module, x.clone()) for module in (ModelNew(), Model())))
