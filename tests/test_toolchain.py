"""The build tools: targets, flags, what is said when a tool is missing or fails."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from kernels.build import extension as build
from kernels.build import toolchain
from kernels.build.toolchain import BuildError

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {
    "greet.h": "#pragma once\n#define ANSWER 42\n",
    "greet.cpp": '#include "greet.h"\nint answer() { return ANSWER; }\n',
}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    for name in ("TORCH_CUDA_ARCH_LIST", "PYTORCH_NVCC", "CUDA_HOME", "CUDA_PATH", "CXX"):
        monkeypatch.delenv(name, raising=False)


class FakeCuda:
    """The parts of torch.cuda and torch.version that are asked."""

    def __init__(self, monkeypatch, devices, cuda="13.0"):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(devices))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: devices[device])


def tool(folder, name, script):
    """An executable that runs a line of shell."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


# ------------------------------------------------------------------------------------------ targets


@pytest.mark.parametrize(
    ("devices", "wanted", "expected"),
    [
        ([(9, 0)], None, ["sm_90a"]),
        ([(9, 0), (8, 0), (9, 0)], None, ["sm_80", "sm_90a"]),
        ([(12, 0)], "Hopper", ["sm_120"]),
        ([], "Hopper", ["compute_90", "sm_90a"]),
        ([], "9.0", ["sm_90a"]),
        ([], "9.0a;8.0+PTX", ["compute_80", "sm_80", "sm_90a"]),
        ([], "8.0;9.0;10.0+PTX", ["compute_100", "sm_100", "sm_80", "sm_90a"]),
        ([], "Ampere Ada", ["compute_86", "compute_89", "sm_80", "sm_86", "sm_89"]),
        ([], "8.0; 10.3a", ["sm_103a", "sm_80"]),
        ([], "", []),
        ([], None, []),
    ],
)
def test_targets(monkeypatch, devices, wanted, expected):
    FakeCuda(monkeypatch, devices)
    if wanted is not None:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", wanted)
    assert toolchain.cuda_targets() == expected


KEPLER_TO_HOPPER = [name.title() for name in toolchain.ARCHITECTURES][:12]


@pytest.mark.parametrize("wanted", [*KEPLER_TO_HOPPER, "7.5", "8.6+PTX", "10.0a", "12.1a+PTX"])
def test_entries_mean_what_they_mean_to_torch(monkeypatch, wanted):
    FakeCuda(monkeypatch, [])
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", wanted)
    flags = [re.sub(".*code=", "", flag) for flag in cpp_extension._get_cuda_arch_flags()]
    assert toolchain.cuda_targets() == sorted("sm_90a" if f == "sm_90" else f for f in flags)


@pytest.mark.parametrize(
    "entry", ["all", "native", "Hoper", "9", "90", "9.0b", "Ada+PTX", "8.0,9.0"]
)
def test_entry_that_is_not_understood(monkeypatch, entry):
    FakeCuda(monkeypatch, [])
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", f"8.0;{entry}")
    message = rf"expected in TORCH_CUDA_ARCH_LIST .* such as 9\.0 .*, got '{re.escape(entry)}'"
    with pytest.raises(BuildError, match=message):
        toolchain.cuda_targets()


def test_no_cuda_in_torch_means_the_cpu_alone(monkeypatch):
    FakeCuda(monkeypatch, [], cuda=None)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    assert toolchain.cuda_targets() == []


@pytest.mark.parametrize(
    ("target", "serves", "does_not"),
    [
        ("sm_80", [(8, 0), (8, 6), (8, 9)], [(7, 5), (9, 0), (8, 7), (10, 0)]),
        ("sm_86", [(8, 6), (8, 9)], [(8, 0), (12, 0)]),
        ("sm_87", [(8, 7)], [(8, 0), (8, 9)]),
        ("sm_90a", [(9, 0)], [(8, 0), (10, 0)]),
        ("sm_100a", [(10, 0)], [(10, 3), (9, 0)]),
        ("sm_100", [(10, 0), (10, 3)], [(12, 0), (11, 0)]),
        ("compute_80", [(8, 0), (8, 7), (12, 0)], [(7, 5), (9, 0)]),
        ("compute_90", [(10, 0), (12, 1)], [(9, 0), (8, 9)]),
        ("compute_90a", [(9, 0)], [(10, 0)]),
    ],
)
def test_which_gpus_a_target_serves(target, serves, does_not):
    assert all(toolchain.runs_on(target, gpu) for gpu in serves)
    assert not any(toolchain.runs_on(target, gpu) for gpu in does_not)


