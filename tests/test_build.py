"""The real extensions at import: as a module, as text, in workers, beside others of its name."""

import re
import textwrap

import pytest
from processes import ROOT, printed, python

import kernels


def test_import_is_silent_and_loads_no_compiler_and_no_dtensor(tmp_path):
    """Each takes a second or more: they wait until somebody needs them."""
    code = """
        import sys, torch
        before = set(sys.modules)
        import model_new
        slow = "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy"
        print([name for name in slow if name in sys.modules.keys() - before])
    """
    done = python(code, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


@pytest.mark.slow
def test_one_problem_alone_and_both_together(tmp_path):
    """A user of one problem waits for one build."""
    code = """
        import os, torch, kernels
        def built():
            libraries = torch.ops.loaded_libraries
            return sorted(os.path.basename(path).rsplit("_", 1)[0] for path in libraries)
        {first}
        print(*built())
        from model_new import ModelNew, SOLUTIONS, LinearReluDivideNew
        assert SOLUTIONS == {{"relu": ModelNew, "linear_relu_divide": LinearReluDivideNew}}
        print(*built())
    """
    both = ["kernels_linear_relu_divide", "kernels_relu"]
    together = "kernels.build_together('relu', 'linear_relu_divide')"
    for first, names in (("import model_new", both[1:]), (together, both)):
        done = python(textwrap.dedent(code).format(first=first), tmp_path)
        assert done.stdout.splitlines() == [" ".join(names), " ".join(both)], done.stderr


@pytest.mark.slow
def test_exec_beside_the_import_a_bundle_and_another_version(tmp_path):
    """The text has no __file__, and one process may execute it any number of times."""
    code = f"""
        import pathlib, torch
        import model_new
        from kernels.build.bundle import bundle
        text = pathlib.Path({str(ROOT / "model_new.py")!r}).read_text()
        other = bundle("relu").replace("// The gate", "// Another gate")
        assert other != bundle("relu")
        x = torch.randn(1000)
        for source in (text, text, bundle("relu"), other):
            namespace = {{"batch_size": 1, "dim": 2, "get_inputs": 3, "Model": 4}}
            exec(source, namespace)
            assert [namespace[n] for n in ("batch_size", "dim", "get_inputs", "Model")] \\
                == [1, 2, 3, 4]
            assert "get_init_inputs" not in namespace
            assert torch.equal(namespace["ModelNew"]()(x), torch.relu(x))
        x = torch.randn(5, 7)
        for source, name in ((text, "LinearReluDivideNew"), (text, "LinearReluDivideNew"),
                             (bundle("linear_relu_divide"), "ModelNew")):
            exec(source, namespace := {{}})
            module = namespace[name](7, 9, 3.0)
            assert torch.equal(module(x), torch.relu(module.linear(x)) / 3.0)
    """
    printed(code, tmp_path)


@pytest.mark.slow
def test_a_warm_start_needs_no_tools(tmp_path):
    assert python("import model_new", tmp_path).returncode == 0
    code = "import sys, model_new; print('torch.utils.cpp_extension' in sys.modules)"
    done = python(code, tmp_path, PATH="/nowhere", CUDA_HOME="/nowhere")
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


@pytest.mark.slow
def test_spawned_and_forked_workers(tmp_path):
    (tmp_path / "worker.py").write_text("def relu(x):\n    import model_new\n")
    with (tmp_path / "worker.py").open("a") as file:
        file.write("    return model_new.ModelNew()(x)\n")
    code = """
        import multiprocessing, model_new, torch, worker
        if __name__ == "__main__":
            for method in ("spawn", "fork", "forkserver"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    assert pool.map(worker.relu, torch.tensor([-1.0, 1.0])) == [0, 1]
    """
    done = python(code, tmp_path, path=(tmp_path, ROOT))
    assert (done.returncode, done.stderr) == (0, "")


def test_another_package_called_kernels(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    done = python("import model_new", tmp_path, path=(tmp_path, ROOT))
    assert "expected the package 'kernels' that lies beside model_new.py" in done.stderr
    assert str(tmp_path / "kernels") in done.stderr


def test_another_module_called_model(tmp_path):
    (tmp_path / "model.py").write_text("class Model: unrelated = True\n")
    code = """
        import model, model_new
        assert model.Model.unrelated
        assert not hasattr(model_new.ModelNew, "unrelated")
        assert model_new.batch_size == 4096
    """
    printed(code, tmp_path, path=(tmp_path, ROOT))


def test_the_solution_answers_for_the_problem():
    import model
    import model_new

    assert (model_new.batch_size, model_new.dim) == (4096, 393216)
    assert model_new.get_inputs is model.get_inputs
    assert model_new.get_init_inputs() == []
    assert issubclass(model_new.ModelNew, model.Model)
    assert not {"batch_size", "dim", "get_inputs"} & set(vars(model_new))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = model_new.nonsense


def test_sources():
    """Every file is of some problem; none includes what is missing, or is of another problem."""
    folder = ROOT / "kernels"
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*.*")}
    problems = {name: kernels.read_sources(name) for name in ("relu", "linear_relu_divide")}
    assert {name for name in files if not re.search(r"\.(py|pyc|md)$", name)} == {
        name for sources in problems.values() for name in sources
    }
    for problem, sources in problems.items():
        assert {f"{problem.split('_')[0]}/{problem.split('_')[0]}_op.cpp", "launchers.h"} < {
            *sources
        }
        text = "\n".join(sources.values())
        assert set(re.findall(r'^#include "(.+)"', text, re.MULTILINE)) <= {*sources}
    assert not any(name.startswith("linear/") for name in problems["relu"])
    assert kernels.problems() == ["linear", "relu"]
    with pytest.raises(ValueError, match=r"expected a problem among .*relu, got 'silu'"):
        kernels.read_sources("silu")
