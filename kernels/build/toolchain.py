"""The compilers of this machine, the GPUs to compile for, and the compilers' flags."""

import contextlib
import importlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from kernels.build.errors import BuildError, say

CXX_FLAGS = [
    "-O3",  # with -O2, GCC 12 vectorizes only loops that need no checks and no remainder loop
    "-falign-loops=64",  # a short loop across two cache lines is slower (docs/EXPERIMENTS.md)
    "-ffp-contract=off",  # on aarch64, GCC would use FMA, which rounds differently
    "-fopenmp",
    "-fvisibility=hidden",
    "-DAT_PER_OPERATOR_HEADERS",  # torch's headers include only operators they use, not all 2,000
]
CUDA_FLAGS = [
    "--split-compile=0",  # a thread for each core; by default one per file
    "-std=c++17",  # newer versions of torch ask for C++20, which takes a tenth longer to compile
    # torch defines these macros, which remove operators and conversions of half types. -U undefines
    # them, so that kernels have the operators that plain nvcc gives them.
    "-U__CUDA_NO_HALF_OPERATORS__",
    "-U__CUDA_NO_HALF2_OPERATORS__",
    "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
]
# GCC's garbage collector takes a seventh of the compilation's time. With this flag it does not run
# before the heap has 4,000,000 KiB.
GCC_SPEED_FLAGS = ["--param=ggc-min-heapsize=4000000"]


@dataclass(frozen=True)
class Toolchain:
    """The compilers, and the GPUs that they compile for.

    Attributes:
        targets: nvcc's targets, such as `sm_90a` (machine code) or `compute_90` (PTX). Empty if
            only the CPU's kernels are built.
        cuda_home: the folder of the CUDA toolkit. None if none is found, or `targets` is empty.
        compilers: the version text of each compiler, under the keys `cxx` and, if there are
            targets, `nvcc`. The text is empty if the compiler is missing, which is no error here:
            a finished build can be loaded without any compiler.
    """

    targets: list[str]
    cuda_home: Path | None
    compilers: dict[str, str]

    @property
    def is_gcc(self) -> bool:
        """True if the C++ compiler is GCC, which may be called `c++` or `g++-12`."""
        return "Free Software Foundation" in self.compilers["cxx"]


def find_toolchain() -> Toolchain:
    """Find the compilers and GPUs of this machine.

    It imports torch's build tools, which takes a second, only if `cuda_targets` has to read
    TORCH_CUDA_ARCH_LIST.
    """
    targets = cuda_targets()
    cuda_home = find_cuda_home() if targets else None
    compilers = {"cxx": read_version(cxx_compiler())}
    if targets:
        compilers["nvcc"] = read_version(nvcc_compiler(cuda_home)) if cuda_home else ""
    return Toolchain(targets, cuda_home, compilers)


# ---------------------------------------------------------------------------------- what to build


def cpu_flags() -> list[str]:
    """Return `CXX_FLAGS`, and where torch uses AVX2 or AVX-512 also the flags for AVX2 and F16C.

    There are no flags for AVX-512, which is no faster on data in the CPU's caches (EPYC 9005).
    """
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        return [*CXX_FLAGS, "-mavx2", "-mf16c"]
    return CXX_FLAGS


def cuda_targets() -> list[str]:
    """Return nvcc's targets: those of the visible GPUs or, if there are none, the requested ones.

    TORCH_CUDA_ARCH_LIST requests targets, so that a machine without a GPU can build for one.

    Returns:
        The targets, sorted, as in `Toolchain.targets`.

    Raises:
        BuildError: torch does not know an entry of the variable.
    """
    if not torch.version.cuda:
        return []
    if torch.cuda.is_available():
        capabilities = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
        targets = {f"sm_{major}{minor}" for major, minor in capabilities}
    elif os.environ.get("TORCH_CUDA_ARCH_LIST"):
        targets = _requested_targets()
    else:
        return []
    # Only code for sm_90a has wgmma, Hopper's tensor-core instructions.
    return sorted({"sm_90a" if target == "sm_90" else target for target in targets})