@pytest.mark.parametrize(
    ("devices", "wanted", "is_loaded"),
    [
        ([(9, 0)], None, True),
        ([(8, 0), (9, 0)], None, True),
        ([(12, 0)], None, True),
        ([(7, 5)], None, False),
        ([(9, 0), (7, 5)], None, False),
        ([], "9.0", True),
        ([], "8.0;9.0;10.0+PTX", True),
        ([], "8.6", False),
    ],
)
def test_build_made_ahead(monkeypatch, tmp_path, devices, wanted, is_loaded):
    """One build for several architectures serves each machine whose GPUs it covers."""
    FakeCuda(monkeypatch, devices)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", wanted or "")
    held = ["compute_100", "sm_100", "sm_80", "sm_90a"]
    monkeypatch.setattr(build, "finished_builds", lambda root, name: [(tmp_path / "it.so", held)])
    monkeypatch.setattr(build, "load_library", lambda name, library: library)
    monkeypatch.setattr(build, "take_turn", lambda root, recipe: recipe.targets)
    loaded = build.load({"a.cpp": ""}, None)
    assert loaded == (tmp_path / "it.so" if is_loaded else toolchain.cuda_targets())


# -------------------------------------------------------------------------------------------- tools


@pytest.mark.parametrize(
    ("capability", "has_avx2"),
    [("DEFAULT", False), ("AVX2", True), ("AVX512", True), ("SVE256", False)],
)
def test_flags_for_the_cpu(monkeypatch, capability, has_avx2):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert ("-mavx2" in toolchain.cpu_flags()) == has_avx2


@pytest.mark.parametrize("compiler", ["g++-11", "g++", "clang++"])
def test_compilers_know_the_flags(compiler, tmp_path):
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")
    (tmp_path / "empty.cpp").touch()
    command = [compiler, *toolchain.CXX_FLAGS, "-Werror", "-c", "empty.cpp"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr == ""


def test_ninja_of_an_environment_that_is_not_activated(tmp_path, monkeypatch):
    tool(tmp_path / "bin", "c++", "")
    tool(tmp_path / "scripts", "ninja", "")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    get_path = toolchain.sysconfig.get_path
    monkeypatch.setattr(
        toolchain.sysconfig,
        "get_path",
        lambda name: str(tmp_path / "scripts") if name == "scripts" else get_path(name),
    )
    toolchain.check_compiler()


@pytest.mark.parametrize(
    ("path", "cxx", "message"),
    [
        (
            "/usr/bin:/bin",
            "no-such-compiler",
            "C[+][+] compiler; 'no-such-compiler' is not on PATH",
        ),
        ("/nowhere", None, "needs ninja"),
    ],
)
def test_missing_tools_are_named(monkeypatch, path, cxx, message):
    monkeypatch.setenv("PATH", path)
    if cxx is None:
        get_path = toolchain.sysconfig.get_path
        monkeypatch.setattr(
            toolchain.sysconfig, "get_path", lambda name: get_path(name).replace("bin", "no")
        )
    else:
        monkeypatch.setenv("CXX", cxx)
    with pytest.raises(BuildError, match=message):
        build.load(SOURCES, cpp_extension.load_inline)


NVCC = (
    'case $1 in --version) echo "release 13.0, V";; '
    r'--list-gpu-arch) printf "compute_80\ncompute_90\n";; esac'
)


@pytest.mark.parametrize(
    ("devices", "reason", "remedy"),
    [
        ([(9, 0)], "sees a CUDA device", "hide it with CUDA_VISIBLE_DEVICES="),
        ([], "TORCH_CUDA_ARCH_LIST is '9.0'", "unset TORCH_CUDA_ARCH_LIST"),
    ],
)
def test_missing_nvcc(monkeypatch, tmp_path, devices, reason, remedy):
    FakeCuda(monkeypatch, devices)
    monkeypatch.setenv("CUDA_HOME", "of the test")  # or this machine's toolkit is found
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    for home in (None, str(tmp_path)):
        with pytest.raises(BuildError) as error:
            toolchain.find_toolkit(home, ["sm_90a"])
        message = str(error.value)
        assert reason in message
        assert f"{remedy}, to build for the CPU alone" in message
        assert f"CUDA_HOME is {home}" in message
        assert 'pip install "cuda-toolkit[nvcc]==13.0.*"' in message
        assert ("CUDA device" in message) == bool(devices)


def toolkit(home, script=NVCC):
    """A folder like that of a CUDA toolkit."""
    tool(home / "bin", "nvcc", script)
    (home / "include").mkdir()
    (home / "include" / "cuda_runtime.h").touch()
    return str(home)


def test_toolkit_of_pip(monkeypatch, tmp_path):
    """It is found where torch found none, and linked though it lacks `libcudart.so`."""
    FakeCuda(monkeypatch, [])
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda p: "/usr/local/cuda" not in str(p) and exists(p))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    home = tmp_path / "nvidia" / "cu13"
    toolkit(home)
    (home / "lib").mkdir()
    (home / "lib" / "libcudart.so.13").write_text("library")
    tool(tmp_path / "wrapper" / "bin", "nvcc", NVCC)
    for found in (None, str(tmp_path / "wrapper"), str(home)):
        assert toolchain.find_toolkit(found, ["sm_90a"]) == str(home)
    other = toolkit(tmp_path / "other")
    assert toolchain.find_toolkit(other, ["sm_90a"]) == other
    assert toolchain.link_cudart(str(home), tmp_path) == ["-L."]
    assert (tmp_path / "libcudart.so").read_text() == "library"
    (home / "lib" / "libcudart.so").touch()
    assert toolchain.link_cudart(str(home), tmp_path) == []


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (NVCC.replace("13.0", "11.8"), r"expected an nvcc of CUDA 13\.0.*got release 11\.8"),
        ("exit 1", r"expected an nvcc of CUDA 13\.0.*got ''"),
        (NVCC, "can't compile for sm_120; it knows 80, 90"),
    ],
)
def test_nvcc_that_does_not_fit(monkeypatch, tmp_path, script, message):
    FakeCuda(monkeypatch, [(12, 0)])
    home = toolkit(tmp_path / "home", script)
    with pytest.raises(BuildError, match=message):
        toolchain.find_toolkit(home, ["compute_80", "sm_90a", "sm_120"])


