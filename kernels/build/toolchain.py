"""The build tools: flags, targets of nvcc, where compilers are, their first error."""

import contextlib
import importlib
import logging
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

LOGGER = logging.getLogger("kernels")
CXX_FLAGS = [
    "-O3",  # -O2 of GCC vectorizes only where that needs no extra code (GCC 12)
    "-falign-loops=64",  # a loop of 31 bytes in two lines takes 1.1 to 1.5 times as long (EPYC)
    "-ffp-contract=off",  # the same bits with and without an FMA unit
    "-fopenmp",
    "-fvisibility=hidden",
    "-DAT_PER_OPERATOR_HEADERS",  # torch's headers include the operators they use, not all 2,000
]
CUDA_FLAGS = [
    "--split-compile=0",  # a thread a core: all kernels are one file to nvcc
    "-std=c++17",  # the C++20 that newer torch asks for takes a tenth longer
    # torch switches these off; with them, a kernel means the same here and compiled alone.
    *(f"-U__CUDA_NO_{name}__" for name in ("HALF_OPERATORS", "HALF2_OPERATORS")),
    *(f"-U__CUDA_NO_{name}_CONVERSIONS__" for name in ("HALF", "BFLOAT16")),
]
# The first real error in a build's output, best first. A linker's driver says last that it failed.
ERRORS = (
    r"^(?!collect2: error|.*linker command failed).*\b(?:error|fatal) *: .*$",
    r"^.*(?:No space left on device|cannot find |undefined reference ).*$",
    r"^.*\bld(?:\.\w+)?: (?!warning).*$",
    r"^.*\berror: .*$|^FAILED: .*$",
)
HINTS = {
    r"\bomp\.h\b|-lomp\b": "Install the compiler's OpenMP (apt-get install libomp-dev) or set CXX",
    r"No space left on device": "Free some space, or set TORCH_EXTENSIONS_DIR and TMPDIR",
    r"Killed signal|died due to signal 9": "Memory ran out: set MAX_JOBS=1",
}


class BuildError(RuntimeError):
    """The kernels can't be built or loaded here; the message says why, and what helps."""


def demand(condition: object, message: str) -> None:
    if not condition:
        raise BuildError(message)


def torch_tools() -> ModuleType:
    return importlib.import_module("torch.utils.cpp_extension")  # for a second


def cpu_flags() -> list[str]:
    """CXX_FLAGS, AVX2 and F16C where torch uses them; AVX-512 is no faster in a cache (EPYC 9005).

    GCC, taken for any compiler but clang, collects no garbage then: a seventh of its time.
    """
    has_avx2 = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    saving = ["--param=ggc-min-heapsize=4000000"] * ("clang" not in os.environ.get("CXX", ""))
    return [*CXX_FLAGS, *saving, *["-mavx2", "-mf16c"] * has_avx2]


def cuda_targets() -> list[str]:
    """The targets of nvcc here: SASS as `sm_90a`, PTX as `compute_90`; nothing for the CPU alone.

    Those of the visible GPUs; where there is none, of TORCH_CUDA_ARCH_LIST, for building ahead.
    """
    targets, wanted = set(), os.environ.get("TORCH_CUDA_ARCH_LIST")
    if torch.version.cuda and torch.cuda.is_available():
        gpus = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
        targets = {f"sm_{major}{minor}" for major, minor in gpus}
    elif torch.version.cuda and wanted:
        with contextlib.suppress(ValueError, LookupError):
            flags = torch_tools()._get_cuda_arch_flags()
            targets = {flag.rpartition("code=")[2] for flag in flags}
        demand(targets, f"torch does not know each entry of TORCH_CUDA_ARCH_LIST={wanted!r}")
    # Only code for sm_90a has wgmma.
    return sorted("sm_90a" if target == "sm_90" else target for target in targets)


def serving(target: str) -> set[str]:
    """The codes that GPUs of a target run: its own, SASS of its major version, and older PTX."""
    number = int(re.sub(r"\D", "", target))
    older = {f"sm_{n}" for n in range(number // 10 * 10, number)}
    older |= {f"compute_{n}" for n in range(number + 1)}
    return {target} if target[-1] == "a" else {target} | older


def check_compiler() -> None:
    """Raises BuildError where ninja or the C++ compiler is missing."""
    scripts, cxx = sysconfig.get_path("scripts"), os.environ.get("CXX", "c++")
    if shutil.which("ninja") is None:  # it may be in an environment that was never activated
        os.environ["PATH"] = os.environ.get("PATH", "") + os.pathsep + scripts
    demand(shutil.which("ninja"), "building the kernels needs ninja: pip install ninja")
    missing = f"building the kernels needs a C++ compiler; {cxx!r} is not on PATH. Install one"
    demand(shutil.which(cxx), f"{missing} (apt-get install g++), or name yours in CXX")


def cuda_flags(targets: list[str], folder: Path) -> list[str]:
    """The flags of nvcc, once torch knows a toolkit that has it and can make `targets`.

    Where torch found none, the usual place is tried, and pip's, which lacks `libcudart.so`: there
    will be a link in `folder`, where the linker runs.
    """
    if not targets:
        return []
    cuda, major = torch.version.cuda, torch.version.cuda.split(".")[0]
    homes = [torch_tools().CUDA_HOME or "", "/usr/local/cuda"]
    homes += [f"{place}/nvidia/cu{major}" for place in sys.path]
    parts = ("bin/nvcc", "include/cuda_runtime.h")
    homes = [home for home in homes if all(Path(home, part).exists() for part in parts)]
    hide = "CUDA_VISIBLE_DEVICES=" if torch.cuda.is_available() else "TORCH_CUDA_ARCH_LIST="
    advice = f"Install the CUDA toolkit {cuda} and set CUDA_HOME to its folder, or from CUDA 13 on "
    advice += f'pip install "cuda-toolkit[nvcc]=={cuda}.*"; or set {hide} to build for the CPU'
    demand(homes, f"building the kernels for CUDA needs nvcc and its headers. {advice}")
    nvcc = os.environ.get("PYTORCH_NVCC") or f"{homes[0]}/bin/nvcc"
    options = ([nvcc, "--version"], [nvcc, "--list-gpu-arch"])
    version, known = (subprocess.run(o, capture_output=True, text=True).stdout for o in options)
    is_right = f"release {major}." in version
    demand(is_right, f"expected an nvcc of CUDA {cuda}, got {nvcc}: {version!r}. {advice}")
    for target in targets:
        is_known = "compute_" + re.sub(r"\D", "", target) in known.split()
        demand(is_known, f"{nvcc} can't compile for {target}. {advice}")
    torch_tools().CUDA_HOME = homes[0]
    for library in sorted(Path(homes[0]).glob("lib*/libcudart.so.*"))[-1:]:
        (folder / "libcudart.so").symlink_to(library)
    pairs = [(target.replace("sm_", "compute_"), target) for target in targets]
    return CUDA_FLAGS + [f"-gencode=arch={arch},code={code}" for arch, code in pairs]


def first_error(output: str) -> str:
    """The first real error in what the build tools wrote, and what helps against it, if known."""
    found = (re.search(error, output, re.MULTILINE) for error in ERRORS)
    lines = [match[0] for match in found if match] or ["a build tool failed without a message"]
    return "\n".join([lines[0], *(hint for sign, hint in HINTS.items() if re.search(sign, output))])
