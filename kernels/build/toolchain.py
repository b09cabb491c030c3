"""The build tools: flags, targets of nvcc, where compilers are, their first error.

Nothing here runs on a start that finds a finished build, but for `cpu_flags` and `cuda_targets`.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

CXX_FLAGS = [
    # -O2 of GCC vectorizes only where that needs no extra code: strided views take 1.4 to 5 times
    # as long (GCC 12, EPYC).
    "-O3",
    # A loop of 31 bytes that two lines share takes 1.1 to 1.5 times as long (EPYC 9004).
    "-falign-loops=64",
    "-ffp-contract=off",  # the same bits with and without an FMA unit
    "-fopenmp",
    "-fvisibility=hidden",
    # torch's headers then include the few operators they use, not all 2,000: a second less.
    "-DAT_PER_OPERATOR_HEADERS",
]
CUDA_FLAGS = [
    # All kernels are one file to nvcc. With a thread a core, two cores take 7.5 s instead of 11.
    "--split-compile=0",
    # Enough for what is free of torch; the C++20 that newer torch asks for takes nvcc 0.9 of 8.5 s
    # more, most of it the standard's headers.
    "-std=c++17",
    # torch switches conversions and operators of the half types off; with them, a kernel means the
    # same here and compiled alone.
    "-U__CUDA_NO_HALF_OPERATORS__",
    "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_HALF2_OPERATORS__",
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
]
# The names in TORCH_CUDA_ARCH_LIST, as torch 2.15 reads them.
ARCHITECTURES = {
    "kepler+tesla": "3.7",
    "kepler": "3.5+ptx",
    "maxwell+tegra": "5.3",
    "maxwell": "5.0;5.2+ptx",
    "pascal": "6.0;6.1+ptx",
    "volta+tegra": "7.2",
    "volta": "7.0+ptx",
    "turing": "7.5+ptx",
    "ampere+tegra": "8.7",
    "ampere": "8.0;8.6+ptx",
    "ada": "8.9+ptx",
    "hopper": "9.0+ptx",
    "blackwell+tegra": "11.0",
    "blackwell": "10.0;10.3;12.0;12.1+ptx",
    "rubin": "10.7+ptx",
}
# Code for these and for other GPUs of the same major version is not interchangeable.
TEGRA = {(5, 3), (6, 2), (7, 2), (8, 7), (11, 0)}

# Where the first error stands in the output of a build, best first. A linker's driver ends with a
# line that says only that the linker failed.
ERRORS = [
    r"^(?!collect2: error|.*linker command failed).*\b(?:error|fatal) *: .*$",
    r"^.*(?:No space left on device|cannot find |undefined reference ).*$",
    r"^.*\bld(?:\.\w+)?: (?!warning).*$",
    r"^.*\berror: .*$",
]
HINTS = {
    r"\bomp\.h\b|-lomp\b": "Install the compiler's OpenMP (Debian and Ubuntu: apt-get install "
    "libomp-dev), or name another compiler in the variable CXX",
    r"No space left on device": "Free some space, or set TORCH_EXTENSIONS_DIR, and TMPDIR for the "
    "compiler's own files, to folders on another disk",
    r"Killed signal|died due to signal 9": "Memory ran out; with MAX_JOBS=1 one compiler runs at a "
    "time",
}


class BuildError(RuntimeError):
    """The kernels can't be built or loaded here; the message says why, and what helps."""


def cpu_flags() -> list[str]:
    """CXX_FLAGS, and AVX2 and F16C where torch uses these here.

    A machine without AVX2 has a build of its own. Two clones of every kernel in one build would
    take GCC 0.5 s more. AVX-512 is left alone: in a cache its 64-byte accesses are no faster, and
    where the output begins 64 to 256 bytes behind the input, modulo 4 KiB, as malloc may have it,
    loads wait for stores and take 1.1 to 3 times as long (EPYC 9005).
    """
    has_avx2 = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return [*CXX_FLAGS, "-mavx2", "-mf16c"] if has_avx2 else CXX_FLAGS


