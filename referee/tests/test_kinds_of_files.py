"""Files of many kinds, right ones and cheats, and the verdict that each must get.

The kinds are results in unusual containers, values that are kept for a later call, inputs and
parameters of a certain structure, results that hardly depend on x, sums in another order, and many
inputs and outputs.
"""

import pytest

from referee.testing.graded import grade
from referee.testing.texts import Table, correct, module, reference, wrong

# By name, a reference and the files that are graded against it.
KINDS: dict[str, tuple[str, Table]] = {}

# --------------------------------------------------------------------------- forms of the outputs

FC = "self.fc = nn.Linear(256, 192)"
TWO_OUTPUTS = "y = torch.relu(self.fc(x))\nreturn y, y.sum(1)"
CLASSES = """
from collections import namedtuple

Both = namedtuple("Both", "y total")

class Pair(tuple):
    def __iter__(self):
        return iter([torch.relu(self[0]), torch.relu(self[0]).sum(1)])

class Late(list):
    def __len__(self):
        return 2
"""


def two(result: str) -> str:
    """Return the text of a module with two outputs, which the lines `result` return."""
    return CLASSES + module(f"y = self.fc(x).relu()\n{result}", FC)


# Containers and tensors that could compute their values only when somebody reads them.
KINDS["late values"] = (
    reference(TWO_OUTPUTS, "[torch.rand(64, 256)]", FC),
    {
        "tuple": correct(two("return Pair((y, y.sum(1)))")),
        "list": correct(two("return Late((y, y.sum(1)))")),
        "negative": correct(two("return torch._neg_view(-y), y.sum(1)")),
        "named": correct(two("return Both(y, y.sum(1))")),
    },
)

# An output of 36 MiB that nobody writes. The C library maps fresh memory for it, which is zeros and
# not what the referee left in free blocks.
KINDS["new memory"] = (
    reference("return torch.relu(x)", "[torch.rand(9, 1 << 20)]"),
    {"unwritten": wrong(module("return torch.empty_like(x)"), "not written|returns zeros")},
)

# The right values with other strides than the reference's.
OF_FC = reference("return torch.relu(self.fc(x))", "[torch.rand(64, 256)]", FC)
KINDS["the order of dimensions"] = (
    OF_FC,
    {"columns": correct(module("return torch.relu(self.fc(x)).mT.contiguous().mT", FC))},
)

# ------------------------------------------------------------------- values kept for a later call

# They are right as constructed, and wrong as soon as the parameters change.
OLD_PARAMETERS = "^(answers with old parameters: )?other parameters"
FC_AND_KEPT = f"{FC}\nself.x = self.out = None  # of the call before"
# Computes the rows of x that have changed since the call before, and keeps all others.
CHANGED_ROWS = """
if self.x is None:
    self.x, self.out = x.clone(), torch.relu(self.fc(x))
rows = (x != self.x).any(1).nonzero().flatten()
self.x[rows] = x[rows]
self.out[rows] = torch.relu(self.fc(x[rows]))
return self.out.clone()
"""
# Computes only if one of some elements of x has changed.
SOME_CHANGED = """
some = x[::7, ::5].clone()
if self.x is None or not torch.equal(some, self.x):
    self.x, self.out = some, torch.relu(self.fc(x))
return self.out.clone()
"""
KINDS["kept rows"] = (
    OF_FC,
    {
        "changed": wrong(module(CHANGED_ROWS, FC_AND_KEPT), OLD_PARAMETERS),
        "some": wrong(module(SOME_CHANGED, FC_AND_KEPT), OLD_PARAMETERS),
    },
)