# ------------------------------------------------------------------------------------------- errors


def test_joined_sources_name_their_files():
    text = build.join(SOURCES, ".cpp")
    assert text.count("#define ANSWER") == 1
    assert text.splitlines()[:2] == ['#line 1 "kernels/greet.cpp"', '#line 1 "kernels/greet.h"']
    assert '#line 2 "kernels/greet.cpp"\nint answer()' in text
    assert "pragma" not in text


def error_of(sources):
    with pytest.raises(BuildError) as error:
        build.load(sources, cpp_extension.load_inline)
    return str(error.value)


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_compiler_errors_come_first_and_name_the_file(monkeypatch, compiler):
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")
    monkeypatch.setenv("CXX", compiler)
    first, *rest = error_of(
        {**SOURCES, "greet.cpp": SOURCES["greet.cpp"] + "int broken() { return nothing; }\n"}
    ).splitlines()
    assert first.startswith("kernels/greet.cpp:3:")
    assert "nothing" in first
    assert "The whole output:" in rest


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exit 1", "does not work as a C++ compiler: "),
        ("exit 0", "the library that was just built was not written by "),
        ('case " $* " in *" -c "*) exit 1;; *) exec c++ "$@";; esac',
         "a build tool failed without a message (FAILED: "),
        ('case " $* " in *" -c "*) exec c++ "$@";; *-shared*) exit 0;; *) exec c++ "$@";; esac',
         "the library that was just built was not written by "),
        ('case " $* " in *-shared*) exec c++ "$@" -lnothing;; *) exec c++ "$@";; esac',
         "cannot find -lnothing"),
    ],
)  # fmt: skip
def test_compilers_that_fail(monkeypatch, tmp_path, script, message):
    compiler = tool(tmp_path, "failing-c++", script)
    monkeypatch.setenv("CXX", str(compiler))
    assert message in error_of(SOURCES).splitlines()[0]


@pytest.mark.parametrize(
    ("output", "first", "hint"),
    [
        ("clang: error: unknown argument: '-fx'", "clang: error: unknown argument: '-fx'", ""),
        ("/usr/bin/ld: warning: old\n/usr/bin/ld: cannot find -lcudart: No such file\n"
         "collect2: error: ld returned 1 exit status",
         "/usr/bin/ld: cannot find -lcudart: No such file", ""),
        ("ld.lld: unable to open x\nclang: error: linker command failed with exit code 1",
         "ld.lld: unable to open x", ""),
        ("collect2: fatal error: ld terminated with signal 11", "collect2: fatal error: ld "
         "terminated with signal 11", ""),
        ("collect2: error: ld returned 1 exit status",
         "collect2: error: ld returned 1 exit status", ""),
        ("/usr/bin/ld: final link failed: No space left on device\ncollect2: error: ld returned 1",
         "/usr/bin/ld: final link failed: No space left on device", "set TORCH_EXTENSIONS_DIR"),
        ("a.h:12:10: fatal error: 'omp.h' file not found",
         "a.h:12:10: fatal error: 'omp.h' file not found", "apt-get install libomp-dev"),
        ("c++: fatal error: Killed signal terminated program cc1plus",
         "c++: fatal error: Killed signal terminated program cc1plus", "MAX_JOBS=1"),
        ("kernels/relu.cu(3): error: no x", "kernels/relu.cu(3): error: no x", ""),
        ("nvcc fatal   : Unsupported gpu architecture 'compute_20'",
         "nvcc fatal   : Unsupported gpu architecture 'compute_20'", ""),
        ("ptxas error   : Entry function uses too much shared data",
         "ptxas error   : Entry function uses too much shared data", ""),
    ],
)  # fmt: skip
def test_first_error(output, first, hint):
    """Lines as the tools of GCC 12, LLVM 14 and CUDA 13 write them."""
    log = f"[1/2] c++ -Wno-error -c main.cpp\nFAILED: [code=1] main.o \n{output}\nninja: stopped."
    found, *hints = toolchain.first_error(log).splitlines()
    assert found == first
    assert bool(hints) == bool(hint)
    assert hint in "".join(hints)


def test_an_import_that_fails_ends_with_the_error(tmp_path):
    """Not with a traceback of torch's own."""
    code = """
        from torch.utils.cpp_extension import load_inline
        import kernels.build.extension as build
        build.load({'a.cpp': 'int x = nothing;'}, load_inline)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert "kernels.build.toolchain.BuildError: kernels/a.cpp:1:9: error: " in done.stderr
    assert done.stderr.count("Traceback") == 1
