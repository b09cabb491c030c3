"""The bundle: one file with a problem's solution, which KernelBench accepts."""

import ast
import re

import pytest
import torch
from torch.utils import cpp_extension

from kernels import read_sources
from kernels.build.bundle import bundle
from tests.support.processes import ROOT, printed

PROBLEMS = ["relu", "linear_relu_divide"]

# The patterns of KernelBench's static checker, which removes comments, and then rejects a text with
# one of these or warns of it. It also warns of torch's own ops. Those are not listed here: bundles
# have them, for calls that our kernels do not support.
REJECTED = [
    r"\btry\s*:",
    r"\bexcept\s*:",
    r"\bexcept\s+\w+",
    r"\bpass\b",
    r"import\s+threading",
    r"from\s+threading\s+import",
    r"import\s+multiprocessing",
    r"concurrent\.futures",
    r"_make_subclass",
    r"class\s+\w+.*\((torch\.)?Tensor\)",
    r"torch\.Tensor\.__new__",
    r"(perf_counter|time\.time|synchronize|cuda\.Event)\s*=[^=]",
    r"cuda\.Stream\s*\(",
    r"with\s+torch\.cuda\.stream",
    r"\.(wait|record)_stream\s*\(",
]
# If a problem is float32, the checker also warns of these. The bundle of Linear has them because
# its kernel for `highest` splits float32 into fp16.
DOWNGRADES = [
    r"__float2half(_rn)?\s*\(",
    r"\(\s*__half\s*\)\s*[\w\->.]+",
    r"static_cast\s*<\s*(__half|half)\s*>\s*\(",
    r"\.(half|float16)\s*\(",
    r"\.to\s*\(\s*(dtype\s*=\s*)?torch\.(float16|half)\b",
]


def without_comments(text):
    return "\n".join(re.split("#|//", line)[0] for line in text.splitlines())


@pytest.mark.parametrize("problem", PROBLEMS)
def test_static_checkers_accept_the_bundle(problem):
    text = without_comments(bundle(problem))
    patterns = REJECTED if problem == "linear_relu_divide" else REJECTED + DOWNGRADES
    for pattern in patterns:
        assert not re.search(pattern, text), pattern
    assert "__global__" in text
    assert "load_inline" in text
    assert re.search(r"\bthreadIdx\.|__device__\s", text)


def assigned_literal(tree, name):
    """Return the literal that a module assigns to a name, from the module's syntax tree."""
    assignments = [node for node in tree.body if isinstance(node, ast.Assign)]
    (node,) = [node for node in assignments if node.targets[0].id == name]
    return ast.literal_eval(node.value)


def called_functions(tree):
    """Return the function of each call, as text."""
    return [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def module_classes(tree):
    """Return the names of the classes that are derived from nn.Module."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return [node.name for node in classes if "nn.Module" in map(ast.unparse, node.bases)]


def has_all_lines(source, content):
    """Return whether a bundle's source has all lines of a file, except the includes."""
    lines = {x for x in content.splitlines() if not x.startswith(("#include", "#pragma once"))}
    return lines <= set(source.splitlines())


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_bundle_has_all_sources_one_load_inline_call_and_one_module(problem):
    """Each file is once in the C++ or the CUDA source, and a header may be in both.

    Neither has includes of ours. Two calls return the same text.
    """
    text = bundle(problem)
    assert text == bundle(problem)
    assert max(map(len, text.splitlines())) <= 100
    tree = ast.parse(text)
    assert called_functions(tree).count("load_inline") == 1
    assert module_classes(tree) == ["ModelNew"]
    cpp_source = assigned_literal(tree, "CPP_SOURCE")
    cuda_source = assigned_literal(tree, "CUDA_SOURCE")
    assert '#include "' not in cpp_source + cuda_source
    for path, content in read_sources(problem).items():
        heading = f"// ---- {path}\n"
        cpp_count = cpp_source.count(heading)
        cuda_count = cuda_source.count(heading)
        if path.endswith(".cpp"):
            assert (cpp_count, cuda_count) == (1, 0)
        elif path.endswith(".cu"):
            assert (cpp_count, cuda_count) == (0, 1)
        else:
            assert max(cpp_count, cuda_count) == 1
        for source in (cpp_source, cuda_source):
            if heading in source:
                assert has_all_lines(source, content)


def test_gpus_of_one_kind_get_their_code_once(monkeypatch):
    def load_inline(extra_cuda_cflags, **_):
        flags.extend(flag for flag in extra_cuda_cflags if "gencode" in flag)
        raise InterruptedError

    flags = []
    capabilities = [(9, 0), (8, 0), (9, 0)]
    monkeypatch.setattr(cpp_extension, "load_inline", load_inline)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: capabilities[gpu])
    with pytest.raises(InterruptedError):
        exec(bundle("relu"), {})
    assert flags == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
    ]


