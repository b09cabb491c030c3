"""BuildError, messages to the user, and the search for a failed build's cause in its output."""

import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

# Patterns of lines that may name the cause of a failed build, the most reliable pattern first.
_ERROR_LINES = (
    # An error of a compiler or another tool. The last line of collect2 or clang is excluded because
    # it only says that the linker has failed, not why.
    r"^(?!collect2: error|.*linker command failed).*\b(?:error|fatal) *: .*$",
    # An error of the linker, or of a tool that cannot write.
    r"^.*(?:No space left on device|cannot find |undefined reference ).*$",
    # Another message of ld, ld.gold or ld.lld.
    r"^.*\bld(?:\.\w+)?: (?!warning).*$",
    # A message of another kind, such as GCC's `file:line:column: sorry, unimplemented: text`.
    r"^[^\s:]+:\d+:\d+: (?!warning|note)[^:]+: .*$",
    # The last line of collect2 or clang, which the first pattern excludes: there is no better one.
    r"^.*\berror: .*$",
)
# Advice for the user, by a pattern in the output.
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
    """Return a BuildError for the error that ended a build. Its message begins with the cause.

    Args:
        error: an exception of `load_inline` or of the file system. A BuildError explains itself and
            is returned unchanged.
        folder: the cache folder.
    """
    if isinstance(error, BuildError):
        return error
    # torch runs the compiler to get its version, and lets this error through.
    if isinstance(error, subprocess.CalledProcessError):
        return BuildError(f"the C++ compiler does not work: {error}")
    # An OSError of the file system has an errno; one of the dynamic loader has none. Some versions
    # of torch raise an OSError of their own instead, and the loader's is in its `__cause__`.
    if isinstance(error, OSError) and error.errno is None:
        reason = error if error.__cause__ is None else error.__cause__
        return BuildError(f"the library that was just built does not load: {reason}")
    if isinstance(error, OSError):
        advice = "Set TORCH_EXTENSIONS_DIR to another folder"
        return BuildError(f"cannot build in {folder}: {error}. {advice}")
    output = str(error)
    if not isinstance(error.__cause__, subprocess.CalledProcessError):  # no build tool has failed
        return BuildError(output)
    cause = find_cause(output)
    if not cause:
        cause = _silent_failure(output, error.__cause__.returncode)
    return BuildError(f"{cause}\n\nThe whole output:\n{output}")


def find_cause(output: str) -> str:
    """Find the cause of an error in the build tools' output, and the hints that apply.

    Returns:
        The line that names the cause, and then one line for each hint. Empty if no line looks like
        an error.
    """
    for pattern in _ERROR_LINES:
        match = re.search(pattern, output, re.MULTILINE)
        if match:
            hints = [hint for symptom, hint in _HINTS.items() if re.search(symptom, output)]
            return "\n".join([match[0], *hints])
    return ""


def _silent_failure(output: str, ninja_status: int) -> str:
    """Return a sentence about a build tool that failed without a message.

    The tool is a compiler or ninja itself. From version 1.13 on, ninja prints the exit status of a
    compiler.
    """
    printed = re.search(r"^FAILED: \[code=(-?\d+)\]", output, re.MULTILINE)
    status = int(printed[1]) if printed else ninja_status
    # If signal N kills a compiler, ninja prints 128 + N. If it kills ninja, torch gets -N.
    signal_number = -status if status < 0 else status - 128
    if signal_number in set(signal.Signals):
        return _killed_by(signal.Signals(signal_number))
    if printed:
        return f"FAILED: a build tool ended with exit status {status}"
    return "a build tool failed without a message"


def _killed_by(killer: signal.Signals) -> str:
    """Return a sentence about a build tool that was killed by a signal."""
    cause = f"a build tool was killed by signal {killer.value} ({killer.name}), without a message"
    # A compiler is killed, too, if its stack overflows. The usual limit is 8 MiB.
    limit, _ = resource.getrlimit(resource.RLIMIT_STACK)
    if limit != resource.RLIM_INFINITY and limit < 8 << 20:
        cause += f". The stack is limited to {limit >> 10} KiB: ulimit -s 8192"
    return cause
