"""A list of kernel launches, memsets and matrix products that one C function repeats with new addresses
(launches.c)."""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import struct
import subprocess
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ... import compat
from ...compat.triton import KernelLaunch, headers
from .native import compiled

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_suffix(".c")

# The driver's functions that launches.c calls, in its order.
FUNCTIONS = (
    "cuLaunchKernelEx",
    "cuMemsetD8Async",
    "cuFuncGetParamInfo",
    "cuTensorMapReplaceAddress",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
)


class Address(NamedTuple):
    """A parameter that is an address: words[base] + offset, in bytes."""

    base: int
    offset: int


class TensorMap(NamedTuple):
    """A parameter that is a tensor map: the bytes `like` with `address` inserted."""

    address: Address
    like: bytes


Parameter = int | float | Address | TensorMap


class View(NamedTuple):
    """A tensor at an address."""

    at: Address
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


# Matrix products, in the order of launches.c. Operands: the result, for addmm the bias, and the two matrices.
PRODUCTS = ("mm_out", "mm_dtype_out", "addmm_out")


class Library(NamedTuple):
    """The compiled launches.c and the driver's functions that it calls."""

    calls: ctypes.CDLL
    driver: ctypes.Array[ctypes.c_void_p]


@functools.cache
def available() -> Library | None:
    """Return the library, or None if it cannot be compiled or the driver lacks a function."""
    try:
        driver = compat.cuda_driver()
        return library([ctypes.cast(driver[name], ctypes.c_void_p) for name in FUNCTIONS])
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        log.debug("calls are not replayed: %s", error, exc_info=True)
        return None


def library(functions: Sequence[ctypes.c_void_p]) -> Library:
    """Compile and load launches.c, which calls the given driver functions."""
    calls = compiled(SOURCE, "-O2", f"-I{headers()}")
    pointer, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    calls.sparse_launches_new.argtypes = [pointer, number]
    calls.sparse_launches_new.restype = pointer
    calls.sparse_launches_free.argtypes = [pointer]
    calls.sparse_launches_count.argtypes = [pointer]
    calls.sparse_launches_zeros.argtypes = [pointer, number, size, size]
    calls.sparse_launches_add.argtypes = [
        pointer, pointer, pointer, number, pointer, pointer, number
    ]  # fmt: skip
    calls.sparse_launches_product.argtypes = [pointer, pointer, number, pointer, number, pointer]
    calls.sparse_launches_run.argtypes = [pointer, number, number, ctypes.c_char_p]
    return Library(calls, (pointer * len(functions))(*functions))


class LaunchList:
    """An ordered list of launches. `part` returns a function that makes some of them.

    This function takes the words: the addresses, then the stream.
    """

    def __init__(self, library: Library, words: int) -> None:
        self._library = library.calls
        self._plan = self._library.sparse_launches_new(library.driver, words - 1)
        weakref.finalize(self, self._library.sparse_launches_free, self._plan)
        self._pack = struct.Struct(f"={words}Q").pack
        self._kernels: list[Any] = []  # keeps launched kernels loaded

    def __len__(self) -> int:
        return int(self._library.sparse_launches_count(self._plan))

    def launch(self, kernel: KernelLaunch, parameters: Sequence[Parameter]) -> bool:
        """Add a launch. Return False if the driver reports different parameters for the kernel."""
        described = [_described(p) for p in parameters]
        maps = [p.like for p in parameters if isinstance(p, TensorMap)]
        flat = struct.pack(f"={3 * len(described)}q", *itertools.chain(*described))
        numbers = struct.pack("=8q", *kernel.grid, *kernel[2:])
        self._kernels.append(kernel.kernel)
        return not self._library.sparse_launches_add(
            self._plan, kernel.kernel.function, numbers, len(described), flat, b"".join(maps), len(maps)
        )  # fmt: skip

    def zeros(self, at: Address, size: int) -> None:
        """Add a memset to zero of `size` bytes."""
        self._library.sparse_launches_zeros(self._plan, *at, size)

    def product(self, device: torch.device, name: str, operands: Sequence[View]) -> bool:
        """Add a matrix product. Return False if this torch has no C function for it."""
        functions = compat.product_functions(device.type, name)
        if functions is None:
            return False
        described = [
            (*at, len(size), *(*size, 0, 0)[:2], *(*stride, 0, 0)[:2], compat.dtype_code(dtype))
            for at, size, stride, dtype in operands
        ]
        flat = struct.pack(f"={8 * len(described)}q", *itertools.chain(*described))
        where = struct.pack("=2q", compat.device_type_code(device.type), device.index or 0)
        torch_functions = (ctypes.c_void_p * len(functions))(*functions)
        return not self._library.sparse_launches_product(
            self._plan, torch_functions, PRODUCTS.index(name), where, len(described), flat
        )

    def part(self, first: int, last: int) -> Callable[[Any, Sequence[int]], None]:
        """Return a function of (anything, words) that makes the launches `first` to `last` - 1."""
        run, plan, pack = self._library.sparse_launches_run, self._plan, self._pack

        def made(_: Any, words: Sequence[int], of: LaunchList = self) -> None:
            error = run(plan, first, last, pack(*words))
            if error:
                raise RuntimeError(
                    "a matrix product failed; PyTorch has logged why"
                    if error < 0
                    else f"CUDA error {error}: {compat.cuda_error(error)}"
                )

        return made


def _described(p: Parameter) -> tuple[int, int, int]:
    """Return kind, word and value, as launches.c takes them."""
    if isinstance(p, Address):
        return 2, *p
    if isinstance(p, TensorMap):
        return 3, *p.address
    if isinstance(p, float):
        return 1, 0, struct.unpack("=q", struct.pack("=d", p))[0]
    return 0, 0, p if p < 2**63 else p - 2**64
