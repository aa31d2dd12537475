"""What tests of kernels have in common: the device that they run on."""

import pytest
import torch
from triton import knobs


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Triton's interpreter on the CPU, but for cases marked `gpu`; then a GPU."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    if request.param == "cpu" and request.node.get_closest_marker("gpu"):
        pytest.skip("sizes of a GPU")
    if request.param == "cpu" and not knobs.runtime.interpret:
        pytest.skip("kernels run on the CPU under TRITON_INTERPRET=1 only")
    return torch.device(request.param)


@pytest.fixture
def hopper_gpu():
    """A GPU that has kernels of its own; that they take a test's operands is for the test to assert."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


@pytest.fixture(autouse=True)
def packs(small_blocks_are_packed):
    """Small blocks, where tests of feed-forward blocks say nothing else."""
