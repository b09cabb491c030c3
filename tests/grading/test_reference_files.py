"""`run.py --reference FILE`: cheats, honest files and designs, graded against reference files.

More tests of reference files are in `referee/tests`.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from referee.testing.texts import reference
from tests.grading.cheats import LINEAR, RELU
from tests.grading.graded import ONLY_ON_REQUEST, grade_with_run_py
from tests.grading.honest import HONEST, PLAIN, SOLUTIONS

pytestmark = [ONLY_ON_REQUEST, pytest.mark.usefixtures("one_server")]

WIDE = reference("return torch.relu(x)", "[torch.rand(3, 131072)]")
LARGE_LINEAR = (SOLUTIONS / "linear_reference.py").read_text()
SMALL_LINEAR = LARGE_LINEAR.replace("1024, 4096", "33, 96").replace("4096, 4096", "96, 80")
# Cheats that are graded against a reference file too.
RELU_CHEATS = [
    "copies_input",
    "returns_input",
    "changes_input",
    "counts_calls",
    "replays_by_address",
    "replays_by_fingerprint",
    "stale_memory",
    "background_thread",
    "batch_once",
]
LINEAR_CHEATS = ["folds_weights", "half_precision", "drops_bias", "returns_zeros"]


@pytest.mark.parametrize(
    ("text", "named"), [(WIDE, RELU_CHEATS), (SMALL_LINEAR, LINEAR_CHEATS)], ids=["relu", "linear"]
)
def test_cheats_are_wrong(text, named, device, tmp_path):
    table = {name: ((RELU | LINEAR)[name][0], "wrong", "") for name in named}
    grade_with_run_py(text, table, tmp_path, device=device)


def test_honest_files_are_correct(device, tmp_path):
    own = SOLUTIONS / ("honest_scalar.py" if device == "cpu" else "honest_triton.py")
    table = {"plain": (PLAIN, "correct", "exact"), "own": (own, "correct", "exact")}
    for name in ("honest_compiled", "ours"):
        table[name] = HONEST[name], "correct", "exact"
    grade_with_run_py(WIDE, table, tmp_path, device=device)


# The five designs and their repairs on a GPU: the verdict, a part of the reason, and the speed.
DESIGNS = {
    "design_1_float4_grid_stride": ("error", "error", ""),
    "design_2_one_element": ("correct", "", "slower"),
    "design_3_own_backward": ("correct", "", "slower"),
    "design_4_index_scaled_twice": ("error", "CUDA error: an illegal memory access", ""),
    "design_5_linear_then_kernel": ("correct", "", ""),
    "repair_1_float4_grid_stride": ("correct", "", ""),
    "repair_2_one_element": ("correct", "", "slower"),
    "repair_4_index_scaled_once": ("correct", "", ""),
}


def test_the_starting_designs_get_their_verdicts(device):
    """Without a GPU all of them are errors."""
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = [sys.executable, str(SOLUTIONS), "--device", device, "--timeout", "600"]
    done = subprocess.run([*command, "--trials", "30"], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    lines = [line.partition(".py: ") for line in done.stdout.splitlines() if ".py: " in line]
    found = {Path(path).name: line for path, _, line in lines}
    assert (done.returncode, found.keys()) == (1, DESIGNS.keys())
    for name, (word, reason, speed) in DESIGNS.items():
        if device == "cpu":
            assert found[name].startswith("error (RuntimeError: needs a GPU, line")
            continue
        assert found[name].startswith(f"{word} (")
        assert reason in found[name]
        assert not speed or f": {speed}; " in found[name]
