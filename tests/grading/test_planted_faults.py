"""`run.py`, with and without `--solution`, finds faults in copies of the kernels and names them."""

import os
import re
import shutil
import subprocess
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from kernels import SOURCES
from tests.support.command_line import run_to_end
from tests.support.processes import copy_finished_builds, copy_project, forked, printed

pytestmark = pytest.mark.slow  # each fault needs a build

# With so many rows, kernels work as at the headline's size. A GPU then needs milliseconds for ReLU:
# the process is stopped before the work that a fault leaves on another stream is done. The grading
# needs 60 GiB of the GPU's memory, so on a GPU this file has to run alone, in one process.
ROWS = {"cpu": "24", "cuda": "4096"}
BUNDLE = "solution.py"  # the name of each copy's bundle


@dataclass(frozen=True)
class Fault:
    """A fault in a copy of the kernels. The referee's verdict is "wrong".

    Attributes:
        file: the file, relative to `kernels/`.
        old: a text that occurs in it once.
        new: the text that replaces it.
        reason: a pattern of the reason that the referee gives.
    """

    file: str
    old: str
    new: str
    reason: str

    @property
    def problem(self):
        """Return the problem whose kernels have the fault."""
        return "relu" if self.file.startswith("relu/") else "linear_relu_divide"

    @property
    def device(self):
        """Return the kind of device on which the fault shows."""
        return "cpu" if self.file.endswith(".cpp") else "cuda"

    def plant(self, folder):
        """Plant the fault in a copy of the project."""
        path = folder / "kernels" / self.file
        text = path.read_text()
        count = text.count(self.old)
        assert count == 1, f"{self.file} has {self.old!r} {count} times"
        path.write_text(text.replace(self.old, self.new))


RELU_CPU = "relu/relu_cpu.cpp"
RELU_GPU = "relu/forward.cuh"
RELU_GPU_LAUNCH = "relu/relu.cu"
LINEAR_CPU = "linear/fused_pass/fused_pass_cpu.cpp"
LINEAR_GPU = "linear/fused_pass/backward.cuh"
FP16X3_MAINLOOP = "linear/sm90/gemm_fp16x3/mainloop.cuh"
FP16X3_EPILOGUE = "linear/sm90/gemm_fp16x3/epilogue.cuh"

CALL_OF_BLOCK = "relu_block<E>(x_block, out_block);"
# Copies the incomplete block at the end of a thread's part, without ReLU.
COPY_OF_TAIL = "if (end - begin - i < kBlock) std::copy_n(x_block, kBlock, out_block); else "
NAN_TO_ZERO = (
    "for (int k = 0; k < kBlock; ++k) if (!(E::widen(out_block[k]) > 0)) out_block[k] = 0;"
)
LAUNCH = "return launch<relu_kernel"
# Launches on another stream, which waits for the timed one; the timed stream does not wait for it.
CHANGE_OF_STREAM = """if constexpr (Config::kIsLarge && !kMask) {
  static cudaStream_t other;
  static cudaEvent_t before;
  if (!other) {
    cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking);
    cudaEventCreate(&before);
  }
  cudaEventRecord(before, stream);
  cudaStreamWaitEvent(other, before);
  stream = other;
}
"""
DIFFER = ".* elements differ"
NO_NAN = ".*got 0, expected nan"
WRONG_MASK = "gradient of x: .* elements differ"
WRONG_BIAS = "gradient of linear.bias: .* beyond the error budget"

FAULTS = {
    # The last elements of a thread's part do not get ReLU.
    "tail": Fault(RELU_CPU, CALL_OF_BLOCK, COPY_OF_TAIL + CALL_OF_BLOCK, DIFFER),
    "gpu_tail": Fault(RELU_GPU, "= relu_of(rest_value)", "= rest_value", DIFFER),
    # NaN becomes 0.
    "nan": Fault(RELU_CPU, CALL_OF_BLOCK, CALL_OF_BLOCK + NAN_TO_ZERO, NO_NAN),
    "gpu_nan": Fault(
        RELU_GPU,
        "relu_of(v.value[j])",
        "v.value[j] > T{} ? v.value[j] : T{}",
        NO_NAN,
    ),
    # A bit of the mask is missing, in large outputs only.
    "large_mask": Fault(
        RELU_CPU,
        "mask_of_block(out_block)",
        "mask_of_block(out_block) & ~(uint64_t{bypasses_caches} << 63)",
        WRONG_MASK,
    ),
    "gpu_large_mask": Fault(
        RELU_GPU,
        "8, bits, policy",
        "8, i % 128 ? bits : bits & 254, policy",
        WRONG_MASK,
    ),
    # Some rows are missing in the bias's gradient.
    "bias": Fault(
        LINEAR_CPU,
        "sum_rows(sums, UnitGrid(call.m, call.n).row_groups",
        "sum_rows(sums, UnitGrid(call.m, call.n).row_groups - 1",
        WRONG_BIAS,
    ),
    "gpu_bias": Fault(LINEAR_GPU, "row < rows;", "row < rows - 1;", WRONG_BIAS),
    # A timed call returns before its work is done.
    "gpu_stream": Fault(
        RELU_GPU_LAUNCH,
        LAUNCH,
        CHANGE_OF_STREAM + LAUNCH,
        ".*not complete on the current stream",
    ),
    # A few bits of the mask are missing.
    "gpu_linear_mask": Fault(
        FP16X3_EPILOGUE,
        "mask_bit(z)",
        "mask_bit(z) && (row_of_four > 0 || i > 0 || threadIdx.x % 128 > 0)",
        "gradient of x: .* beyond the error budget",
    ),
    # The products with lo are dropped, which leaves about TF32's accuracy.
    "gpu_tf32": Fault(FP16X3_MAINLOOP, "1 / split::kLoScale", "0.0f", "lower precision .*TF32"),
}


