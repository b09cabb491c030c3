"""Faults in copies of the kernels are named, by `run.py` alone and by `run.py --solution`."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from processes import copy_project, printed
from test_run import run_it

pytestmark = pytest.mark.slow  # it builds kernels for each of them

ROWS = {"cpu": "24", "cuda": "1024"}  # from these on, kernels work as at the headline's size
RELU_CPU = "relu/relu_cpu.cpp"
BLOCK, BITS = "relu_block<E>(from, made);", "mask_of_block(made)"
TAIL = "if (end - begin - i < kBlock) std::copy_n(from, kBlock, made); else "
NAN = "for (int k = 0; k < kBlock; ++k) if (!(E::widen(made[k]) > 0)) made[k] = 0;"
LINEAR_CPU, RUNS = "linear/fused_pass_cpu.cpp", "sum_rows(sums, runs"
RELU, LAUNCH = "relu/relu.cu", "return launch<relu_kernel"
# It waits for the timed stream, which does not wait for it.
STREAM = """if constexpr (Config::kIsLarge && !kMask) {
  static cudaStream_t other;
  static cudaEvent_t before;
  if (!other) cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaEventCreate(&before);
  cudaEventRecord(before, stream), cudaStreamWaitEvent(other, before);
  stream = other;
}
"""
SM90, FEW = "linear/sm90/gemm_fp16x3", "(j > 0 || threadIdx.x % 128 > 0)"
DIFFER, NO_NAN = "wrong: .* elements differ", "wrong: .*got 0, expected nan"
STEP = "cheating: a timed step's gradient of x was wrong: .* elements differ"
X, BIAS = (f"wrong: gradient of {x}: .* beyond the error budget" for x in ("x", "linear.bias"))
UNSEEN = "cheating: .*(another stream|outside the timed call|not credible)"
# By name: a file, a text in it, what replaces it, and the verdict with what its reason says.
FAULTS = {
    "tail": (RELU_CPU, BLOCK, TAIL + BLOCK, DIFFER),
    "nan": (RELU_CPU, BLOCK, BLOCK + NAN, NO_NAN),
    "large_mask": (RELU_CPU, BITS, f"{BITS} & ~(uint64_t{{bypasses_caches}} << 63)", STEP),
    "bias": (LINEAR_CPU, RUNS, f"{RUNS} - 1", BIAS),
    "gpu_tail": (RELU, "= relu_of(rest_value)", "= rest_value", DIFFER),
    "gpu_nan": (RELU, "relu_of(v.value[j])", "v.value[j] > T{} ? v.value[j] : T{}", NO_NAN),
    "gpu_large_mask": (RELU, "8, bits, policy", "8, i % 128 ? bits : bits & 254, policy", STEP),
    "gpu_stream": (RELU, LAUNCH, STREAM + LAUNCH, UNSEEN),
    "gpu_linear_mask": (f"{SM90}_epilogue.cuh", "mask_bit(z)", f"mask_bit(z) && {FEW}", X),
    "gpu_bias": ("linear/fused_pass.cu", "row < count;", "row < count - 1;", BIAS),
    "gpu_tf32": (f"{SM90}.cuh", "1 / fp16x3::kLoScale", "0.0f", "wrong: lower precision .*TF32"),
}


def environment(folder):
    """Copies share builds of the same sources, made as users make them."""
    flags = os.environ.get("NVCC_APPEND_FLAGS", "").replace("-DKERNELS_ALL_PATHS", "")
    return {"TORCH_EXTENSIONS_DIR": str(folder.parent / "built"), "NVCC_APPEND_FLAGS": flags}


def plant(root, name):
    """A copy with a fault, built."""
    folder, (file, old, new, _) = root / name, FAULTS[name]
    copy_project(folder)
    path = folder / "kernels" / file
    parts = path.read_text().split(old)
    assert len(parts) == 2, f"{file} has {old!r} {len(parts) - 1} times"
    path.write_text(new.join(parts))
    more = "; model_new.LinearReluDivideNew" * file.startswith("linear")
    printed(f"import model_new{more}", folder, path=(), **environment(folder))
    return folder


@pytest.fixture(scope="module")
def planted(request, tmp_path_factory):
    """The copies for the tests that run, by name, built at the same time."""
    items = [item for item in request.session.items if item.module is request.module]
    names, root = [item.callspec.params["name"] for item in items], tmp_path_factory.mktemp("all")
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(partial(plant, root), names), strict=True))


MARKED = [pytest.param(n, marks=[pytest.mark.gpu] * n.startswith("gpu_")) for n in FAULTS]


@pytest.mark.parametrize("name", MARKED)
def test_faults_are_named(name, planted):
    device, (file, *_, verdict) = "cuda" if name.startswith("gpu_") else "cpu", FAULTS[name]
    problem = "relu" if file.startswith("relu") else "linear_relu_divide"
    options = [problem, "--rows", ROWS[device], "--trials", "3", "--device", device]
    folder = planted[name]
    word, reason = verdict.split(": ", 1)
    ways = {f"{word.upper()}  ": [], rf"model_new.py: {word} \(": ["--solution", "model_new.py"]}
    for start, more in ways.items():
        done = run_it(*options, *more, folder=folder, cwd=folder, **environment(folder))
        assert done.returncode == 1, done.stdout + done.stderr
        assert re.match(start + reason, done.stdout.splitlines()[-1]), done.stdout
