"""Honest files that do unusual things, graded against reference files: all of them are correct.

The files of SUSPICIOUS do what cheats do, too. Those of UNUSUAL are written in an unusual way, and
those of TRUSTING rely on what README.md promises to a solution.
"""

import pytest

from referee.testing.graded import grade, quick_and_slow
from referee.testing.texts import correct, module, own_linear_relu, reference, wrong

DIVIDE = reference(
    "return torch.relu(self.fc(x)) / 3.0", "[torch.rand(64, 256)]", "self.fc = nn.Linear(256, 192)"
)
FC = "self.fc = nn.Linear(256, 192)\n"
PLAIN_FORWARD = "return torch.relu(self.fc(x)) / 3.0"
PLAIN = module(PLAIN_FORWARD, FC)
# Has the garbage collector call a function.
COLLECTOR = "import gc\ngc.callbacks.append(lambda phase, info: None)\n" + PLAIN
# Lets torch use one thread.
THREADS = "torch.set_num_threads(1)\n" + PLAIN
# Catches an exception in each call, and then calls torch.
MISSING_KEY = """
kernels = {}
def relu(x):
    try:
        return kernels["relu"](x)
    except KeyError:
        return torch.clamp_min(x, 0)
"""
MISSING_KEY += module("return relu(self.fc(x)) / 3.0", FC)
# Starts compilers, of which the first fails.
FLAG = """
import subprocess, tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    source = Path(folder, "a.c")
    source.write_text("int f(int x) { return x + 1; }")
    for flags in (["-fno-such-flag"], []):
        command = ["cc", *flags, "-shared", "-fPIC", source, "-o", source.with_suffix(".so")]
        try:
            subprocess.run(command, check=True, capture_output=True)
            break
        except subprocess.CalledProcessError:
            pass
"""
FLAG += PLAIN
# Has a backward for small inputs alone.
LARGE_ALONE = """
class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        return torch.relu(z) / 3.0

    @staticmethod
    def backward(ctx, g):
        raise NotImplementedError("forward only")

"""
LARGE_ALONE += module("""
z = self.fc(x)
return Own.apply(z) if len(x) > 32 else torch.relu(z) / 3.0
""", FC)  # fmt: skip
# Prepares the reciprocal of the divisor, which is no parameter.
RECIPROCAL = module("return torch.relu(self.fc(x)) * self.scale", FC + "self.scale = 1 / 3.0")
# Has the divisor in a buffer, which the reference does not have.
DIVISOR = 'self.register_buffer("divisor", torch.tensor(3.0))'
BUFFER = module("return torch.relu(self.fc(x)) / self.divisor", FC + DIVISOR)
SUSPICIOUS = {
    "a callback of the collector": correct(COLLECTOR, "training step"),
    "threads": correct(THREADS, "training step"),
    "a missing key": correct(MISSING_KEY, "training step"),
    "a compiler's flag": correct(FLAG, "training step"),
    "large inputs alone": correct(LARGE_ALONE, "forward only: its training step raises NotImpl"),
    "a reciprocal": correct(RECIPROCAL, "training step"),
    "a divisor as a buffer": correct(BUFFER, "training step"),
}

# Has the reference's parameters under other names.
OTHER_NAMES = module(
    "return torch.relu(x @ self.w.t() + self.b) / 3.0",
    "own = nn.Linear(256, 192)\nself.w, self.b = own.weight, own.bias",
)
# Changes much of its process when it is imported, and prints in each forward.
BUSY_IMPORT = """
import atexit, gc, logging, multiprocessing, signal, warnings
from concurrent.futures import ThreadPoolExecutor

gc.disable()
atexit.register(print, "the end")
signal.signal(signal.SIGUSR1, lambda *_: None)
torch.set_default_device("cpu")
torch.manual_seed(0)
pool = ThreadPoolExecutor(2)
assert list(pool.map(abs, [1, -1])) == [1, 1]
with multiprocessing.get_context("fork").Pool(1) as processes:
    assert processes.map(abs, [-1]) == [1]
"""
BUSY_IMPORT += module(f'print("forward")\nwarnings.warn("forward")\n{PLAIN_FORWARD}', FC)
COMPILED = "\nself.compiled = torch.compile(lambda z: torch.relu(z) / 3.0, backend='aot_eager')"
# Returns a tensor that stores columns.
COLUMNS = "return (torch.relu(self.fc(x)) / 3.0).t().contiguous().t()"
UNUSUAL = {
    "other names": correct(OTHER_NAMES, "training step"),
    "many calls at import": correct(BUSY_IMPORT),
    "compiled": correct(module("return self.compiled(self.fc(x))", FC + COMPILED)),
    "columns": correct(module(COLUMNS, FC)),
    "inference mode": correct(module(f"with torch.inference_mode():\n    {PLAIN_FORWARD}", FC)),
}

# Fails if somebody calls `train` or `eval`.
NO_TRAIN = """
    def train(self, mode=True):
        raise AssertionError("train or eval was called")
"""
# Keeps the Parameter, whose data moves into the referee's memory.
SAME_PARAMETER = f"assert self.kept[0] is self.fc.weight\n{PLAIN_FORWARD}"
HIGHEST = f'assert torch.get_float32_matmul_precision() == "highest"\n{PLAIN_FORWARD}'
LIMITS = """
import resource

assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)
for limit in (resource.RLIMIT_DATA, resource.RLIMIT_FSIZE):
    assert resource.RLIM_INFINITY not in resource.getrlimit(limit)
"""
TRUSTING = {
    "called as constructed": correct(PLAIN + NO_TRAIN, "training step"),
    "same Parameter": correct(module(SAME_PARAMETER, FC + "self.kept = [self.fc.weight]")),
    "highest precision": correct(module(HIGHEST, FC)),
    "limits": correct(LIMITS + PLAIN),
    "imports from its folder": correct("import reference\nreference.get_inputs()\n" + PLAIN),
}
QUICK = ("a missing key", "same Parameter")


