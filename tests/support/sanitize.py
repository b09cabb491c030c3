"""Run tests under sanitizers: `python tests/support/sanitize.py [--cpu] [--jobs N] [--tool NAME]`.

On a GPU the sanitizers are compute-sanitizer's memcheck, racecheck, initcheck and synccheck. With
`--cpu` they are GCC's AddressSanitizer and UndefinedBehaviorSanitizer, for which the kernels are
built once more. The program prints a line for each run. Its exit status is 0 if no run has errors,
1 if a run has some, and 2 if a tool is missing or the kernels cannot be built.

On a GPU only the tests that sanitized_tests.py lists run.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.sanitized_tests import SANITIZED, TOOLS  # noqa: E402

ERROR_STATUS = 86  # the exit status that sanitizers are told to use if they find an error

CPU_FILES = [
    "relu/test_relu_forward.py",
    "relu/test_relu_backward.py",
    "linear/test_linear_forward.py",
    "linear/test_linear_backward.py",
    "relu/test_properties_relu.py",
    "linear/test_properties_linear.py",
]
# Tests of all bit patterns of a dtype add no memory accesses of another kind.
CPU_MARKERS = "not slow and not all_patterns"
# Without torch's cache of memory, each tensor is an allocation of its own, and a tool knows its
# bounds.
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
# By the name of a tool: the environment variables of its runs.
VARIABLES = {
    "memcheck": UNCACHED,
    "racecheck": {"NVCC_APPEND_FLAGS": "-DKERNELS_RACECHECK"},
    "initcheck": UNCACHED,
    "synccheck": {},
}
OPTIONS = ["--report-api-errors", "no", "--error-exitcode", str(ERROR_STATUS)]
# Only our kernels are checked, but initcheck also has to see what torch and cuBLAS write. Ours are
# in the namespace `kernels`, which the mangled name of a kernel contains as "7kernels".
OUR_KERNELS = ["--kernel-name", "kernel_substring=7kernels"]


class UnavailableError(Exception):
    """No sanitizer can run here; the message says why."""


@dataclass(frozen=True)
class Result:
    """The findings of a run.

    Attributes:
        tests: how many tests passed, as pytest prints it; "none" if pytest printed no number.
        errors: how many errors the sanitizer found.
        seconds: how long the process took.
        output: its output.
        passed: whether some tests ran, all of them passed, and no error was found.
    """

    tests: str
    errors: int
    seconds: float
    output: str
    passed: bool


@dataclass(frozen=True)
class Run:
    """A process that runs tests under a sanitizer.

    Attributes:
        tool: the sanitizer.
        subset: the name of the tests.
        command: the command of the process.
        environment: variables to set.
    """

    tool: str
    subset: str
    command: list[str]
    environment: dict[str, str]

    def result(self, limit: float | None) -> Result:
        """Run the process to its end, or for `limit` seconds."""
        began = time.perf_counter()
        status, output = self._run(limit)
        seconds = time.perf_counter() - began
        passed = re.findall(r"^.*\b(\d+) passed\b.*$", output, re.MULTILINE)
        tests = passed[-1] if passed else "none"
        errors = count_errors(output)
        is_good = status == 0 and errors == 0 and bool(passed)
        return Result(tests, errors, seconds, output, is_good)

    def _run(self, limit: float | None) -> tuple[int, str]:
        """Return the exit status of the process and its output."""
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            process = subprocess.Popen(
                self.command,
                cwd=ROOT,
                env={**os.environ, **self.environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:  # kill the sanitizer's child too
                os.killpg(process.pid, signal.SIGKILL)
                status = process.wait()
            output.seek(0)
            return status, output.read()


def count_errors(output: str) -> int:
    """Return how many errors a sanitizer found, from its output.

    compute-sanitizer's last line has the count: "ERROR SUMMARY: 2 errors", or for racecheck
    "RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)". GCC's sanitizers end the
    process at the first error.
    """
    counts = re.findall(r"(?:ERROR SUMMARY: |\()(\d+) errors?\b", output)
    first_errors = re.findall(r"ERROR: AddressSanitizer|: runtime error: ", output)
    return sum(map(int, counts)) + len(first_errors)


def pytest_command(files: Iterable[str], *options: str) -> list[str]:
    """Return the command that runs this interpreter's pytest on files of `tests/`."""
    paths = [f"tests/{file}" for file in files]
    return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-vv", *paths, *options]


def find_compute_sanitizer() -> str:
    """Return the path of compute-sanitizer."""
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")
    sanitizer = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:{toolkit}")
    if sanitizer is None:
        raise UnavailableError(
            "compute-sanitizer is neither on PATH nor in CUDA_HOME: install the CUDA toolkit"
        )
    return sanitizer