def _requested_targets() -> set[str]:
    """Return the targets that TORCH_CUDA_ARCH_LIST names, as torch's build tools read it."""
    try:
        flags = cpp_extension()._get_cuda_arch_flags()
    except (ValueError, LookupError):
        # The value "native" means the visible GPUs. If there are none, torch raises a LookupError.
        arch_list = os.environ["TORCH_CUDA_ARCH_LIST"]
        raise BuildError(
            f"torch cannot compile for TORCH_CUDA_ARCH_LIST={arch_list!r}; expected "
            'compute capabilities such as "9.0", or several such as "8.0;9.0+PTX"'
        ) from None
    # A flag is, for example, "-gencode=arch=compute_90,code=sm_90".
    return {flag.rpartition("code=")[2] for flag in flags}


def warn_of_ignored_targets() -> None:
    """Warn if TORCH_CUDA_ARCH_LIST is set, but torch is built without CUDA."""
    if os.environ.get("TORCH_CUDA_ARCH_LIST") and not torch.version.cuda:
        say(
            "TORCH_CUDA_ARCH_LIST is ignored, because this torch is built without CUDA; the "
            "kernels are compiled for CPUs alone"
        )


def compatible_targets(target: str) -> set[str]:
    """Return the targets of builds that may be loaded where `target` is needed.

    A GPU runs its own machine code, that of lower minor versions of its major version, and PTX of
    its own or an older version. For example, a GPU of `sm_86` runs `sm_80` and `compute_75`.

    If `target` is PTX, or ends with an "a", only a build for exactly this target may be loaded. A
    user who asks for PTX expects it in the build, for GPUs that are not in this machine. A Hopper
    GPU could also run code for `sm_90`, but only code for `sm_90a` has the wgmma kernels.
    """
    if target.endswith("a") or target.startswith("compute_"):
        return {target}
    number = int(re.sub(r"\D", "", target))  # 86
    first_of_major_version = number // 10 * 10  # 80
    # Both sets have targets that do not exist, such as sm_81. No build has them.
    machine_codes = {f"sm_{n}" for n in range(first_of_major_version, number)}
    ptx = {f"compute_{n}" for n in range(number + 1)}
    return {target} | machine_codes | ptx


def cuda_flags(targets: list[str]) -> list[str]:
    """Return `CUDA_FLAGS`, and the flags that make nvcc compile for these targets."""
    flags = list(CUDA_FLAGS)
    for target in targets:
        architecture = target.replace("sm_", "compute_")
        flags.append(f"-gencode=arch={architecture},code={target}")
    return flags


# ---------------------------------------------------------------------------------- the compilers


def cpp_extension() -> ModuleType:
    """Return the module of torch's build tools. Its first import takes a second."""
    return importlib.import_module("torch.utils.cpp_extension")


def cxx_compiler() -> str:
    """Return the C++ compiler for builds: a name or a path. Arguments in CXX are not supported."""
    chosen = os.environ.get("CXX")
    return chosen if chosen else "c++"


def nvcc_compiler(cuda_home: Path) -> str:
    """Return the path of the nvcc that torch calls when its CUDA_HOME is `cuda_home`."""
    chosen = os.environ.get("PYTORCH_NVCC")
    return chosen if chosen else str(cuda_home / "bin" / "nvcc")


def read_version(compiler: str) -> str:
    """Return what `--version` prints, without the first word; empty if the compiler is missing.

    GCC's first word is the name by which it was called. Without it, `c++` and `g++-12` have the
    same version text if they are the same compiler. LC_ALL=C keeps GCC from translating the rest
    to the user's language.
    """
    try:
        done = subprocess.run(
            [compiler, "--version"],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"LC_ALL": "C"},
        )
    except OSError:
        return ""
    _, _, version = done.stdout.partition(" ")
    return version.strip()


def find_cuda_home() -> Path | None:
    """Return the first folder that has nvcc and its headers, or None.

    The folders are those in which torch looks, and those where pip installs a toolkit.
    """
    # If torch's build tools are imported already, a user may have set CUDA_HOME in that module.
    build_tools = sys.modules.get("torch.utils.cpp_extension")
    nvcc = shutil.which("nvcc")
    major = torch.version.cuda.split(".")[0]
    candidates = [
        getattr(build_tools, "CUDA_HOME", None),
        os.environ.get("CUDA_HOME"),
        os.environ.get("CUDA_PATH"),
        str(Path(nvcc).parent.parent) if nvcc else None,
        "/usr/local/cuda",
        *(f"{folder}/nvidia/cu{major}" for folder in sys.path),
    ]
    for candidate in filter(None, candidates):
        home = Path(candidate)
        if (home / "bin" / "nvcc").exists() and (home / "include" / "cuda_runtime.h").exists():
            return home
    return None


