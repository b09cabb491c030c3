"""Runs tests under sanitizers: `python tests/support/sanitize.py [--cpu] [--jobs N] [--tool NAME]`.

On a GPU, compute-sanitizer: memcheck, racecheck, initcheck and synccheck. With `--cpu`, GCC's
AddressSanitizer and UndefinedBehaviorSanitizer, for which the kernels are built once more. Prints a
line for each run. Exit status: 0 if no run has errors, 1 if one has, 2 if the tools are not there.
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
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOUND = 86  # the exit status of a sanitizer that has found something

# The tests that reach every kernel and every tail at the price of a sanitizer, which is 10 to 100
# times a kernel's own: by name, the files and what pytest's -k takes. Left out are large tensors
# and repetitions at other precisions and sizes. One dtype of each width.
ONE_OF_A_WIDTH = "(torch.float32 or torch.float64 or torch.float16)"
FLOAT32 = "(short_sums or tiles_of_x_meet and 353 or layout_changes or special_values and 1001)"
SUBSETS = {
    "linear": (  # torch's products and the passes beside them
        "linear_forward linear_backward",
        f"(shapes or strides and columns and not size1) and {ONE_OF_A_WIDTH}"
        " and (backward or cuda-auto or cuda-torch-torch.float32)",
    ),
    "sm90": (  # several tiles a cluster: 4000, any_tiles, 2048
        "linear_float32 linear_single linear_layouts",
        f"not (skinny or sm80 or medium or bfloat16 or no_bit_in or -3.0) and ({FLOAT32}"
        " or tiles_of_x_meet and 4000 or test_promise and highest and 2053"
        " or any_tiles and 1500-tiles0 or of_integers and (264 or 2048 and x-weight))",
    ),
    "other paths": (
        "linear_float32",
        f"(skinny or sm80) and not (medium or skinny-high- or sm80-high-) and {FLOAT32}",
    ),
    "relu": ("relu_forward relu_backward", f"(sizes or layouts or special) and {ONE_OF_A_WIDTH}"),
}
CPU_SUBSET = "relu_forward relu_backward linear_forward linear_backward"
CPU_SUBSET += " properties_relu properties_linear"
# All values of a dtype add no accesses.
CPU_NAMES = "not patterns"
# Each tool's environment. Without torch's cache of memory every tensor has bounds of its own.
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
TOOLS = {
    "memcheck": UNCACHED,
    "racecheck": {"NVCC_APPEND_FLAGS": "-DKERNELS_RACECHECK"},
    "initcheck": UNCACHED,
    "synccheck": {},
}
OPTIONS = ["--report-api-errors", "no", "--error-exitcode", str(FOUND)]
# Only our kernels are watched. initcheck has to see what those of torch and cuBLAS write, too.
OURS = ["--kernel-name", "kernel_substring=7kernels"]
# Left out for one tool. racecheck (2025.3) ends in an internal error at cuBLAS's kernels for half
# types unless it watches them, for minutes: "sm90" has ours. initcheck: half types, of which TMA
# stores results unseen by the tool. And for time, large products and ReLU of two widths.
LEFT_OUT = {
    "racecheck": "(linear_forward or linear_backward) and float16 or sm80 and (1028 or 4096)",
    "initcheck": "float16 or float64 or 4000 or 2053 or any_tiles",
}


@dataclass
class Run:
    """One process, and what came of it."""

    tool: str
    subset: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    tests: str = "none"
    errors: int = 0
    seconds: float = 0.0
    output: str = ""
    passed: bool = False

    def start(self, limit: float) -> "Run":
        began = time.perf_counter()
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
            except subprocess.TimeoutExpired:  # the sanitizer's child has to go with it
                os.killpg(process.pid, signal.SIGKILL)
                status = process.wait()
            output.seek(0)
            self.output = output.read()
        self.seconds = time.perf_counter() - began
        passed = re.findall(r"^.*\b(\d+) passed\b.*$", self.output, re.MULTILINE)
        self.tests = passed[-1] if passed else "none"
        # compute-sanitizer's last line; the other sanitizers end the process at the first error.
        found = re.findall(r"(?:ERROR SUMMARY: |\()(\d+) errors?\b", self.output)
        found += re.findall(r"(?:ERROR: AddressSanitizer|: runtime error: )()", self.output)
        self.errors = sum(int(number or 1) for number in found)
        self.passed = status == 0 and self.errors == 0 and bool(passed)
        return self


def pytest(files: str, *options: str) -> list[str]:
    """pytest of this interpreter on files of tests."""
    paths = [f"tests/test_{file}.py" for file in files.split()]
    return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-vv", *paths, *options]


def gpu_runs(tools: list[str]) -> list[Run] | str:
    """The runs, or why there are none."""
    import torch

    if not torch.cuda.is_available():
        return "expected a CUDA device, found none; --cpu checks the CPU kernels"
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")
    sanitizer = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:{toolkit}")
    if sanitizer is None:
        return "compute-sanitizer is neither on PATH nor in CUDA_HOME: install the CUDA toolkit"
    # Built once, before the runs: the compilers need not be watched.
    build = pytest("relu_forward", "-k", "in_place")
    builds = [subprocess.Popen(build, cwd=ROOT, env={**os.environ, **TOOLS[t]}) for t in tools]
    if any([process.wait() for process in builds]):  # a list: all are waited for
        return "the kernels cannot be built"
    runs = []
    for subset, (files, names) in SUBSETS.items():
        for tool in tools:
            watched = [] if tool == "initcheck" else OURS
            left_out = f" and not ({LEFT_OUT[tool]})" if tool in LEFT_OUT else ""
            tests = pytest(files, "-m", "gpu", "-k", f"({names}){left_out}")
            command = [sanitizer, "--tool", tool, *OPTIONS, *watched, *tests]
            runs.append(Run(tool, subset, command, TOOLS[tool]))
    return runs


def cpu_runs(folder: Path) -> list[Run] | str:
    """The same for the CPU kernels, built in `folder` by a compiler that adds the sanitizers."""
    gcc = shutil.which("g++")
    if gcc is None:
        return "expected g++ on PATH: its sanitizers are what --cpu uses"
    libraries = [
        subprocess.run(
            [gcc, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    ]
    missing = [library for library in libraries if not Path(library).is_absolute()]
    if missing:
        return f"g++ has no {missing[0]} (Debian and Ubuntu: apt-get install libgcc-12-dev)"
    compiler = folder / "sanitizing-g++"
    # -O1 builds in three quarters of the time.
    flags = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -g1 -O1"
    compiler.write_text(f'#!/bin/sh\nexec {gcc} "$@" {flags}\n')
    compiler.chmod(0o755)
    environment = {
        "CXX": str(compiler),
        "TORCH_EXTENSIONS_DIR": str(folder),
        "CUDA_VISIBLE_DEVICES": "",
        "LD_PRELOAD": " ".join(libraries),  # python itself is built without
        "ASAN_OPTIONS": f"detect_leaks=0:exitcode={FOUND}",  # python frees little as it ends
        "UBSAN_OPTIONS": f"print_stacktrace=1:exitcode={FOUND}",
    }
    return [Run("address, undefined", "cpu", pytest(CPU_SUBSET, "-k", CPU_NAMES), environment)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="the CPU kernels, by GCC's sanitizers")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once (default: 1)")
    parser.add_argument("--tool", choices=TOOLS, action="append", help="one tool instead of four")
    parser.add_argument("--limit", type=float, help="seconds after which a run is ended as failed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = cpu_runs(Path(folder)) if options.cpu else gpu_runs(options.tool or [*TOOLS])
        if isinstance(runs, str):
            print(runs, file=sys.stderr)
            return 2
        print(f"{'tool':20} {'subset':12} {'tests':>6} {'errors':>6} {'seconds':>8}")
        with ThreadPoolExecutor(options.jobs) as pool:
            for ended in as_completed([pool.submit(run.start, options.limit) for run in runs]):
                run = ended.result()
                counts = f"{run.tests:>6} {run.errors:6} {run.seconds:8.0f}"
                failed = "" if run.passed else "  FAILED"
                print(f"{run.tool:20} {run.subset:12} {counts}{failed}", flush=True)
                if not run.passed:
                    first, rest = run.output[:6000], run.output[6000:]  # it repeats itself
                    print(first, rest[-6000:], sep="\n...\n" * (len(rest) > 6000))
    return 0 if all(run.passed for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
