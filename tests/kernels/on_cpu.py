"""Kernels in CUDA C++, compiled for a CPU by cuda_on_cpu.cpp, on arrays."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparse_inductor.kernels.common import cuda, native

SOURCE = Path(__file__).with_name("cuda_on_cpu.cpp")
# How many threads further the next one is that goes on: in order, in reverse, and warps mixed.
ORDERS = (1, 255, 77)


class OnCpu:
    """A kernel with the size of its blocks and its constants. Skips the test without a compiler of C++20."""

    def __init__(self, kernel: cuda.CudaKernel, num_warps: int = 8, **constants: Any) -> None:
        self._threads = 32 * num_warps
        texts = (path.read_text() for path in (kernel.source, cuda.HEADER))
        folders = (f"-I{path.parent}" for path in (kernel.source, cuda.HEADER))
        options = [
            "-std=c++20",
            "-O1",
            f'-DSOURCE="{kernel.source.name}"',
            *folders,
            *cuda.macros(num_warps, constants),
        ]
        try:
            self._library = native.compiled(SOURCE, *options, depends_on="\0".join(texts))
        except FileNotFoundError as error:
            pytest.skip(str(error))
        self._kernel = ctypes.cast(getattr(self._library, kernel.__name__), ctypes.c_void_p)

    def __call__(
        self, grid: tuple[int, int], *given: Any, order: int = 1, late: tuple[np.ndarray, ...] = (),
    ) -> None:  # fmt: skip
        """late: arrays that hold garbage until the kernel waits for the one in front of it."""
        written = [a.copy() for a in late]
        for a, right in zip(late, written):
            a.view(np.uint8)[...] = 0xCD
            self._library.write_late(
                *(ctypes.c_void_p(x.ctypes.data) for x in (a, right)), ctypes.c_size_t(a.nbytes)
            )
        words = [_word(a) for a in given]
        words += [0] * (24 - len(words))
        given_words = (ctypes.c_uint64 * 24)(*words)
        self._library.launch(self._kernel, given_words, *grid, self._threads, order)


def _word(given: Any) -> int:
    if isinstance(given, np.ndarray):
        return given.ctypes.data
    return given.data_ptr() if isinstance(given, torch.Tensor) else given


def launch_on_cpu(
    kernel: cuda.CudaKernel, grid: Any, *args: Any, num_warps: int, **constants: Any
) -> None:
    """What `CudaKernel.launch` does on a GPU."""
    OnCpu(kernel, num_warps, **constants)((*grid, 1)[:2], *args)
