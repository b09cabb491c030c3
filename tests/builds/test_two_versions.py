"""Two versions of the project in one process: each runs its own kernels.

A worker that evaluates one candidate after the other loads two builds. So does a notebook in
which a source was changed and the module imported again.
"""

import re
import textwrap

import pytest
import torch

from model_new import LinearReluDivideNew
from tests.support.processes import copy_project, forked, printed

STABLE = "relu_divide_kernels"
OPERATORS = [
    "relu",
    "linear_relu_divide",
    "linear_relu_divide_with_mask",
    "linear_relu_divide_gradients",
]

# Each fault: a file, a line of it, and the line that the faulty version has after that one. In the
# faulty version the first element of every output and gradient is 0.
FAULTS = [
    (
        "relu/relu_op.cpp",
        "  run_on_device(x, run_on_gpu, run_on_cpu);",
        "  memset(call.out, 0, out.element_size());",
    ),
    (
        "linear/operator/forward.h",
        "  if (out.numel() > 0) run_fused_pass(out, inputs.divisor, mask);",
        "  memset(out.mutable_data_ptr(), 0, out.element_size());",
    ),
    (
        "linear/operator/backward.h",
        "  run_on_device(grad_output, run_on_gpu, run_on_cpu);",
        "  memset(call.grad_z, 0, grad.z.element_size());",
    ),
]


def copy_faulty_project(folder):
    """Copy the project, with faults in its sources."""
    copy_project(folder)
    for name, line, fault in FAULTS:
        source = folder / "kernels" / name
        text = source.read_text()
        assert text.count(line) == 1, f"{name} has not one line {line!r}"
        source.write_text(text.replace(line, f"{line}\n{fault}"))


PROGRAM = """
    import sys
    import torch

    def import_version(folder):
        ours = ("kernels", "model", "model_new")
        for name in [name for name in sys.modules if name.partition(".")[0] in ours]:
            del sys.modules[name]
        sys.path.insert(0, folder)
        import model_new
        sys.path.remove(folder)
        return model_new.ModelNew(), model_new.LinearReluDivideNew(5, 5, 1.0)

    def is_faulty(tensor):
        assert tensor.flatten()[1:].all()
        return bool(tensor.flatten()[0] == 0)

    def faults_of(relu, linear):
        '''Return for each way to compute a result whether the result has the fault.'''
        x = torch.arange(1.0, 6.0)
        torch.nn.init.eye_(linear.linear.weight)
        torch.nn.init.ones_(linear.linear.bias)
        found = {"relu": is_faulty(relu(x))}
        for name, call in {
            "eager": linear,
            "compiled": torch.compile(linear, backend="aot_eager"),
        }.items():
            leaf = x.clone().requires_grad_()
            out = call(leaf)
            out.sum().backward()
            found[name] = is_faulty(out)
            found[name + " backward"] = is_faulty(leaf.grad)
        with torch.no_grad(), torch.autocast("cpu"):
            found["autocast"] = is_faulty(linear(x))
        return found

    versions = {name: import_version(name) for name in sys.argv[1:]}
    for name, modules in versions.items():
        assert set(faults_of(*modules).values()) == {name == "faulty"}, (name, faults_of(*modules))

    # The stable names run the first version, whichever version saved the program.
    first = next(iter(versions))
    x = torch.arange(1.0, 6.0)
    assert is_faulty(torch.ops.relu_divide_kernels.relu(x)) == (first == "faulty")
    for _, linear in versions.values():
        for program in (
            torch.export.export(linear, (x,)).module(),
            torch.jit.trace(linear, (x,), check_trace=False),
        ):
            leaf = x.clone().requires_grad_()
            out = program(leaf)
            out.sum().backward()
            assert is_faulty(out) == is_faulty(leaf.grad) == (first == "faulty")
    print("right")
"""


@pytest.mark.slow
def test_each_version_runs_its_own_kernels(tmp_path):
    """This holds in any order of the imports, and for eager, compiled and autocast calls."""
    for name, copy in (("right", copy_project), ("faulty", copy_faulty_project)):
        (tmp_path / name).mkdir()
        copy(tmp_path / name)
    for order in (["right", "faulty"], ["faulty", "right"], ["faulty"]):
        code = f"import sys\nsys.argv[1:] = {order!r}\n" + textwrap.dedent(PROGRAM)
        assert printed(code, tmp_path, forked, path=()) == "right\n"


def registered_keys(operator):
    """Return the dispatch keys for which an operator has a function."""
    dump = torch._C._dispatch_dump(operator)
    return set(re.findall(r"^(\w+)(?:\[alias\])?: registered at", dump, re.MULTILINE))


@pytest.mark.parametrize("name", OPERATORS)
def test_both_names_of_an_operator_have_the_same_functions(name):
    """An operator has a name of its build, and the stable name."""
    own_name = re.compile(rf"{STABLE}_\w+::{name}")
    own = [full for full in torch._C._dispatch_get_all_op_names() if own_name.fullmatch(full)]
    assert own, "this build has no namespace of its own"
    for full_name in own:
        # A call of the own operator is traced under the stable name, which needs a function.
        keys = registered_keys(full_name) - {"Tracer"}
        assert keys == registered_keys(f"{STABLE}::{name}") - {"Tracer"}
        assert "CPU" in keys


def test_the_stable_namespace_has_the_operators_of_programs_and_no_others():
    """Operators for tests and measurements have a name of their build alone."""
    names = [name.partition("::") for name in torch._C._dispatch_get_all_op_names()]
    assert {name for namespace, _, name in names if namespace == STABLE} == set(OPERATORS)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_traced_and_exported_programs_contain_the_stable_name():
    """So another build can run a saved program."""
    module = LinearReluDivideNew(6, 9, 3.0)
    x = torch.randn(4, 6)
    traced = torch.jit.trace(module, x, check_trace=False)
    assert f" {STABLE}::linear_relu_divide(" in str(traced.graph)
    torch.testing.assert_close(traced(x), module(x))
    exported = torch.export.export(module, (x,))
    for program in (exported, exported.run_decompositions()):
        calls = [node.target for node in program.graph.nodes if node.op == "call_function"]
        assert f"{STABLE}.linear_relu_divide.default" in map(str, calls)