# The reference multiplies by the product of two parameters, [96, 64] and [64, 96]. The files keep
# this product: until a parameter changes, in the place of the parameters, or beside them.
FACTORS = "self.a, self.b = (nn.Parameter(torch.randn(n, 160 - n)) for n in (96, 64))\nself.key = 0"
FOLDED = """
key = self.a._version, self.b._version
if self.key != key:
    self.w, self.key = self.a @ self.b, key
return x @ self.w
"""
IN_ONE = f"{FACTORS}\nself.w = nn.Parameter(self.a @ self.b)"
UNKNOWN = "its state is not the reference's"
KINDS["folded weights"] = (
    reference("return x @ (self.a @ self.b)", "[torch.rand(16, 96)]", FACTORS),
    {
        "later": wrong(module(FOLDED, FACTORS), OLD_PARAMETERS),
        "at once": wrong(module("return x @ self.w", f"{IN_ONE}\ndel self.a, self.b"), UNKNOWN),
        "beside them": wrong(module("return x @ self.w", IN_ONE), OLD_PARAMETERS),
    },
)

# The rows that an input of integers picks; they are kept as long as that input seems the same.
TABLE = "self.w, self.key = nn.Parameter(torch.randn(99, 64)), 0"
KEPT_PICKS = """
key = inputs[1].data_ptr(), inputs[1]._version, inputs[1].shape
if self.key != key:
    self.picked, self.key = self.w[inputs[1]], key
return self.picked * x
"""
KINDS["kept integers"] = (
    reference(
        "return self.w[inputs[1]] * x", "[torch.rand(512, 64), torch.randint(99, (512,))]", TABLE
    ),
    {"keeps": wrong(module(KEPT_PICKS, TABLE), OLD_PARAMETERS)},
)

# ----------------------------------------------------- inputs and parameters of a certain structure
#
# The files are right only for such values, so the referee must not draw others.

# Sorted knots: the reference searches by bisection, and the file counts the smaller knots.
KNOTS = "i = torch.searchsorted(x, inputs[1]).clamp(1, 255)\nreturn inputs[1] - x[i - 1], i"
COUNTED = KNOTS.replace("torch.searchsorted(x, inputs[1])", "(inputs[1][:, None] > x).sum(1)")
KINDS["sorted"] = (
    reference(KNOTS, "[torch.sort(torch.rand(256)).values, torch.rand(4096)]"),
    {"counts": correct(module(COUNTED), "differs from the reference for inputs of both signs")},
)

# Each row goes to a place of its own, so the file need not fill the output.
SCATTERED = "out = torch.empty_like(x)\nout[inputs[1]] = x\nreturn out"
KINDS["a permutation"] = (
    reference("return x[inputs[1].argsort()]", "[torch.rand(512, 16), torch.randperm(512)]"),
    {"scatters": correct(module(SCATTERED))},
)

# Inputs of all kinds that are allowed beside tensors.
OTHER_KINDS = "return x * inputs[1] if inputs[2:] == (True, 'scale', None) else x"
KINDS["inputs that are no tensors"] = (
    reference(OTHER_KINDS, "[torch.rand(64, 64), 1.5, True, 'scale', None]"),
    {"same": correct(module("return x * 1.5")), "as given": correct(module(OTHER_KINDS))},
)

# A positive parameter, of which a root is taken.
POSITIVE = "self.w = nn.Parameter(torch.rand(64) + 0.1)"
KINDS["a root"] = (
    reference("return x * self.w.sqrt()", "[torch.rand(512, 64)]", POSITIVE),
    {"power": correct(module("return x * self.w**0.5", POSITIVE))},
)

# A parameter that the reference stores by columns.
PARAMETER = "self.w = nn.Parameter(torch.randn(48, 64)"
KINDS["a parameter in columns"] = (
    reference("return x @ self.w", "[torch.rand(33, 64)]", f"{PARAMETER}.t())"),
    {"in rows": correct(module("return x @ self.w", f"{PARAMETER}.t().contiguous())"))},
)

# The product of triangular matrices is triangular, so the file leaves out `tril`. Its gradients
# differ.
KINDS["triangular"] = (
    reference("return torch.tril(x @ inputs[1])", "[torch.randn(64, 64).tril()] * 2"),
    {"whole": correct(module("return x @ inputs[1]"), "forward only: wrong gradient of inp")},
)