@pytest.mark.parametrize("table", quick_and_slow(SUSPICIOUS | UNUSUAL | TRUSTING, *QUICK))
def test_honest_files_are_correct(table, device, tmp_path):
    grade(DIVIDE, table, tmp_path, device=device)


@pytest.mark.parametrize(
    ("library", "draw"), [("random", "random.random()"), ("numpy", "numpy.random.rand()")]
)
def test_a_copy_of_a_constructor_draws_the_same_values(library, draw, tmp_path):
    pytest.importorskip(library)
    init = f"import {library}\nself.w = nn.Parameter(torch.tensor([{draw} for _ in range(64)]))"
    forward = "return x * self.w"
    copy = {"copy": correct(module(forward, init))}
    grade(reference(forward, "[torch.rand(16, 64)]", init), copy, tmp_path, trials=1)


@pytest.mark.slow
@pytest.mark.usefixtures("unreadable_processes")
def test_results_that_cannot_be_read_in_place_are_copied(tmp_path):
    first_row = module("return torch.relu(self.fc(x[:1].expand(x.shape))) / 3.0", FC)
    half = own_linear_relu("gradients[1] = gradients[1] / 2")
    half += module("return Own.apply(x, self.fc.weight, self.fc.bias) / 3.0", FC)
    table = {
        "plain": correct(PLAIN, "results are copied .* training step"),
        "other names": correct(OTHER_NAMES, "training step"),
        "first row": wrong(first_row, r"the first at \[1, "),
        "half a gradient": wrong(half, "gradient of fc.weight"),
    }
    grade(DIVIDE, table, tmp_path)


@pytest.mark.usefixtures("unreadable_processes")
def test_copied_results_may_have_another_shape_in_each_call(tmp_path):
    problem = reference("return x[x > 0.5]", "[torch.rand(64, 64)]")
    table = {"same": correct(module("return torch.masked_select(x, x > 0.5)"), "exact")}
    grade(problem, table, tmp_path, trials=1)


FOURIER = reference("return torch.fft.fft(x)", "[torch.randn(64, 1000)]")
IN_HALF = "return torch.fft.fft(x.bfloat16().float())"


@pytest.mark.slow
def test_complex_results_have_an_error_budget(device, tmp_path):
    in_float64 = "return torch.fft.fft(x.double()).to(torch.complex64)"
    table = {
        "same": correct(module("return torch.fft.fft(x)"), "exact"),
        "in float64": correct(module(in_float64), "float32-grade"),
        "real parts": wrong(module("return torch.fft.fft(x).real + 0j"), r"\.imag: got 0"),
        "lower precision": wrong(module(IN_HALF), "lower precision than eager's"),
        "zeros": wrong(module("return torch.zeros_like(x) + 0j"), "returns zeros"),
    }
    grade(FOURIER, table, tmp_path, device=device)


@pytest.mark.slow
def test_files_with_complex_inputs_get_their_verdicts(device, tmp_path):
    problem = reference("return x * x.conj() + 1j * x", "[torch.randn(64, 100) + 1j]")
    table = {
        "same": correct(module("return x * x.conj() + 1j * x"), "exact"),
        "another order": correct(module("return x * (x.conj() + 1j)"), "float32-grade"),
        "real": wrong(module("return (x * x.conj() + 1j * x).real + 0j"), r"\.imag: got 0"),
    }
    grade(problem, table, tmp_path, device=device)


# References with recurrent networks, buffers, shared weights and so on: a copy of each is correct.
RNN = "self.rnn = nn.KIND(16, 24, 2, batch_first=True)\nself.fc = nn.Linear(24, 10)"
RNN_FORWARD = "y, _ = self.rnn(x)\nreturn self.fc(y[:, -1])"
NORM = "self.conv, self.norm = nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16)"
NORM_FORWARD = "return torch.relu(self.norm(self.conv(x)))"
MASKED = """
self.fc = nn.Linear(32, 32)
self.register_buffer("mask", torch.tril(torch.ones(32, 32)))
"""
MASKED_FORWARD = "s = self.fc(x).masked_fill(self.mask == 0, -torch.inf)\nreturn s.softmax(-1)"
TIED = "self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)\nself.b.weight = self.a.weight"
DROPOUT = "self.fc, self.drop = nn.Linear(32, 32), nn.Dropout(0.0)"
KINDS = {
    "lstm": (RNN_FORWARD, "[torch.rand(4, 12, 16)]", RNN.replace("KIND", "LSTM")),
    "gru": (RNN_FORWARD, "[torch.rand(4, 12, 16)]", RNN.replace("KIND", "GRU")),
    "norm": (NORM_FORWARD, "[torch.randn(4, 8, 32, 32)]", NORM),
    "mask": (MASKED_FORWARD, "[torch.randn(4, 32, 32)]", MASKED),
    "tied": ("return self.b(torch.tanh(self.a(x)))", "[torch.randn(8, 32)]", TIED),
    "no dropout": ("return self.drop(self.fc(x))", "[torch.randn(8, 32)]", DROPOUT),
    "no parameters": ("return x.sum(1), (x * 2, x.argmax(1))", "[torch.randn(8, 32)]", ""),
    "half": ("return x @ x.t()", "[torch.randn(64, 64).half()]", ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_copy_of_the_reference_is_correct(name, device, tmp_path):
    forward, inputs, init = KINDS[name]
    table = {"same": correct(module(forward, init), "training step")}
    grade(reference(forward, inputs, init), table, tmp_path, device=device)
