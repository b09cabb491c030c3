import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# The tests run linear_sm80.cu on every GPU; builds for users have it only where it is the best.
os.environ["NVCC_APPEND_FLAGS"] = f"{os.environ.get('NVCC_APPEND_FLAGS', '')} -DKERNELS_ALL_PATHS"

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(params=["highest", "high", "medium"])
def precision(request):
    """torch's float32 precision, set for the test."""
    from tensors import float32_precision

    with float32_precision(request.param):
        yield request.param


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
