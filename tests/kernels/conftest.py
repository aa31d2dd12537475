"""Fixtures of the kernels' tests."""

import pytest
import torch
from triton import knobs


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """The device of a test: the CPU, where kernels run in Triton's interpreter, or a GPU in cases marked `gpu`."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    if request.param == "cpu" and request.node.get_closest_marker("gpu"):
        pytest.skip("sizes of a GPU")
    if request.param == "cpu" and not knobs.runtime.interpret:
        pytest.skip("kernels run on the CPU under TRITON_INTERPRET=1 only")
    return torch.device(request.param)


@pytest.fixture
def hopper_gpu():
    """Skips a test that needs the Hopper kernels; the test itself asserts that they accept its operands."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


@pytest.fixture(autouse=True)
def packs(small_blocks_are_packed):
    """By default, small feed-forward blocks are packed, too."""