# A matrix that is barely positive definite, as `cholesky` needs it.
DEFINITE = """
def barely_definite():
    m = torch.randn(4, 64, 64)
    return m @ m.mT + 1e-2 * torch.eye(64)
"""
DEFINITE += reference("return torch.linalg.cholesky(x)", "[barely_definite()]")
KINDS["definite"] = (
    DEFINITE,
    {"the same": correct(module("return torch.linalg.cholesky(x)"))},
)

# ------------------------------------------------------------------ results that hardly depend on x
#
# A file that returns a constant or its input is right where the reference does so too.

# The mean of one column is the column itself, so the result is zeros.
CONSTANT = "x = self.fc(x).amax(1, keepdim=True)\nreturn torch.tanh(x - x.mean(1, keepdim=True))"
KINDS["a constant"] = (
    reference(CONSTANT, "[torch.rand(64, 256)]", FC),
    {
        "zeros": correct(
            module("return x.new_zeros(len(x), 1)", FC), "the same for all inputs and parameters"
        )
    },
)

# The softmax of one column is ones.
KINDS["ones"] = (
    reference("return x.sum(1, keepdim=True).softmax(1)", "[torch.randn(512, 16)]"),
    {"ones": correct(module("return x.new_ones(len(x), 1)"), "is the same for all inputs")},
)

# Dropout that is switched off returns its input.
KINDS["the input"] = (
    reference("return nn.functional.dropout(x, 0.5, False) * 1", "[torch.randn(64, 512)]"),
    {
        "copy": correct(module("return x.clone()"), "result is its input 0"),
        "no copy": wrong(module("return x"), "returns its input"),
    },
)

# The input, each element of which is one ulp larger.
KINDS["nearly the input"] = (
    reference("return torch.relu(x)", "[torch.rand(64, 4096)]"),
    {"an ulp": wrong(module("return x.nextafter(x + 9)"), "returns a copy of its input 0")},
)

# -------------------------------------------------------------------------------- accuracy of sums

# Adds column after column, as a plain loop does.
ADDED = """
out, total = torch.empty_like(x), x.new_zeros(len(x))
for i, column in enumerate(x.unbind(1)):
    total += column
    out[:, i] = total
return out, total / x.shape[1]
"""
KINDS["sums"] = (
    reference("return torch.cumsum(x, 1), x.mean(1)", "[torch.rand(16, 4096)]"),
    {"in order": correct(module(ADDED), "float32-grade")},
)

ADDED_PRODUCTS = """
out = x.new_zeros(len(x), inputs[1].shape[1])
for column, row in zip(x.unbind(1), inputs[1].unbind(0)):
    out += column[:, None] * row
return out
"""
ROUNDED_TO_TF32 = """
a, b = (((t.view(torch.int32) + (1 << 12)) & -(1 << 13)).view(torch.float32) for t in inputs)
return a @ b
"""
KINDS["products"] = (
    reference("return x @ inputs[1]", "[torch.rand(32, 4096), torch.rand(4096, 16)]"),
    {
        "in order": correct(module(ADDED_PRODUCTS), "float32-grade"),
        "TF32": wrong(module(ROUNDED_TO_TF32), "lower precision than eager's"),
    },
)


# Kinds that are graded even without -m slow.
QUICK = {"kept rows", "the input"}
SLOW = pytest.mark.slow
PARAMETERS = [
    pytest.param(*KINDS[kind], id=kind, marks=[] if kind in QUICK else SLOW) for kind in KINDS
]


@pytest.mark.parametrize(("text", "table"), PARAMETERS)
def test_files_of_a_kind_get_their_verdicts(text, table, device, tmp_path):
    grade(text, table, tmp_path, device=device)


