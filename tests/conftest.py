"""Fixtures that several test files share, their markers, and the options of hypothesis."""

import os
import random
import tempfile
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin take other tests' time
import torch

import model
import run
from referee.testing.seeds import seed_only_what_is_there
from referee.testing.shared_server import share_server
from tests.support.processes import copy_finished_builds
from tests.support.sanitized_tests import mark_sanitized

seed_only_what_is_there()

# The tests run linear/sm80 on every GPU. A user's build has it only where it is the best path.
if torch.version.cuda:
    os.environ["NVCC_APPEND_FLAGS"] = f"{os.getenv('NVCC_APPEND_FLAGS', '')} -DKERNELS_ALL_PATHS"

with suppress(ImportError):  # properties.py skips what needs hypothesis
    from hypothesis import HealthCheck, Phase, settings

    # All examples of a test may share its fixtures because no example changes them. There is no
    # time limit because the first example may build the kernels.
    options = {
        "deadline": None,
        "database": None,
        "phases": [Phase.generate, Phase.target, Phase.shrink],
        "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    }
    settings.register_profile("short", max_examples=150, derandomize=True, **options)
    settings.register_profile("long", max_examples=5000, **options)
    settings.load_profile("short")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.hookimpl(tryfirst=True)  # hypothesis reads its options in a hook of this name
def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "slow: left out by default; -m slow runs these, -m '' all")
    config.addinivalue_line("markers", "all_patterns: tests all bit patterns of a dtype")
    config.addinivalue_line("markers", "sanitized(subset, tool): see sanitized_tests.py")
    is_random = getattr(config.option, "hypothesis_profile", None) == "long"
    if is_random and config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = random.randrange(2**32)


def pytest_terminal_summary(terminalreporter, config):
    if getattr(config.option, "hypothesis_seed", None) is not None:
        terminalreporter.write_line(f"--hypothesis-seed={config.option.hypothesis_seed}")


def pytest_collection_modifyitems(config, items):
    unused = mark_sanitized(items, Path(__file__).parent)
    names_tests = any("::" in argument for argument in config.args)
    is_partial = names_tests or config.getoption("--last-failed", default=False)
    if unused and not is_partial:
        raise pytest.UsageError(f"these rows of sanitized_tests.py select no case: {unused}")
    # Without a GPU its tests are deselected, not skipped: there are thousands of them, and skipping
    # one takes a millisecond.
    if not torch.cuda.is_available():
        left_out = [item for item in items if item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(params=["highest", "high", "medium"])
def precision(request):
    """Set torch's float32 precision for the test, and return it."""
    from tests.support.tensors import float32_precision  # builds the kernels, so not before

    if request.param != "highest" and request.node.callspec.params.get("path") == "sm80":
        pytest.skip("sm80 supports `highest` alone")
    with float32_precision(request.param):
        yield request.param


@cache
def folder_of_builds():
    """Return the folder in which the graded files of all tests build their extensions.

    This project's solution, which some tests grade, finds its builds there.
    """
    folder = tempfile.mkdtemp()
    copy_finished_builds(Path(folder))
    return folder


@pytest.fixture
def one_server(monkeypatch):
    """Let the tests that grade solutions in this process share the referee's server."""
    share_server(monkeypatch, folder_of_builds)


@pytest.fixture
def three_threads(one_thread):
    """Use three threads; `one_thread` restores the number afterwards."""
    torch.set_num_threads(3)


@pytest.fixture
def one_thread():
    """Use one thread.

    With small tensors, several threads wait for each other longer than they work.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def seed():
    """Give every test the same random numbers, in any order of the tests."""
    torch.manual_seed(0)


@pytest.fixture
def small_problems(monkeypatch, request):
    """Make the problems small: a Linear with weight [80, 96], and on a CPU a ReLU of short rows.

    The rows of ReLU's x then have 2^17 elements, a third of those of the headline size.
    """
    linear = replace(model.PROBLEMS["linear_relu_divide"], get_init_inputs=lambda: [96, 80, 2.0])
    monkeypatch.setitem(model.PROBLEMS, "linear_relu_divide", linear)
    is_on_gpu = "device" in request.fixturenames and request.getfixturevalue("device") == "cuda"
    if not is_on_gpu:
        monkeypatch.setattr(model, "dim", 1 << 17)


@pytest.fixture
def place_solution(monkeypatch, tmp_path):
    """Return a function that writes a `model_new.py`, which run.py then takes as ours.

    The file has the function's text after `import torch` and `import model`.
    """

    def write(text: str) -> None:
        path = tmp_path / "folder of ours" / "model_new.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"import torch\n\nimport model\n\n\n{text}\n")
        monkeypatch.setattr(run, "OUR_SOLUTION", path)

    return write
