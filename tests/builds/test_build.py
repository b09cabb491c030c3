"""Importing the real extensions: as a module, as text, in workers, beside other packages."""

import os
import re
import shutil
import textwrap
import zipfile

import pytest

import kernels
from tests.support.processes import ROOT, forked, printed, python


def test_import_is_silent_and_loads_no_compiler_and_no_dtensor(tmp_path):
    """Importing one of these takes a second or more, so it waits until a call needs it."""
    code = """
        import sys, torch
        before = set(sys.modules)
        import model_new
        slow = "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy"
        print([name for name in slow if name in sys.modules.keys() - before])
    """
    python("import model_new", tmp_path)  # builds the kernels if no other test has
    done = python(code, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_importing_loads_both_problems(tmp_path):
    """`import`, `from ... import *` and runpy all give both modules and SOLUTIONS."""
    names = ["LinearReluDivideNew", "ModelNew", "SOLUTIONS"]
    code = f"""
        import runpy, sys
        import model_new
        assert {names} == sorted(model_new.__all__)
        assert set({names}) <= set(dir(model_new))
        scope = {{}}
        exec("from model_new import *", scope)
        assert set({names}) <= set(scope)
        path = {str(ROOT / "model_new.py")!r}
        for scope in (runpy.run_path(path), runpy.run_module("model_new")):
            assert scope["SOLUTIONS"] == {{
                "relu": scope["ModelNew"], "linear_relu_divide": scope["LinearReluDivideNew"]
            }}
    """
    printed(code, tmp_path, forked)


def test_a_first_import_says_that_it_compiles(tmp_path):
    """The import prints a line after two seconds, and a line at the end."""
    code = """
        import time
        from kernels.build.extension import load_extensions
        def load_inline(name, build_directory, **_):
            time.sleep(2.3)
            open(f"{build_directory}/{name}.so", "w").close()
        load_extensions({"relu": {"a.cpp": ""}, "other": {"a.cpp": ""}}, load_inline)
    """
    done = forked(code, tmp_path, TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    first, second = done.stderr.splitlines()
    assert first.startswith("kernels: compiling relu and other. This happens once, and usually")
    assert first.endswith(f"The result is kept in {tmp_path}/kernels-{os.geteuid()}")
    assert re.fullmatch(r"kernels: ready after \d+ s", second)


def test_max_jobs_1_builds_one_extension_after_the_other(tmp_path):
    """Torch itself would run one compiler for each extension at the same time."""
    code = """
        import time
        from kernels.build.extension import load_extensions
        def load_inline(name, build_directory, **_):
            print("start")
            time.sleep(0.2)
            print("end")
            open(f"{build_directory}/{name}.so", "w").close()
        load_extensions({"relu": {"a.cpp": ""}, "other": {"a.cpp": ""}}, load_inline)
    """
    folder = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    events = printed(code, tmp_path, forked, MAX_JOBS="1", **folder).split()
    assert events == ["start", "end", "start", "end"]


def test_a_build_leaves_the_process_unchanged(tmp_path):
    """Environment, torch's CUDA_HOME and the loader's flags are restored, also after an error."""
    code = """
        import os, sys
        from torch.utils import cpp_extension
        from kernels.build.extension import load_extensions
        before = dict(os.environ), cpp_extension.CUDA_HOME, sys.getdlopenflags()
        def load_inline(name, build_directory, **_):
            assert os.environ["LC_ALL"] == "C"
            if fails:
                raise RuntimeError("a.cpp:1:1: error: no")
            open(f"{build_directory}/{name}.so", "w").close()
        for fails in (False, True):
            try:
                load_extensions({"relu": {"a.cpp": str(fails)}}, load_inline)
            except RuntimeError as error:
                assert fails and str(error).startswith("a.cpp:1:1: error: no")
            assert before == (dict(os.environ), cpp_extension.CUDA_HOME, sys.getdlopenflags())
    """
    printed(code, tmp_path, forked, TORCH_EXTENSIONS_DIR=str(tmp_path))


def test_old_versions_of_torch_and_python_give_a_clear_error(tmp_path):
    code = """
        import sys, torch
        {change}
        import model_new
    """
    changes = {
        "torch.__version__ = '2.8.0+cu128'": "torch 2.8.0+cu128 is too old, 2.9 is needed",
        "sys.version_info, sys.version = (3, 9, 1), '3.9.1 (main)'": "Python 3.9.1 is too old",
    }
    for change, message in changes.items():
        done = forked(textwrap.dedent(code).format(change=change), tmp_path)
        assert message in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_the_project_can_be_imported_from_a_zip_file(tmp_path):
    """Tools such as zipapp and pex run applications from a zip file."""
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        for path in [*ROOT.glob("model*.py"), *ROOT.glob("kernels/**/*.*")]:
            archive.write(path, path.relative_to(ROOT))
    code = """
        import torch, model_new
        assert "app.zip" in model_new.__file__
        assert model_new.ModelNew()(torch.tensor([-1.0, 1.0])).tolist() == [0, 1]
        assert model_new.LinearReluDivideNew(3, 2, 2.0)(torch.ones(1, 3)).shape == (1, 2)
    """
    printed(code, tmp_path, forked, path=(tmp_path / "app.zip",))


@pytest.mark.slow
def test_one_process_can_import_the_module_and_execute_its_text_and_bundles(tmp_path):
    """Executed text has no __file__, and leaves the other names of its namespace alone.

    One process may execute a text any number of times.
    """
    code = f"""
        import pathlib, torch
        import model_new
        from kernels.build.bundle import bundle
        text = pathlib.Path({str(ROOT / "model_new.py")!r}).read_text()
        x = torch.randn(1000)
        for source in (text, text, bundle("relu"), bundle("relu")):
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
def test_an_import_of_a_finished_build_needs_no_tools(tmp_path):
    assert python("import model_new", tmp_path).returncode == 0
    code = "import sys, model_new; print('torch.utils.cpp_extension' in sys.modules)"
    done = python(code, tmp_path, PATH="/nowhere", CUDA_HOME="/nowhere")
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


@pytest.mark.slow
def test_spawned_and_forked_workers_can_import(tmp_path):
    worker = "def relu(x):\n    import model_new\n    return model_new.ModelNew()(x)\n"
    (tmp_path / "worker.py").write_text(worker)
    code = """
        import multiprocessing, model_new, torch, worker
        if __name__ == "__main__":
            for method in ("spawn", "fork", "forkserver"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    assert pool.map(worker.relu, torch.tensor([-1.0, 1.0])) == [0, 1]
    """
    done = python(code, tmp_path, path=(tmp_path, ROOT))
    assert (done.returncode, done.stderr) == (0, "")


def test_another_package_called_kernels_gives_an_error(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    done = forked("import model_new", tmp_path, path=(tmp_path, ROOT))
    assert "expected the package 'kernels' that is beside model_new.py" in done.stderr
    assert str(tmp_path / "kernels") in done.stderr


def test_another_module_called_model_is_left_alone(tmp_path):
    (tmp_path / "model.py").write_text("class Model: unrelated = True\n")
    code = """
        import model, model_new
        assert model.Model.unrelated
        assert not hasattr(model_new.ModelNew, "unrelated")
    """
    printed(code, tmp_path, forked, path=(tmp_path, ROOT))


def test_a_model_that_cannot_be_imported_raises_each_time(tmp_path):
    """The first error leaves no module that has a part of its classes only."""
    for name, text in (
        ("other", ""),
        ("project", "class Model: ...\nraise RuntimeError('broken')"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.py").write_text(text)
    shutil.copytree(ROOT / "kernels", tmp_path / "project" / "kernels")
    code = """
        import kernels
        for _ in range(2):
            try:
                kernels.load_reference()
            except RuntimeError as error:
                print(error)
    """
    path = (tmp_path / "other", tmp_path / "project")
    assert printed(code, tmp_path, forked, path=path) == "broken\nbroken\n"


def test_the_replacements_are_subclasses_of_the_references():
    import model
    import model_new

    assert issubclass(model_new.ModelNew, model.Model)
    assert issubclass(model_new.LinearReluDivideNew, model.LinearReluDivide)
    # A harness may execute both files in one namespace: the problem's names stay the problem's.
    assert not {"batch_size", "dim", "get_inputs", "get_init_inputs"} & set(vars(model_new))


def test_each_problem_has_its_sources_and_no_others():
    """Each file belongs to a problem, and each include names a file of the same problem."""
    folder = ROOT / "kernels"
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*.*")}
    problems = {name: kernels.read_sources(name) for name in kernels.SOURCES}
    source_files = {name for name in files if not name.endswith((".py", ".pyc", ".md"))}
    assert source_files == set().union(*problems.values())
    for sources in problems.values():
        assert "launchers.h" in sources
        text = "\n".join(sources.values())
        assert set(re.findall(r'^#include "(.+)"', text, re.MULTILINE)) <= {*sources}
    for name, sources in problems.items():
        compiled_files = {path for path in sources if path.endswith((".cu", ".cpp"))}
        assert compiled_files == set(kernels.SOURCES[name])
    assert not any(name.startswith("linear/") for name in problems["relu"])
    assert list(kernels.SOURCES) == ["relu", "linear_relu_divide"]
    with pytest.raises(ValueError, match=r"expected a problem among relu, .* got 'silu'"):
        kernels.read_sources("silu")
