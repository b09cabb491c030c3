"""The build tools: targets, flags, and the errors if a tool is missing or fails."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from kernels.build import errors, toolchain
from kernels.build.errors import BuildError
from kernels.build.extension import load_extensions
from tests.support.processes import python

SOURCES = {
    "greet/greet.h": "#pragma once\n#define ANSWER 42\n",
    "greet/greet.cpp": '#include "greet/greet.h"\nint answer() { return ANSWER; }\n',
}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    for name in ("TORCH_CUDA_ARCH_LIST", "PYTORCH_NVCC", "CUDA_HOME", "CUDA_PATH", "CXX"):
        monkeypatch.delenv(name, raising=False)


def fake_cuda(monkeypatch, devices, cuda="13.0"):
    """Replace the parts of torch.cuda and torch.version that the toolchain reads."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(devices))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: devices[device])


def tool(folder, name, script):
    """Make an executable that runs a line of shell; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def error_of(sources=SOURCES):
    """Return the error of a build that must fail."""
    with pytest.raises(BuildError) as error:
        load_extensions({"greet": sources}, cpp_extension.load_inline)
    return str(error.value)


@pytest.mark.parametrize(
    ("devices", "arch_list", "want"),
    [
        ([(9, 0)], None, ["sm_90a"]),
        ([(9, 0), (8, 0), (9, 0)], None, ["sm_80", "sm_90a"]),
        ([(12, 0)], "Hopper", ["sm_120"]),
        ([], "Hopper", ["compute_90", "sm_90a"]),
        ([], "9.0a;8.0+PTX", ["compute_80", "sm_80", "sm_90a"]),
        ([], "8.0;9.0;10.0+PTX", ["compute_100", "sm_100", "sm_80", "sm_90a"]),
        ([], "Ampere Ada", ["compute_86", "compute_89", "sm_80", "sm_86", "sm_89"]),
        ([], "", []),
        ([], None, []),
    ],
)
def test_targets_are_those_of_the_gpus_or_of_the_variable(monkeypatch, devices, arch_list, want):
    fake_cuda(monkeypatch, devices)
    if arch_list is not None:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", arch_list)
    assert toolchain.cuda_targets() == want
    monkeypatch.setattr(torch.version, "cuda", None)  # a torch for the CPU alone
    assert toolchain.cuda_targets() == []


@pytest.mark.parametrize("entry", ["all", "native", "Hoper", "9", "9.0b", "Ada+PTX", "8.0,9.0"])
def test_an_unknown_entry_of_the_variable_raises(monkeypatch, entry):
    fake_cuda(monkeypatch, [])
    arch_list = entry if entry == "native" else f"8.0;{entry}"
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", arch_list)
    message = re.escape(f"cannot compile for TORCH_CUDA_ARCH_LIST={arch_list!r}")
    with pytest.raises(BuildError, match=message):
        toolchain.cuda_targets()


@pytest.mark.parametrize(
    ("code", "supported", "unsupported"),
    [
        ("sm_80", ["sm_80", "sm_86", "sm_89"], ["sm_75", "sm_90a", "sm_100"]),
        ("sm_86", ["sm_86", "sm_89"], ["sm_80", "sm_120"]),
        ("sm_90a", ["sm_90a"], ["sm_80", "sm_100"]),
        ("sm_100", ["sm_100", "sm_103"], ["sm_120", "sm_110", "sm_90a"]),
        ("compute_80", ["sm_80", "sm_87", "sm_120"], ["sm_75", "sm_90a"]),
        ("compute_90", ["sm_100", "sm_121"], ["sm_90a", "sm_89", "compute_100"]),
        ("sm_80", ["sm_80"], ["compute_86"]),  # PTX is requested for GPUs of the future
    ],
)
def test_a_gpu_runs_the_code_of_compatible_targets(code, supported, unsupported):
    assert all(code in toolchain.compatible_targets(target) for target in supported)
    assert not any(code in toolchain.compatible_targets(target) for target in unsupported)


@pytest.mark.parametrize(
    ("devices", "arch_list", "is_loaded"),
    [
        ([(9, 0)], "", True),
        ([(8, 0), (9, 0)], "", True),
        ([(12, 0)], "", True),
        ([(9, 0), (7, 5)], "", False),
        ([], "8.0;9.0;10.0+PTX", True),
        ([], "7.5", False),
    ],
)
def test_a_build_made_ahead_is_loaded_if_it_covers_the_gpus(
    monkeypatch, tmp_path, devices, arch_list, is_loaded
):
    """The build was made for several architectures, on a machine without a GPU."""

    def load_inline(name, build_directory, **arguments):
        flags = "".join(arguments["extra_cuda_cflags"])
        made.append("arch=compute_90a,code=sm_90a" in flags and "code=compute_100" in flags)
        shutil.copy(tmp_path / "it.so", Path(build_directory, f"{name}.so"))

    made = []  # for each build, whether it has code for 9.0 and 10.0
    monkeypatch.setenv("CUDA_HOME", toolkit(tmp_path / "home"))
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path / "home"))
    compile_it = ["c++", "-shared", "-xc++", "/dev/null", "-o", "it.so"]
    subprocess.run(compile_it, cwd=tmp_path, check=True)
    for gpus, targets in (([], "8.0;9.0;10.0+PTX"), (devices, arch_list)):
        fake_cuda(monkeypatch, gpus)
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", targets)
        monkeypatch.setattr(torch.ops, "loaded_libraries", set())
        load_extensions({"greet": SOURCES | {"greet/a.cu": ""}}, load_inline)
    assert made == ([True] if is_loaded else [True, False])


def test_avx2_is_used_if_the_cpu_has_it(monkeypatch):
    for capability, has_avx2 in (("DEFAULT", False), ("AVX2", True), ("AVX512", True)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda c=capability: c)
        assert ("-mavx2" in toolchain.cpu_flags()) == has_avx2


@pytest.mark.parametrize("compiler", ["g++-11", "g++", "clang++"])
def test_compilers_accept_all_flags_without_a_warning(compiler, tmp_path):
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")
    command = [compiler, *toolchain.CXX_FLAGS, "-Werror", "-c", "-xc++", "/dev/null", "-o", "a.o"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr == ""


def test_versions_are_compared_in_english(monkeypatch, tmp_path):
    """GCC translates the text of `--version` to the language of the locale."""
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    compiler = tool(tmp_path, "c++", 'echo "c++ 12 $LC_ALL"')
    assert toolchain.read_version(str(compiler)) == "12 C"


def test_empty_variables_of_compilers_count_as_not_set(monkeypatch):
    """Torch would take the empty values for the compilers' names."""
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PYTORCH_NVCC", "")
    tools = dataclasses.replace(toolchain.find_toolchain(), cuda_home=Path("/toolkit"))
    with toolchain.build_environment(tools):
        assert toolchain.cxx_compiler() == cpp_extension.get_cxx_compiler() == "c++"
        assert os.environ["PYTORCH_NVCC"] == "/toolkit/bin/nvcc"
    assert os.environ["CXX"] == os.environ["PYTORCH_NVCC"] == ""


