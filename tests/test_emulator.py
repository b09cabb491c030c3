"""ReLU's CUDA kernels on a CPU: `emulator/` has what stands in for the GPU."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
KERNELS = TESTS.parent / "kernels"
CASES = 1500


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    compiler, nvcc = shutil.which("c++"), shutil.which("nvcc")
    if compiler is None or nvcc is None:
        pytest.skip("needs a C++ compiler and the CUDA toolkit's headers")
    plan = subprocess.run([nvcc, "--dryrun", "x.cu"], capture_output=True, text=True).stderr
    toolkit = re.search(r"^#\$ TOP=(.+)$", plan, re.MULTILINE)[1]
    path = tmp_path_factory.mktemp("emulator") / "relu"
    folders = [f"-I{TESTS / 'emulator'}", f"-I{KERNELS}", f"-isystem{toolkit}/include"]
    flags = ["-std=c++17", "-O1", "-Wno-attributes"]
    subprocess.run(
        [compiler, *flags, *folders, TESTS / "emulator" / "relu.cpp", "-o", path], check=True
    )
    return path


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_relu(program, seed):
    done = subprocess.run([program, str(seed), str(CASES)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    sources = "\n".join(source.read_text() for source in (KERNELS / "relu").glob("*.cuh"))
    kernels = set(re.findall(r"__global__ void __launch_bounds__\(\w+\)\s+(\w+)\(", sources))
    assert len(kernels) >= 12
    assert set(done.stdout.split()) == kernels