def build_kernels(tools: list[str]) -> None:
    """Build the kernels before the runs so that the tools do not check the compilers."""
    build = pytest_command(["relu/test_relu_forward.py"], "-k", "in_place")
    builds = [subprocess.Popen(build, cwd=ROOT, env={**os.environ, **VARIABLES[t]}) for t in tools]
    statuses = [process.wait() for process in builds]
    if any(statuses):
        raise UnavailableError("the kernels cannot be built")


def gpu_runs(tools: list[str]) -> list[Run]:
    """Build the kernels for these tools, and return a run for each subset and tool."""
    import torch

    if not torch.cuda.is_available():
        raise UnavailableError("expected a CUDA device, found none; --cpu checks the CPU kernels")
    sanitizer = find_compute_sanitizer()
    build_kernels(tools)
    runs = []
    for subset, files in SANITIZED.items():
        for tool in tools:
            checked = [] if tool == "initcheck" else OUR_KERNELS
            selection = f"gpu and sanitized(subset='{subset}', tool='{tool}')"
            tests = pytest_command(files, "-m", selection)
            command = [sanitizer, "--tool", tool, *OPTIONS, *checked, *tests]
            runs.append(Run(tool, subset, command, VARIABLES[tool]))
    return runs


def library_of(gcc: str, name: str) -> str:
    """Return the path of one of GCC's libraries."""
    command = [gcc, f"-print-file-name={name}"]
    path = subprocess.check_output(command, text=True).strip()
    if not Path(path).is_absolute():  # GCC prints the name alone if it has no such library
        raise UnavailableError(
            f"g++ has no {name} (Debian and Ubuntu: apt-get install libgcc-12-dev)"
        )
    return path


def cpu_runs(folder: Path) -> list[Run]:
    """Return the run for the CPU kernels.

    It builds them in `folder`, by a compiler that adds GCC's sanitizers.
    """
    gcc = shutil.which("g++")
    if gcc is None:
        raise UnavailableError("expected g++ on PATH: --cpu uses its sanitizers")
    libraries = [library_of(gcc, name) for name in ("libasan.so", "libubsan.so", "libstdc++.so")]
    compiler = folder / "sanitizing-g++"
    # -O1 comes last, so it wins: it builds in three quarters of the time.
    flags = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -g1 -O1"
    compiler.write_text(f'#!/bin/sh\nexec {gcc} "$@" {flags}\n')
    compiler.chmod(0o755)
    environment = {
        "CXX": str(compiler),
        "TORCH_EXTENSIONS_DIR": str(folder),
        "CUDA_VISIBLE_DEVICES": "",
        "LD_PRELOAD": " ".join(libraries),  # python itself is built without sanitizers
        # Python frees little when it ends.
        "ASAN_OPTIONS": f"detect_leaks=0:exitcode={ERROR_STATUS}",
        "UBSAN_OPTIONS": f"print_stacktrace=1:exitcode={ERROR_STATUS}",
    }
    tests = pytest_command(CPU_FILES, "-m", CPU_MARKERS)
    return [Run("address, undefined", "cpu", tests, environment)]


def shortened(output: str) -> str:
    """Return a long output without its middle because sanitizers repeat themselves."""
    if len(output) <= 12000:
        return output
    return f"{output[:6000]}\n...\n{output[-6000:]}"


def main() -> int:
    """Run the program and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="the CPU kernels, by GCC's sanitizers")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once (default: 1)")
    parser.add_argument("--tool", choices=TOOLS, action="append", help="one tool instead of four")
    parser.add_argument("--limit", type=float, help="seconds after which a run is ended as failed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            tools = options.tool or TOOLS
            runs = cpu_runs(Path(folder)) if options.cpu else gpu_runs(tools)
        except UnavailableError as error:
            print(error, file=sys.stderr)
            return 2
        all_passed = run_all(runs, options.jobs, options.limit)
    return 0 if all_passed else 1


def run_all(runs: list[Run], jobs: int, limit: float | None) -> bool:
    """Run and print all runs, `jobs` at once; return whether all of them passed."""
    print(f"{'tool':20} {'subset':12} {'tests':>6} {'errors':>6} {'seconds':>8}")
    all_passed = True
    with ThreadPoolExecutor(jobs) as pool:
        run_of = {pool.submit(run.result, limit): run for run in runs}
        for ended in as_completed(run_of):
            run = run_of[ended]
            result = ended.result()
            counts = f"{result.tests:>6} {result.errors:6} {result.seconds:8.0f}"
            failed = "" if result.passed else "  FAILED"
            print(f"{run.tool:20} {run.subset:12} {counts}{failed}", flush=True)
            if not result.passed:
                all_passed = False
                print(shortened(result.output))
    return all_passed


if __name__ == "__main__":
    sys.exit(main())
