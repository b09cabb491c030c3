"""BuildError, and what is said when a build tool fails."""

import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

# Lines that name the cause of a failed build, the best first. The driver of a linker (collect2,
# clang) says last that the linker failed, which is no cause. The last but one finds the errors of
# compilers that do not speak English: `file:line:column: word: text`.
_ERROR_LINES = (
    r"^(?!collect2: error|.*linker command failed).*\b(?:error|fatal) *: .*$",
    r"^.*(?:No space left on device|cannot find |undefined reference ).*$",
    r"^.*\bld(?:\.\w+)?: (?!warning).*$",
    r"^[^\s:]+:\d+:\d+: (?!warning|note)[^:]+: .*$",
    r"^.*\berror: .*$",
)
# A sign in the output, and what helps then.
_HINTS = {
    r"\bomp\.h\b|-lomp\b": "Install the compiler's OpenMP (apt-get install libomp-dev) or set CXX",
    r"No space left on device": "Free some space, or set TORCH_EXTENSIONS_DIR and TMPDIR",
    r"Killed signal|died due to signal 9": "Memory ran out: set MAX_JOBS=1",
    r"\bnv/target\b": 'Install CUDA\'s C++ library too: pip install "cuda-toolkit[nvcc,cccl]"',
}


class BuildError(RuntimeError):
    """The kernels cannot be built or loaded here; the message says why, and what helps."""


def say(text: str) -> None:
    """Print a line for the user on stderr."""
    print(f"kernels: {text}", file=sys.stderr, flush=True)


def explain(error: Exception, folder: Path) -> BuildError:
    """Return the error that ended a build, as a BuildError that begins with the cause.

    Args:
        error: what `load_inline` or the file system raised.
        folder: where the builds are kept.
    """
    if isinstance(error, BuildError):
        return error
    if isinstance(error, subprocess.CalledProcessError):  # torch asks the compiler for its version
        cxx = os.environ.get("CXX", "c++")
        return BuildError(f"{cxx!r} does not work as a C++ compiler: {error}")
    if isinstance(error, OSError) and error.errno is None:  # the dynamic loader sets no number
        reason = error.__cause__ or error
        return BuildError(f"the library that was just built does not load: {reason}")
    if isinstance(error, OSError):
        advice = "Set TORCH_EXTENSIONS_DIR to another folder"
        return BuildError(f"cannot build in {folder}: {error}. {advice}")
    output = str(error)
    cause = first_error(output) or _killed_tool(error) or "a build tool failed without a message"
    return BuildError(f"{cause}\n\nThe whole output:\n{output}")


def first_error(output: str) -> str:
    """Return the first real error in the output of the build tools, and what helps against it.

    Returns:
        One line, more where a hint is known; empty where no line looks like an error.
    """
    for pattern in _ERROR_LINES:
        match = re.search(pattern, output, re.MULTILINE)
        if match:
            hints = [hint for sign, hint in _HINTS.items() if re.search(sign, output)]
            return "\n".join([match[0], *hints])
    return ""


def _killed_tool(error: Exception) -> str:
    """Say that a build tool was killed by a signal, if that is what happened.

    A tool that a signal kills has no time for a message. Its exit status tells: -N for ninja, which
    torch starts; 128 + N for a compiler, as ninja reports it.
    """
    status = getattr(error.__cause__, "returncode", 0)
    reported = re.search(r"^FAILED: \[code=(-?\d+)\]", str(error), re.MULTILINE)
    if reported:
        status = int(reported[1])
    number = -status if status < 0 else status - 128
    if number not in set(signal.Signals):
        return f"FAILED: a build tool ended with exit status {status}" if reported else ""
    name = signal.Signals(number).name
    limit, _ = resource.getrlimit(resource.RLIMIT_STACK)
    cause = f"a build tool was killed by signal {number} ({name}), without a message"
    if limit != resource.RLIM_INFINITY and limit < 8 << 20:
        cause += f". The stack is limited to {limit >> 10} KiB: ulimit -s 8192"
    return cause