def test_ninja_is_found_beside_python(tmp_path, monkeypatch):
    """It is not on PATH if the virtual environment is not activated."""
    tool(tmp_path / "bin", "c++", "")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda name: str(tmp_path / "scripts"))
    assert "building the kernels needs ninja: pip install ninja" in error_of()
    ninja = tool(tmp_path / "scripts", "ninja", "")
    assert toolchain.find_ninja() == str(ninja)


def test_a_missing_compiler_gives_an_error(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "C++ compiler; 'no-such-compiler' is not on PATH" in error_of()


NVCC = (
    'case $1 in --version) echo "nvcc: release 13.0, V";; '
    r'--list-gpu-arch) printf "compute_80\ncompute_90\ncompute_100\ncompute_75\n";; esac'
)


def toolkit(home, script=NVCC):
    """Make a folder like that of a CUDA toolkit; return its path."""
    tool(home / "bin", "nvcc", script)
    (home / "include").mkdir()
    (home / "include" / "cuda_runtime.h").touch()
    return str(home)


@pytest.fixture
def no_toolkit(monkeypatch):
    """Hide the toolkits of this machine."""
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda p: "/usr/local/cuda" not in str(p) and exists(p))
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if not Path(p, "nvidia").is_dir()])
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)


@pytest.mark.parametrize(
    ("devices", "arch_list", "remedy"),
    [
        ([(9, 0)], "", "CUDA_VISIBLE_DEVICES="),
        ([], "9.0", "TORCH_CUDA_ARCH_LIST="),
        # Without a visible GPU, the variable would count.
        ([(9, 0)], "9.0", "CUDA_VISIBLE_DEVICES= TORCH_CUDA_ARCH_LIST="),
    ],
)
def test_a_missing_nvcc_gives_an_error_with_remedies(
    monkeypatch, no_toolkit, tmp_path, devices, arch_list, remedy
):
    fake_cuda(monkeypatch, devices)
    monkeypatch.setattr(toolchain, "find_ninja", lambda: "ninja")
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: name if name == "c++" else None)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", arch_list)
    for home in (None, str(tmp_path)):
        monkeypatch.setattr(cpp_extension, "CUDA_HOME", home)
        with pytest.raises(BuildError, match="needs nvcc and its headers") as error:
            toolchain.check_tools(toolchain.find_toolchain())
        assert f"or set {remedy} to build for the CPU" in str(error.value)
        assert 'pip install "cuda-toolkit[nvcc,cccl]==13.0.*"' in str(error.value)


