"""CUDA kernels on a CPU: `emulator/` replaces the GPU, and draws random operands."""

import array
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from problems.operands import INF, NAN
from tests.support import split_twin as twin
from tests.support.processes import KERNELS, ROOT

EMULATOR = Path(__file__).resolve().parent
# By the name of a program in `emulator/`: the sources of its kernels, and the number of cases.
PROGRAMS = {
    "relu": ("kernels/relu/*.cu*", 400),
    "fused_pass": ("kernels/linear/fused_pass/*.cu*", 250),
    "split_and_nonfinite": ("tests/emulator/split_and_nonfinite.cpp", 250),
}


def build(name, folder):
    """Compile a program of `emulator/` into a folder; return its path."""
    compiler = shutil.which("c++")
    nvcc = shutil.which("nvcc")
    if compiler is None or nvcc is None:
        pytest.skip("needs a C++ compiler and the CUDA toolkit's headers")
    dryrun = subprocess.run([nvcc, "--dryrun", "x.cu"], capture_output=True, text=True, check=True)
    toolkit = re.search(r"^#\$ TOP=(.+)$", dryrun.stderr, re.MULTILINE)[1]
    source = EMULATOR / f"{name}.cpp"
    folders = [f"-I{source.parent}", f"-I{KERNELS}", f"-isystem{toolkit}/include"]
    flags = ["-std=c++17", "-O1", "-Wno-attributes"]
    subprocess.run([compiler, *flags, *folders, source, "-o", folder / name], check=True)
    return folder / name


@pytest.fixture(scope="module", params=PROGRAMS)
def program(request, tmp_path_factory):
    return build(request.param, tmp_path_factory.mktemp("emulator"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["1", "2"])
def test_every_kernel_runs_and_is_right(program, seed):
    pattern, cases = PROGRAMS[program.name]
    done = subprocess.run([program, seed, str(cases)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    sources = "\n".join(source.read_text() for source in ROOT.glob(pattern))
    kernels = re.findall(r"__global__ void (?:__launch_bounds__\([^{]+?\)\s+)?(\w+)\(", sources)
    assert kernels and set(done.stdout.split()) == set(kernels)


@pytest.mark.slow
def test_quotients_near_midpoints_are_rounded_as_those_of_a_division(tmp_path):
    """All pairs of a float and a mantissa for which docs/SPLIT-PROOF.md leaves a doubt."""
    done = subprocess.run(
        [build("division", tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.stdout == "46517418 pairs, 0 wrong\n"


def rows_of_all_magnitudes(k):
    """Return rows of K elements: zeros, subnormals, large elements, infinities and NaN among them.

    The magnitudes in a row are between two powers of two. Elements beside the sample often differ
    from those in it, so another sample would give another exponent.
    """
    bounds = torch.randint(-155, 128, (256, 2, 1)).sort(1).values
    exponent = bounds[:, 0] + (bounds[:, 1] - bounds[:, 0]) * torch.rand(256, k)
    rows = (torch.randn(256, k).sign() * exponent.exp2()).float()
    rows[::4] *= torch.rand(64, k) < 0.05
    rows[1::16] = torch.where(torch.rand(16, k) < 0.02, INF, rows[1::16])
    rows[2::16] = torch.where(torch.rand(16, k) < 0.5, NAN, rows[2::16])
    rows[3] = NAN
    return rows


@pytest.mark.slow
def test_sampled_exponents_are_those_of_the_twin(tmp_path):
    """They show that both sample the same columns, for K that are no multiples of anything too."""
    program = build("weight_exponents", tmp_path)
    for k in (1, 4, 21, 96, 300, 301, 1000, 1022, 2047, 2048):
        rows = rows_of_all_magnitudes(k)
        elements = array.array("f", rows.flatten().tolist()).tobytes()
        done = subprocess.run([program, str(k)], input=elements, capture_output=True, check=True)
        with_lo, without_lo = (list(map(int, line.split())) for line in done.stdout.splitlines())
        assert with_lo == twin.weight_exponents(rows, twin.SM90).tolist()
        assert without_lo == twin.mean_exponents(rows, twin.ONE_PRODUCT).tolist()