def test_a_bundle_of_other_sources_has_another_name(monkeypatch):
    """So two versions in one process each have a library and operators of their own."""
    name = re.search('^NAME = "(.+)"$', bundle("relu"), re.MULTILINE)[1]
    assert re.fullmatch("relu_divide_kernels_[0-9a-f]{16}", name)
    sources = read_sources("relu")
    sources["relu/relu.cu"] += "// another version\n"
    monkeypatch.setattr("kernels.build.bundle.read_sources", lambda problem: sources)
    assert re.search('^NAME = "(.+)"$', bundle("relu"), re.MULTILINE)[1] != name


@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_bundle_has_no_import_of_ours_and_no_name_of_a_problem_file(problem):
    text = bundle(problem)
    assert not re.search(r"^\s*(from|import) (kernels|model|model_new|referee)\b", text, re.M)
    names = "Model|batch_size|dim|get_inputs|get_init_inputs|in_features|out_features|divisor"
    tree = ast.parse(text)
    assignments = [node for node in tree.body if isinstance(node, ast.Assign)]
    assigned = {
        target.id for node in assignments for target in node.targets if isinstance(target, ast.Name)
    }
    defined = {getattr(node, "name", None) for node in tree.body} | assigned
    assert not defined & {*names.split("|")}


# Programs that compare a bundle's ModelNew with torch, forward and backward.
RELU_CHECK = """
for dtype in (torch.float32, torch.float16, torch.int32):
    x = torch.linspace(-9, 9, 1001).to(device, dtype)
    assert torch.equal(ModelNew()(x), torch.relu(x))
x = torch.randn(50, requires_grad=True, device=device)
ModelNew()(x).sum().backward()
assert torch.equal(x.grad, (x > 0).float())
assert torch.equal(copy.deepcopy(ModelNew())(x), torch.relu(x))
"""
LINEAR_RELU_DIVIDE_CHECK = """
for dtype in (torch.float32, torch.float16, torch.float64):
    module = ModelNew(33, 17, -2.0).to(device, dtype)
    assert list(module.state_dict()) == ["linear.weight", "linear.bias"] and module.divisor == -2.0
    x = torch.randn(5, 33, device=device, dtype=dtype, requires_grad=True)
    want = torch.relu(torch.nn.functional.linear(x, *module.parameters())) / -2.0
    got = module(x)
    assert "LinearReluDivide" in type(got.grad_fn).__name__ + got.grad_fn.name()
    inputs = [x, *module.parameters()]
    grads = [torch.autograd.grad(out.sum(), inputs) for out in (got, want)]
    for a, b in zip([got, *grads[0]], [want, *grads[1]]):
        torch.testing.assert_close(a, b)
torch.manual_seed(0)
ours = ModelNew(33, 17, 2.0)
torch.manual_seed(0)
plain = torch.nn.Linear(33, 17)
assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), plain.parameters()))
"""
CHECKS = {"relu": RELU_CHECK, "linear_relu_divide": LINEAR_RELU_DIVIDE_CHECK}


@pytest.mark.slow
@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_bundle_runs_alone(problem, tmp_path):
    """It is executed as text in a folder where nothing of the project can be imported."""
    file = tmp_path / "solution.txt"
    file.write_text(bundle(problem))
    code = (
        "import sys, torch\n"
        "namespace = {}\n"
        f"exec(open({str(file)!r}).read(), namespace)\n"
        "import copy\n"
        "ModelNew = namespace['ModelNew']\n"
        "device = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        f"{CHECKS[problem]}"
        "assert 'kernels' not in sys.modules and 'model' not in sys.modules\n"
        # With 16 such processes at once, torch's own Linear aborts at exit in 9 of 64 ("terminate
        # called without an active exception", H200, torch 2.11, Python 3.12).
        "import os\n"
        "os._exit(0)\n"
    )
    printed(code, tmp_path, PYTHONPATH=None)


def test_an_unknown_problem_gives_an_error():
    with pytest.raises(ValueError, match="expected a problem among relu"):
        bundle("silu")


def test_readme_names_the_bundle_command():
    assert "python run.py relu --bundle" in (ROOT / "README.md").read_text()