def visible_gpus() -> list[tuple[int, int]]:
    """The compute capabilities of the GPUs that torch sees."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]


def cuda_targets() -> list[str]:
    """The targets of nvcc here: SASS as `sm_90a`, PTX as `compute_90`; nothing for the CPU alone.

    The SASS of the visible GPUs; where there is none, what TORCH_CUDA_ARCH_LIST names, for building
    ahead. Hopper's SASS is always `sm_90a`, without which the compiler has no wgmma.

    Raises:
        BuildError: TORCH_CUDA_ARCH_LIST has an entry that torch does not know.
    """
    if torch.version.cuda is None:
        return []
    gpus = visible_gpus()
    if gpus:
        return sorted({sass(*gpu) for gpu in gpus})
    targets = set()
    for entry in re.split("[; ]", os.environ.get("TORCH_CUDA_ARCH_LIST", "")):
        for version in ARCHITECTURES.get(entry.lower(), entry.lower()).split(";"):
            number = re.fullmatch(r"(\d+)\.(\d)(a?)(\+ptx)?", version)
            if number is not None:
                targets.add(sass(*number.groups()[:3]))
                targets.update([f"compute_{number[1]}{number[2]}{number[3]}"] * bool(number[4]))
            elif version:
                raise BuildError(
                    "expected in TORCH_CUDA_ARCH_LIST versions such as 9.0 or 8.6+PTX, or names "
                    f"among {', '.join(map(str.title, ARCHITECTURES))}, got {entry!r}"
                )
    return sorted(targets)


def sass(major: int | str, minor: int | str, suffix: str = "") -> str:
    """The target for GPUs of a compute capability."""
    return "sm_90a" if f"{major}.{minor}" == "9.0" else f"sm_{major}{minor}{suffix}"


def runs_on(target: str, gpu: tuple[int, int]) -> bool:
    """Whether code for a target serves a GPU.

    SASS serves GPUs of its major version from its minor one on, Tegra's only their own; PTX any GPU
    from its version on; a target with an `a` that very version. The kernels for 9.0 need an `a`.
    """
    kind, digits, suffix = re.fullmatch(r"(sm|compute)_(\d+)(a?)", target).groups()
    version = divmod(int(digits), 10)
    if suffix or gpu == (9, 0):
        return suffix == "a" and version == gpu
    if kind == "compute":
        return version <= gpu
    return version == gpu or (
        version[0] == gpu[0] and version[1] < gpu[1] and not TEGRA & {version, gpu}
    )


def check_compiler() -> None:
    """Raises BuildError where ninja, the C++ compiler or Python's headers are missing."""
    # A virtual environment's own ninja, also where the environment was never activated.
    scripts = sysconfig.get_path("scripts")
    if shutil.which("ninja") is None and shutil.which("ninja", path=scripts):
        os.environ["PATH"] = os.environ.get("PATH", "") + os.pathsep + scripts
    if shutil.which("ninja") is None:
        raise BuildError(
            "building the kernels needs ninja, which is not on PATH: pip install ninja"
        )
    cxx = os.environ.get("CXX", "c++")
    if shutil.which(cxx) is None:
        raise BuildError(
            f"building the kernels needs a C++ compiler; {cxx!r} is not on PATH. Install one "
            "(Debian and Ubuntu: apt-get install g++), or name yours in the variable CXX"
        )
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        raise BuildError(
            f"building the kernels needs Python's headers; {headers} has no Python.h "
            "(Debian and Ubuntu: apt-get install python3-dev)"
        )


def find_toolkit(home: str | None, targets: list[str]) -> str:
    """The folder of a CUDA toolkit that has nvcc and can make `targets`.

    Args:
        home: the toolkit that torch found. Where it is not one (torch takes the folder above any
            nvcc on PATH), and CUDA_HOME does not name it, the usual place of the toolkit is tried,
            and the packages of `pip install "cuda-toolkit[nvcc]"`.

    Raises:
        BuildError: there is no nvcc, or it is not of torch's CUDA version, or too old for a target.
    """
    cuda = torch.version.cuda
    major = cuda.split(".")[0]
    homes = [home] if home else []
    if not (os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")):
        from_pip = [str(Path(folder, "nvidia", f"cu{major}")) for folder in sys.path]
        homes += ["/usr/local/cuda", *from_pip]
    parts = ("bin/nvcc", "include/cuda_runtime.h")
    homes = [folder for folder in homes if all(Path(folder, part).exists() for part in parts)]
    named = os.environ.get("PYTORCH_NVCC")
    nvcc = shutil.which(named or (Path(homes[0], "bin/nvcc") if homes else ""))
    if nvcc is None or not homes:
        wanted = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
        reason, way_out = (
            (f"torch {torch.__version__} sees a CUDA device", "hide it with CUDA_VISIBLE_DEVICES=")
            if visible_gpus()
            else (f"TORCH_CUDA_ARCH_LIST is {wanted!r}", "unset TORCH_CUDA_ARCH_LIST")
        )
        or_pip = f', or pip install "cuda-toolkit[nvcc]=={cuda}.*"' if int(major) >= 13 else ""
        raise BuildError(
            f"{reason}, and building the kernels for CUDA needs nvcc and its headers, which were "
            f"not found (CUDA_HOME is {home}, PYTORCH_NVCC {named}). Install the CUDA toolkit "
            f"{cuda} and set CUDA_HOME to its folder{or_pip}; or {way_out}, to build for the CPU "
            "alone"
        )
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release (\d+)\.(\d+)", version)
    found = release[0] if release else repr(version)
    if release is None or release[1] != major:
        raise BuildError(
            f"expected an nvcc of CUDA {cuda}, as torch {torch.__version__} was built with, got "
            f"{found} at {nvcc}. Install that CUDA toolkit and set CUDA_HOME to its folder"
        )
    listing = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True).stdout
    known = set(re.findall(r"compute_(\d+)", listing))
    unknown = [target for target in targets if re.sub(r"\D", "", target) not in known]
    if unknown:
        raise BuildError(
            f"{nvcc} ({found}) can't compile for {unknown[0]}; it knows "
            f"{', '.join(sorted(known, key=int))}. Install a CUDA toolkit that does"
        )
    return homes[0]


def link_cudart(home: str, folder: Path) -> list[str]:
    """Flags that find `-lcudart` in pip's toolkit, which has it as `libcudart.so.13` alone.

    `folder`, where the linker runs, gets a link of the name that it looks for.
    """
    libraries = sorted(Path(home).glob("lib*/libcudart.so*"))
    if not libraries or any(library.name == "libcudart.so" for library in libraries):
        return []
    (folder / "libcudart.so").symlink_to(libraries[0])
    return ["-L."]


def first_error(output: str) -> str:
    """The first real error in what the build tools wrote, and what helps against it, if known."""
    lines = [match[0] for match in (re.search(e, output, re.MULTILINE) for e in ERRORS) if match]
    failed = re.search(r"^FAILED: .*$", output, re.MULTILINE)
    first = lines[0] if lines else f"a build tool failed without a message ({failed and failed[0]})"
    return "\n".join([first, *(hint for sign, hint in HINTS.items() if re.search(sign, output))])