def environment(folder):
    """Return variables with which copies share builds, and build as users do."""
    # Where the variable is not set, it stays unset: an empty one would give builds another key.
    flags = os.environ.get("NVCC_APPEND_FLAGS")
    if flags is not None:
        flags = flags.replace("-DKERNELS_ALL_PATHS", "")
    return {"TORCH_EXTENSIONS_DIR": str(folder.parent / "built"), "NVCC_APPEND_FLAGS": flags}


def build(name, folder):
    """Make a copy of the project with a fault, build its kernels, and write its bundle."""
    fault = FAULTS[name]
    copy_project(folder)
    fault.plant(folder)
    code = f"""
        from pathlib import Path

        import model_new
        from kernels.build.bundle import bundle

        Path({BUNDLE!r}).write_text(bundle({fault.problem!r}))
    """
    printed(code, folder, forked, path=(), **environment(folder))
    return folder


@pytest.fixture(scope="module")
def copies(request, tmp_path_factory):
    """Return the builds of the copies for the tests that run, as futures that are done, by name.

    The copies are built at the same time. Where a build failed, `result` raises its error.
    """
    items = [item for item in request.session.items if item.module is request.module]
    names = [item.callspec.params["name"] for item in items if "copies" in item.fixturenames]
    root = tmp_path_factory.mktemp("all")
    copy_finished_builds(root / "built")  # so a copy builds only the problem with a fault
    with ThreadPoolExecutor() as pool:
        return {name: pool.submit(build, name, root / name) for name in names}


def lines_of_run(folder, fault, *options):
    """Return the lines that a copy's `run.py` prints when it finds a fault."""
    options = ["--rows", ROWS[fault.device], "--trials", "3", "--device", fault.device, *options]
    done = run_to_end(fault.problem, *options, folder=folder, cwd=folder, **environment(folder))
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def lines_of_files(copies):
    """Return what `run.py --solution` says of each copy's bundle, by the copy's name.

    `--solution` builds a file's kernels anew. A bundle has those of one problem; `model_new.py`
    would build both. One call grades the bundles of all copies with a fault in the same problem.
    """
    names_by_target = defaultdict(list)
    for name, copy in copies.items():
        if copy.exception() is None:
            names_by_target[FAULTS[name].problem, FAULTS[name].device].append(name)
    found = {}
    for names in names_by_target.values():
        folders = [copies[name].result() for name in names]
        files = [str(folder / BUNDLE) for folder in folders]
        lines = lines_of_run(folders[0], FAULTS[names[0]], "--solution", *files)
        for name, file in zip(names, files, strict=True):
            start = f"{file}: "
            found[name] = [line.removeprefix(start) for line in lines if line.startswith(start)]
    return found


CPU_FAULTS = [name for name, fault in FAULTS.items() if fault.device == "cpu"]
GPU_FAULTS = [name for name, fault in FAULTS.items() if fault.device == "cuda"]
NEED_GPU = [pytest.param(name, marks=pytest.mark.gpu) for name in GPU_FAULTS]


@pytest.mark.parametrize("name", [*CPU_FAULTS, *NEED_GPU])
def test_faults_are_found_and_named(name, copies, lines_of_files):
    """A line of output has verdict and reason, for our own solution and for a file."""
    folder = copies[name].result()
    fault = FAULTS[name]
    own = lines_of_run(folder, fault)
    assert any(re.match(f"WRONG  {fault.reason}", line) for line in own), own
    [line] = lines_of_files[name]
    assert re.match(rf"wrong \({fault.reason}", line), line


@pytest.mark.parametrize("problem", SOURCES)
def test_the_faults_for_gpus_compile(problem, tmp_path):
    """One copy has all faults of a problem. This needs nvcc, but no GPU.

    As in users' builds, the problem's .cu files are one file.
    """
    copy_project(tmp_path)
    for name in GPU_FAULTS:
        if FAULTS[name].problem == problem:
            FAULTS[name].plant(tmp_path)
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    files = [file for file in SOURCES[problem] if file.endswith(".cu")]
    (tmp_path / "main.cu").write_text("".join(f'#include "{file}"\n' for file in files))
    # Without optimization (-G) and without machine code (-ptx), this takes a few seconds.
    command = ["nvcc", "-std=c++17", "-Ikernels", "-arch=sm_90a", "-G", "-ptx", "main.cu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