def test_the_toolkit_of_pip_is_found_and_linked(monkeypatch, no_toolkit, tmp_path):
    """A toolkit from pip has no file `libcudart.so`, and torch itself may not find the toolkit."""
    fake_cuda(monkeypatch, [(9, 0)])
    home = tmp_path / "nvidia" / "cu13"
    toolkit(home)
    (home / "lib").mkdir()
    (home / "lib" / "libcudart.so.13").write_text("library")
    tool(tmp_path / "wrapper" / "bin", "nvcc", NVCC)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    for found in (None, str(tmp_path / "wrapper"), str(home)):
        monkeypatch.setattr(cpp_extension, "CUDA_HOME", found)
        tools = toolchain.find_toolchain()
        assert tools.cuda_home == home
        toolchain.link_cuda_runtime(tools, tmp_path)
        assert (tmp_path / "libcudart.so").read_text() == "library"
        (tmp_path / "libcudart.so").unlink()


def test_nvcc_gets_a_flag_for_each_target():
    targets = [
        flag.partition("arch=")[2] for flag in toolchain.cuda_flags(["compute_80", "sm_90a"])
    ]
    assert targets[-2:] == ["compute_80,code=compute_80", "compute_90a,code=sm_90a"]


def test_a_torch_without_cuda_ignores_the_variable_and_says_so(monkeypatch, capfd):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    assert toolchain.cuda_targets() == []
    toolchain.warn_of_ignored_targets()
    assert "this torch is built without CUDA" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (NVCC.replace("13.0", "11.8"), r"expected an nvcc of CUDA 13\.0, got .*release 11\.8"),
        ("exit 1", r"expected an nvcc of CUDA 13\.0, got .*nvcc: ''"),
        (NVCC, "can't compile for sm_120"),
    ],
)
def test_an_nvcc_of_another_version_gives_an_error(monkeypatch, tmp_path, script, message):
    fake_cuda(monkeypatch, [(8, 0), (9, 0), (12, 0)])
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", toolkit(tmp_path / "home", script))
    with pytest.raises(BuildError, match=message):
        toolchain.check_tools(toolchain.find_toolchain())


