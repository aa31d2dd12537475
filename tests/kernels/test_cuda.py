"""Kernels in CUDA C++: their compilation by NVRTC, where it is installed, and their launch by Triton."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from sparse_inductor.compat.triton import compiled_kernel, kernel_launch, kernel_parameters
from sparse_inductor.kernels.common import cuda
from sparse_inductor.kernels.relu_ffn import decode
from sparse_inductor.kernels.sparse_scores import accumulate, rescore, search


def forms():
    """Yield (kernel, warps, constants) for every variant that is launched."""
    for ranked, listed in ((0, False), (0, True), (1024, True), (8192, True)):
        sizes = {"CHUNK": 8192, "APART": 32}
        yield accumulate.shared_kernel, 8, {**sizes, "RANKED": ranked, "LISTED": listed}
    for stored, simple in itertools.product(search._STORED.values(), (False, True)):
        sizes = {
            "STORED": stored,
            "ROOM": 2048,
            "APART": 32,
            "RANKED_UP_TO": 1024,
            "READ_ANYHOW": 128,
        }
        yield rescore.filtered_kernel, 8, {**sizes, "RANKED": simple, "PDL": simple}
    for flag in (False, True):
        sizes = {"OUTPUTS": 4, "PDL": True}
        flags = dict.fromkeys(("IS_BF16", "HAS_BIAS", "HAS_RESIDUAL"), flag)
        yield decode.words_kernel, 16, {**sizes, **flags}


@pytest.fixture
def nvrtc(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    try:
        cuda._nvrtc()
    except OSError:
        pytest.skip("needs NVRTC, which comes with torch for CUDA")


@pytest.mark.parametrize(
    "kernel, num_warps, constants", forms(), ids=lambda x: getattr(x, "__name__", None)
)
def test_every_form_compiles(nvrtc, kernel, num_warps, constants):
    for arch in (
        (80, 90) if kernel is not decode.words_kernel and not constants.get("PDL") else (90,)
    ):
        assert kernel.__name__.encode() in cuda.compile(kernel.source, arch, num_warps, constants)


def test_a_compiler_says_what_is_wrong(nvrtc):
    with pytest.raises(RuntimeError, match="CHUNK"):
        cuda.compile(accumulate.shared_kernel.source, 90, 8, {})


def test_a_source_is_compiled_once_for_constants_and_headers(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    made = []
    monkeypatch.setattr(
        cuda, "_compiled", lambda text, name, options: made.append(options) or bytes([len(made)])
    )
    source = tmp_path / "k.cu"
    for text, value, number in (("a", 1, 1), ("a", True, 1), ("a", 2, 2), ("b", 2, 3), ("a", 2, 2)):
        source.write_text(text)
        assert cuda.compile(source, 90, 8, {"X": value}) == bytes([number])
    assert "-DX=1" in made[0] and "--gpu-architecture=sm_90" in made[0]


def test_launches_of_all_numbers_have_one_binary(monkeypatch):
    """Triton is given tensors at the first launch with numbers of a kind, and their addresses at later ones."""
    launched = []

    class Compiled(dict):
        def __missing__(self, grid):
            return lambda *args: launched.append((grid, *args))

    signatures = []
    monkeypatch.setattr(cuda, "compile", lambda source, arch, num_warps, constants: b"code")
    monkeypatch.setattr(
        cuda, "compiled_kernel", lambda *made: signatures.append(made[3]) or Compiled()
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    kernel, x = cuda.CudaKernel(Path("k.cu"), "k", __name__), torch.zeros(4)
    for number in (3, 3, 16):
        kernel.launch((2,), x, None, number, num_warps=8, FLAG=True)
    assert launched[0][1] is x and launched[2][1] is x
    assert launched[1] == ((2, 1, 1), x.data_ptr(), None, 3, True)
    assert signatures == [("*i8", "*i8", "i32", "constexpr")]


def test_triton_launches_a_binary():
    """It has the parameter types that `launch` expects, so that a call that launches it can be replayed."""
    options = {"num_warps": 8, "launch_pdl": True}
    made = compiled_kernel(b"code", "name", 90, ("*i8", "i32", "constexpr"), options)
    launch = kernel_launch(made, (3, 2))
    assert (made.name, made.kernel) == ("name", b"code")
    assert launch[1:] == ((3, 2, 1), 256, 0, 1, False, True)
    assert [*kernel_parameters(made, (1 << 40, 5, "float"))] == [1 << 40, 5]
