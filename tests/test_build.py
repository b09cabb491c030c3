"""The build at import: where it works, that it happens once, and what it says when it can't."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import kernels
from kernels import build

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {
    "greet.h": "#ifndef GREET_H_\n#define GREET_H_\n#define ANSWER 42\n#endif\n",
    "greet.cpp": '#include "greet.h"\nint answer() { return ANSWER; }\n',
}


def python(code, folder, path=(ROOT,), **environment):
    """Runs code in a fresh process that starts in `folder`."""
    full = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), **environment}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=folder,
        env={name: value for name, value in full.items() if value is not None},
        capture_output=True,
        text=True,
    )


def test_import_is_silent(tmp_path):
    done = python("import model_new", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_exec_beside_the_import_a_bundle_and_another_version(tmp_path):
    """The text has no __file__, and one process may execute it any number of times."""
    code = f"""
        import pathlib, torch
        import model_new
        from kernels.bundle import bundle
        text = pathlib.Path({str(ROOT / "model_new.py")!r}).read_text()
        other = bundle("relu").replace("// The kernels of", "// Another version of")
        assert other != bundle("relu")
        x = torch.randn(1000)
        for source in (text, text, bundle("relu"), other):
            namespace = {{"batch_size": 1, "dim": 2, "get_inputs": 3, "Model": 4}}
            exec(source, namespace)
            assert [namespace[n] for n in ("batch_size", "dim", "get_inputs", "Model")] \\
                == [1, 2, 3, 4]
            assert "get_init_inputs" not in namespace
            assert torch.equal(namespace["ModelNew"]()(x), torch.relu(x))
        linear = pathlib.Path({str(ROOT / "model.py")!r}).read_text()
        exec(linear, reference := {{}})
        x = torch.randn(5, 7)
        for source, name in ((text, "LinearReluDivideNew"), (text, "LinearReluDivideNew"),
                             (bundle("linear_relu_divide"), "ModelNew")):
            exec(source, namespace := {{}})
            mine, theirs = namespace[name](7, 9, 3.0), reference["LinearReluDivide"](7, 9, 3.0)
            theirs.load_state_dict(mine.state_dict())
            assert torch.equal(mine(x), theirs(x))
    """
    done = python(code, tmp_path)
    assert done.returncode == 0, done.stderr


def test_two_processes_build_once(tmp_path):
    code = "import model_new"
    environment = {"PYTHONPATH": str(ROOT), "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **environment})
        for _ in range(2)
    ]
    assert [process.wait() for process in processes] == [0, 0]
    (folder,) = tmp_path.iterdir()
    log = (folder / ".ninja_log").read_text()
    assert log.count("main.o") == 1


def test_a_killed_build_does_not_block_the_next(tmp_path):
    """torch leaves its lock behind when a build is killed, and would wait for it without end."""
    code = "import model_new; print(model_new._extension.__file__)"
    done = python(code, tmp_path)
    folder = Path(done.stdout.strip()).parent
    (folder / "complete").unlink()
    (folder / "lock").touch()
    assert python(code, tmp_path).returncode == 0
    assert not (folder / "lock").exists()
    assert (folder / "complete").exists()


def test_half_a_library_is_linked_again(tmp_path):
    """As a linker leaves it that is killed."""
    code = "import model_new; print(model_new._extension.__file__)"
    library = Path(python(code, tmp_path).stdout.strip())
    (library.parent / "complete").unlink()
    whole = library.read_bytes()
    library.unlink()  # this process may have it mapped
    library.write_bytes(whole[: len(whole) // 2])
    done = python(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(library.read_bytes()) == len(whole)


def test_a_warm_start_leaves_torchs_build_tools_alone(tmp_path):
    assert python("import model_new", tmp_path).returncode == 0
    code = "import sys, model_new; print('torch.utils.cpp_extension' in sys.modules)"
    assert python(code, tmp_path).stdout == "False\n"


def test_name_covers_sources_flags_and_compilers(tmp_path, monkeypatch):
    compiler = tmp_path / "c++"
    compiler.write_text("one")
    base = build.build_name({"a.cpp": "x"}, ["-O1"], [compiler])
    assert base == build.build_name({"a.cpp": "x"}, ["-O1"], [compiler])
    assert base != build.build_name({"a.cpp": "y"}, ["-O1"], [compiler])
    assert base != build.build_name({"a.cpp": "x"}, ["-O2"], [compiler])
    with monkeypatch.context() as patch:
        patch.setenv("NVCC_APPEND_FLAGS", "-O1")
        assert base != build.build_name({"a.cpp": "x"}, ["-O1"], [compiler])
    compiler.write_text("other")
    assert base != build.build_name({"a.cpp": "x"}, ["-O1"], [compiler])


@pytest.mark.parametrize(
    ("capability", "has_avx2"),
    [("DEFAULT", False), ("AVX2", True), ("AVX512", True), ("SVE256", False)],
)
def test_flags_for_the_cpu(monkeypatch, capability, has_avx2):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert ("-mavx2" in build.cpu_flags()) == has_avx2


def test_joined_sources_name_their_files():
    text = build.join(SOURCES, ".cpp")
    assert text.count("#define ANSWER") == 1
    assert text.splitlines()[:2] == ['#line 1 "kernels/greet.cpp"', '#line 1 "kernels/greet.h"']
    assert '#line 2 "kernels/greet.cpp"\nint answer()' in text


def test_compiler_errors_come_first_and_name_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    sources = {**SOURCES, "greet.cpp": SOURCES["greet.cpp"] + "int broken() { return nothing; }\n"}
    with pytest.raises(build.BuildError) as error:
        build.load(sources)
    first = str(error.value).splitlines()[0]
    assert first.startswith("kernels/greet.cpp:3:")
    assert "nothing" in first


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"CXX": "no-such-compiler"}, "needs a C++ compiler; 'no-such-compiler' is not on PATH"),
        ({"PATH": "/nowhere"}, "needs ninja"),
    ],
)
def test_missing_tools_are_named(environment, message, tmp_path):
    code = """
        import sysconfig
        scripts = sysconfig.get_path
        sysconfig.get_path = lambda name, *a, **k: (
            "/nowhere" if name == "scripts" else scripts(name, *a, **k))
        import model_new
    """
    done = python(code, tmp_path, **environment)
    assert done.returncode == 1
    assert message in done.stderr.splitlines()[-1]


def test_ninja_of_an_environment_that_is_not_activated(tmp_path):
    (tmp_path / "bin").mkdir()
    for tool in ("c++", "as", "ld"):
        path = [Path(p, tool) for p in os.environ["PATH"].split(os.pathsep)]
        (tmp_path / "bin" / tool).symlink_to(next(p for p in path if p.exists()))
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "ninja").write_text("#!/bin/sh\n")
    (tmp_path / "scripts" / "ninja").chmod(0o755)
    code = f"""
        import sysconfig, kernels.build
        get_path = sysconfig.get_path
        sysconfig.get_path = lambda name, *a, **k: (
            {str(tmp_path / "scripts")!r} if name == "scripts" else get_path(name, *a, **k))
        kernels.build.find_compilers(False)
    """
    done = python(code, tmp_path, PATH=str(tmp_path / "bin"))
    assert done.returncode == 0, done.stderr


class FakeCuda:
    """What build.py asks torch.cuda and torch.version about."""

    def __init__(self, monkeypatch, devices, cuda="13.0"):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(devices))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: devices[device])


@pytest.mark.parametrize(
    ("devices", "wanted", "expected"),
    [
        ([(9, 0)], None, ["90a"]),
        ([(9, 0), (8, 0), (9, 0)], None, ["80", "90a"]),
        ([(12, 0)], "Hopper", ["120"]),
        ([], "Hopper", ["90a"]),
        ([], "9.0", ["90a"]),
        ([], "9.0a;8.0+PTX", ["80", "90a"]),
        ([], "Ampere Ada", ["80", "86", "89"]),
        ([], None, []),
    ],
)
def test_architectures(monkeypatch, devices, wanted, expected):
    FakeCuda(monkeypatch, devices)
    if wanted is None:
        monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    else:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", wanted)
    assert build.cuda_architectures() == expected


def test_no_cuda_in_torch_means_the_cpu_alone(monkeypatch):
    FakeCuda(monkeypatch, [], cuda=None)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    assert build.cuda_architectures() == []


def test_missing_nvcc(monkeypatch):
    from torch.utils import cpp_extension

    FakeCuda(monkeypatch, [(9, 0)])
    monkeypatch.delenv("PYTORCH_NVCC", raising=False)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    with pytest.raises(build.BuildError, match=r"needs nvcc, which was not found.*Install"):
        build.find_nvcc()


@pytest.mark.parametrize("environment", [{}, {"CUDA_HOME": "/home"}, {"CUDA_PATH": "/path"}])
@pytest.mark.parametrize("has_nvcc", [False, True])
def test_cuda_home_is_that_of_torch(monkeypatch, tmp_path, environment, has_nvcc):
    from torch.utils import cpp_extension

    monkeypatch.delitem(sys.modules, "torch.utils.cpp_extension")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # or torch warns
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    if has_nvcc:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "nvcc").touch(mode=0o755)
    assert build.cuda_home() == cpp_extension._find_cuda_home()


@pytest.mark.parametrize(
    ("release", "known", "message"),
    [
        ("11.8", "compute_90", r"expected an nvcc of CUDA 13\.0.*got release 11\.8"),
        ("13.0", "compute_80\ncompute_90", "can't compile for sm_120; it knows 80, 90"),
    ],
)
def test_nvcc_that_is_too_old(monkeypatch, tmp_path, release, known, message):
    FakeCuda(monkeypatch, [(12, 0)])
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(
        f'#!/bin/sh\ncase $1 in --version) echo "release {release}, V";; '
        f'*) printf "{known}\\n";; esac\n'
    )
    nvcc.chmod(0o755)
    with pytest.raises(build.BuildError, match=message):
        build.check_nvcc(nvcc, ["120"])


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
        assert model.unrelated if hasattr(model, "unrelated") else model.Model.unrelated
        assert not hasattr(model_new.ModelNew, "unrelated")
        assert model_new.batch_size == 4096
    """
    done = python(code, tmp_path, path=(tmp_path, ROOT))
    assert done.returncode == 0, done.stderr


def test_the_solution_answers_for_the_problem():
    import model
    import model_new
    from model_new import batch_size, dim, get_init_inputs, get_inputs

    assert (batch_size, dim) == (4096, 393216)
    assert get_inputs is model.get_inputs
    assert get_init_inputs() == []
    assert issubclass(model_new.ModelNew, model.Model)
    assert not {"batch_size", "dim", "get_inputs"} & set(vars(model_new))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = model_new.nonsense


def test_every_source_is_read():
    others = (".py", ".md")
    names = {path.name for path in (ROOT / "kernels").iterdir() if path.suffix not in others}
    assert set(kernels.read_sources()) == {name for name in names if "." in name}