def check_tools(toolchain: Toolchain) -> None:
    """Raise a BuildError that says what is missing for a build, and how to get it."""
    if find_ninja() is None:
        raise BuildError("building the kernels needs ninja: pip install ninja")
    cxx = cxx_compiler()
    if shutil.which(cxx) is None:
        raise BuildError(
            f"building the kernels needs a C++ compiler; {cxx!r} is not on PATH. Install one "
            "(apt-get install g++), or name yours in CXX"
        )
    if toolchain.targets:
        _check_nvcc(toolchain)


def _check_nvcc(toolchain: Toolchain) -> None:
    """Raise a BuildError if nvcc is missing, is not of torch's CUDA version, or lacks a target.

    Only the major version counts.
    """
    cuda = torch.version.cuda
    # To get only the CPU's kernels, a user has to empty CUDA_VISIBLE_DEVICES if there are visible
    # GPUs, and also TORCH_CUDA_ARCH_LIST if it has a value. The advice below says so.
    variables = []
    if torch.cuda.is_available():
        variables.append("CUDA_VISIBLE_DEVICES=")
    if os.environ.get("TORCH_CUDA_ARCH_LIST"):
        variables.append("TORCH_CUDA_ARCH_LIST=")
    advice = (
        f"Install the CUDA toolkit {cuda} and set CUDA_HOME to its folder, or (since CUDA 13) "
        f'pip install "cuda-toolkit[nvcc,cccl]=={cuda}.*"; '
        f"or set {' '.join(variables)} to build for the CPU"
    )
    if toolchain.cuda_home is None:
        raise BuildError(f"building the kernels for CUDA needs nvcc and its headers. {advice}")
    nvcc = nvcc_compiler(toolchain.cuda_home)
    version = toolchain.compilers["nvcc"]
    if f"release {cuda.split('.')[0]}." not in version:
        raise BuildError(f"expected an nvcc of CUDA {cuda}, got {nvcc}: {version!r}. {advice}")
    done = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=False)
    # The list has no entries with an "a": an nvcc that can compile for `sm_90a` lists `compute_90`.
    for target in toolchain.targets:
        if "compute_" + re.sub(r"\D", "", target) not in done.stdout.split():
            raise BuildError(f"{nvcc} can't compile for {target}. {advice}")


def find_ninja() -> str | None:
    """Return the path of ninja, or None.

    pip installs it beside Python. That folder is not on PATH if the virtual environment is not
    activated.
    """
    on_path = shutil.which("ninja")
    if on_path is not None:
        return on_path
    return shutil.which("ninja", path=sysconfig.get_path("scripts"))


@contextlib.contextmanager
def build_environment(toolchain: Toolchain) -> Iterator[None]:
    """Set the environment of a build, and restore it at the end. Call `check_tools` before.

    PATH gets the folder of ninja. torch's `CUDA_HOME` becomes the toolkit's folder. The compilers'
    messages become English so that `errors.py` finds the cause of an error in them. CXX and
    PYTORCH_NVCC become what `cxx_compiler` and `nvcc_compiler` return, because torch would take an
    empty value for the compiler's name.
    """
    build_tools = cpp_extension()
    cuda_home_before = build_tools.CUDA_HOME
    changes = {
        "PATH": os.environ.get("PATH", "") + os.pathsep + str(Path(find_ninja()).parent),
        "LC_ALL": "C",
        "CXX": cxx_compiler(),
    }
    if toolchain.cuda_home is not None:
        changes["PYTORCH_NVCC"] = nvcc_compiler(toolchain.cuda_home)
        build_tools.CUDA_HOME = str(toolchain.cuda_home)
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        build_tools.CUDA_HOME = cuda_home_before
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def link_cuda_runtime(toolchain: Toolchain, folder: Path) -> None:
    """Make a symbolic link `libcudart.so` in a folder, for the linker to find.

    A toolkit from pip has only a file with a version in its name, such as `libcudart.so.13`. For
    other toolkits the link does no harm.
    """
    if toolchain.cuda_home is not None:
        libraries = sorted(toolchain.cuda_home.glob("lib*/libcudart.so.*"))
        if libraries:
            (folder / "libcudart.so").symlink_to(libraries[-1])
