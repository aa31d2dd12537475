"""The device that a test of kernels runs on."""

import pytest
import torch
from triton import knobs


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Triton's interpreter on the CPU, then a GPU."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    if request.param == "cpu" and not knobs.runtime.interpret:
        pytest.skip("kernels run on the CPU under TRITON_INTERPRET=1 only")
    return torch.device(request.param)