def test_a_small_stack_is_named_in_the_error(tmp_path):
    """With `ulimit -s 512` build tools are killed without a message."""
    code = """
        import resource
        from torch.utils.cpp_extension import load_inline
        from kernels.build.extension import load_extensions
        resource.setrlimit(resource.RLIMIT_STACK, (512 << 10, 512 << 10))
        load_extensions({"a": {"a/a.cpp": "int x;"}}, load_inline)
    """
    done = python(code, tmp_path)
    if done.returncode != 0:  # on some machines the tools need less
        assert "was killed by signal" in done.stderr
        assert "The stack is limited to 512 KiB: ulimit -s 8192" in done.stderr


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_compiler_errors_come_first_and_name_the_file(monkeypatch, compiler):
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")
    monkeypatch.setenv("CXX", compiler)
    broken = SOURCES["greet/greet.cpp"] + "int broken() { return nothing; }\n"
    first, *rest = error_of({**SOURCES, "greet/greet.cpp": broken}).splitlines()
    assert first.startswith("kernels/greet/greet.cpp:3:")
    assert "nothing" in first
    assert "The whole output:" in rest


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exit 1", "the C++ compiler does not work: "),
        ("exit 0", "the library that was just built does not load: "),
        ('case " $* " in *" -c "*) exit 1;; *) exec c++ "$@";; esac',
         "FAILED: a build tool ended with exit status 1"),
        ('case " $* " in *" -c "*) kill -9 $$;; *) exec c++ "$@";; esac',
         "a build tool was killed by signal 9 (SIGKILL), without a message"),
        ('case " $* " in *" -c "*) echo "a.cpp:1:10: sorry, unimplemented: omp.h" >&2; exit 1;; '
         '*) exec c++ "$@";; esac', "a.cpp:1:10: sorry, unimplemented: omp.h"),
        ('case " $* " in *-shared*) exec c++ "$@" -lnothing;; *) exec c++ "$@";; esac',
         "cannot find -lnothing"),
    ],
)  # fmt: skip
def test_the_first_line_says_why_a_compiler_failed(monkeypatch, tmp_path, script, message):
    version = subprocess.check_output(["ninja", "--version"], text=True)
    if tuple(map(int, version.split(".")[:2])) < (1, 13) and " tool " in message:
        message = "a build tool failed without a message"  # this ninja reports no exit status
    monkeypatch.setenv("CXX", str(tool(tmp_path, "failing-c++", script)))
    assert message in error_of().splitlines()[0]
    assert not [*tmp_path.glob("cache/*/*-*")]  # no build is left, finished or not


@pytest.mark.parametrize(
    ("first", "last", "hint"),
    [
        ("clang: error: unknown argument: '-fx'", "", ""),
        ("/usr/bin/ld: cannot find -lcudart: No such file", "collect2: error: ld returned 1", ""),
        ("ld.lld: unable to open x", "clang: error: linker command failed with exit code 1", ""),
        ("collect2: fatal error: ld terminated with signal 11", "", ""),
        ("/usr/bin/ld: final link failed: No space left on device", "collect2: error: ld returned",
         "set TORCH_EXTENSIONS_DIR"),
        ("a.h:12:10: fatal error: 'omp.h' file not found", "", "apt-get install libomp-dev"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "", "MAX_JOBS=1"),
        ("kernels/relu.cu(3): error: no x", "", ""),
        ("nvcc fatal   : Unsupported gpu architecture 'compute_20'", "", ""),
    ],
)  # fmt: skip
def test_the_first_real_error_is_found_and_explained(first, last, hint):
    """The lines are those of the tools of GCC 12, LLVM 14 and CUDA 13."""
    log = f"[1/2] c++ -Wno-error -c main.cpp\nFAILED: main.o \n{first}\n{last}\nninja: stopped."
    found, *hints = errors.find_cause(log).splitlines()
    assert found == first
    assert bool(hints) == bool(hint)
    assert hint in "".join(hints)


def test_an_error_that_is_not_of_a_build_tool_keeps_its_message():
    error = errors.explain(RuntimeError("CUDA error: out of memory"), Path())
    assert str(error) == "CUDA error: out of memory"


def test_an_import_that_fails_has_one_traceback_with_our_error(tmp_path):
    code = """
        from torch.utils.cpp_extension import load_inline
        from kernels.build.extension import load_extensions
        load_extensions({"a": {"a/a.cpp": "int x = nothing;"}}, load_inline)
    """
    error = python(code, tmp_path).stderr
    assert "kernels.build.errors.BuildError: kernels/a/a.cpp:1:9: error: " in error
    assert error.count("Traceback") == 1