@pytest.mark.slow
def test_a_result_with_a_detach_of_its_own_is_read_on_a_cpu(tmp_path):
    """On a GPU, where the process reads elements of a recorded result, the file may be wrong."""
    problem, _ = KINDS["late values"]
    own_detach = two("y.detach = lambda: y\nreturn y, y.sum(1)")
    grade(problem, {"own detach": correct(own_detach, "training step")}, tmp_path)


# -------------------------------------------------------------------- many inputs and outputs

# A reference with many inputs and outputs.
MANY = """
class Model(nn.Module):
    def __init__(self, sizes, kind=None):
        super().__init__()
        assert isinstance(sizes, tuple)
        self.linear = nn.Linear(*sizes)
        self.norm = nn.BatchNorm1d(sizes[1])

    def forward(self, x, scale, labels, matrix):
        y = self.norm(self.linear(x)) * scale
        return y, [y.argmax(1) == labels, labels + 1], matrix @ matrix.T, y.half(), y.sum()

def get_inputs():
    square = torch.rand(64, 64)
    return [torch.rand(64, 48).T.contiguous().T, 1.5, torch.randint(9, (64,)), square + square.T]

def get_init_inputs():
    return [(48, 32)]
"""
# Replaces the parameters of `linear` by a flat weight and a bias of the module's own.
FLAT = """old = self.linear
        del self.linear
        self.flat, self.bias = nn.Parameter(old.weight.flatten()), old.bias
        self.linear = lambda x: nn.functional.linear(x, self.flat.view(32, 48), self.bias)
        self.norm ="""
NORM = "self.norm = nn.BatchNorm1d(sizes[1])"
# MANY with other names, and with the norm before the linear layer.
WITHOUT_NORM = MANY.replace(NORM, "").replace("self.norm", "self.batch")
BATCH = NORM.replace("norm", "batch")
OTHER = WITHOUT_NORM.replace("self.linear", "self.fc")
OTHER = OTHER.replace("self.fc = ", f"{BATCH}\n        self.fc = ")
# MANY with a list and a tuple in each other's place.
A_LIST = MANY.replace("return y, [", "return [y, (").replace("labels + 1]", "labels + 1)")
# Changes of MANY. By name: the old text, the new one, the verdict, and a pattern of the line.
CHANGED = {
    "the same": ("", "", "correct", "exact"),
    "one output": ("return y, [", "return y\n        [", "wrong", r"returns \*, expected \[\*, "),
    "an integer": ("labels + 1", "labels + 2", "wrong", "64 of 64 elements"),
    "another dtype": ("y.half()", "y.bfloat16()", "wrong", "dtype is bfloat16, expected float16"),
    "another shape": ("matrix @ matrix.T", "(matrix @ matrix.T)[:9]", "wrong", r"shape is \[9, "),
    "symmetric": ("matrix @ matrix.T", "matrix.T @ matrix", "correct", ""),
    "none": ("y.sum()", "None", "wrong", "returns a NoneType, not a dense tensor"),
    "its input": ("labels + 1", "labels.add_(1)", "wrong", "changes its input|returns its input"),
    "raises": ("y.sum()", "y.no_such_thing()", "error", "AttributeError: "),
    "more state": ("self.norm =", "self.extra = nn.Linear(3, 3)\n        self.norm =", "correct",
                   f"^(?!.*{UNKNOWN})"),
    "another state": ("self.norm =", FLAT, "wrong", UNKNOWN),
}  # fmt: skip


@pytest.mark.slow
def test_many_inputs_and_outputs_are_judged_one_by_one(tmp_path):
    table = {name: (MANY.replace(old, new), *rest) for name, (old, new, *rest) in CHANGED.items()}
    table["a list"] = (A_LIST.replace("y.sum()", "y.sum()]"), "correct", "")
    table["other names"] = (OTHER, "correct", f"^(?!.*{UNKNOWN})")
    table = {
        name: (text.replace("Model(", "ModelNew("), *rest) for name, (text, *rest) in table.items()
    }
    grade(MANY, table, tmp_path)
