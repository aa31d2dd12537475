"""CUDA C++ kernels, for code that Triton cannot express. NVRTC compiles them; they are launched like Triton kernels."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any

import torch

from ...compat.triton import cached, compiled_kernel
from .launch import launch

HEADER = Path(__file__).with_name("device.cuh")


class CudaKernel:
    """The kernel `name` of a source file.

    Arguments are tensors, None, or 32-bit integers. Constants are defined as macros, and WARPS as the number of warps.
    If the constant PDL is true, the kernel is launched before the preceding one has ended (`pdl`). Its last two
    parameters are pointers that Triton appends to the parameters of every kernel.
    """

    def __init__(self, source: Path, name: str, module: str) -> None:
        self.source, self.__name__, self.__module__ = source, name, module
        self.fn = self  # `layers` names a failing kernel by it
        self._compiled: dict[Hashable, Any] = {}

    def launch(self, grid: tuple[int, ...], *args: Any, num_warps: int, **constants: Any) -> None:
        """Launch the kernel on the device of args."""
        launch(self, grid, args, constants, num_warps)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def run(*args: Any, num_warps: int, **constants: Any) -> Any:
            compiled = self.warmup(*args, grid=grid, num_warps=num_warps, **constants)
            compiled[(*grid, 1, 1)[:3]](*args, *constants.values())
            return compiled

        return run

    def warmup(self, *args: Any, grid: tuple[int, ...], num_warps: int, **constants: Any) -> Any:
        """Return the compiled kernel without loading it. args: mock tensors are sufficient."""
        kinds = ("i32" if isinstance(a, int) else "*i8" for a in args)
        signature = (*kinds, *["constexpr"] * len(constants))
        device = torch.cuda.current_device()
        key = (device, signature, num_warps, *constants.items())
        if key not in self._compiled:
            major, minor = torch.cuda.get_device_capability(device)
            arch = 10 * major + minor
            cubin = compile(self.source, arch, num_warps, constants)
            options = {"num_warps": num_warps, "launch_pdl": constants.get("PDL", False)}
            self._compiled[key] = compiled_kernel(cubin, self.__name__, arch, signature, options)
        return self._compiled[key]


def macros(num_warps: int, constants: Mapping[str, Any]) -> list[str]:
    """Return the compiler options that define the number of warps and the constants."""
    return [
        f"-D{name}={value if isinstance(value, str) else int(value)}"
        for name, value in {"WARPS": num_warps, **constants}.items()
    ]


def compile(source: Path, arch: int, num_warps: int, constants: Mapping[str, Any]) -> bytes:
    """Return the cubin of a source file for a compute capability, cached on disk.

    Raises OSError if there is no NVRTC, RuntimeError with NVRTC's log if the compilation fails.
    """
    text = source.read_text()
    options = [
        f"--gpu-architecture=sm_{arch}",
        "--std=c++17",
        f"-I{HEADER.parent}",
        *macros(num_warps, constants),
    ]
    what = (torch.version.cuda, text, HEADER.read_text(), *options)
    key = hashlib.sha256("\0".join(map(str, what)).encode()).hexdigest()
    return cached(key, f"{source.stem}.cubin", lambda: _compiled(text, source.name, options))


def _compiled(text: str, name: str, options: list[str]) -> bytes:
    nvrtc, program = _nvrtc(), ctypes.c_void_p()

    def output(what: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
        return buffer.raw

    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None)
    try:
        given = (ctypes.c_char_p * len(options))(*map(str.encode, options))
        if nvrtc.nvrtcCompileProgram(program, len(options), given):
            raise RuntimeError(f"NVRTC: {output('ProgramLog').decode()}")
        return output("CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """Load NVRTC, which every CUDA build of torch contains."""
    name = f"libnvrtc.so.{str(torch.version.cuda).split('.')[0]}"
    try:
        return ctypes.CDLL(name)
    except OSError:
        packages = importlib.util.find_spec("nvidia")
        for folder in (packages and packages.submodule_search_locations) or ():
            for path in Path(folder).glob(f"*/lib/{name}"):
                return ctypes.CDLL(str(path))
        raise
