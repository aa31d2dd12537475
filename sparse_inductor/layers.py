"""Three layers compute every operator on a GPU, each exact: the architecture's own kernels, portable Triton, ATen.

A layer fails if one of its kernels does not compile, load or launch. The next layer then computes the whole operator
again from the same inputs. Later calls for this device and dtype start with that layer until the process ends. One
warning per process names the first kernel that fails; `report()` and `doctor` name all of them.

A failure counts only if a later layer succeeds: an error that every layer raises (bad arguments, a lost GPU) is the
program's own, and an out-of-memory error does not mean that a kernel fails.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any, NamedTuple

import torch

from .notices import warn

log = logging.getLogger("sparse_inductor")


class Layer(enum.IntEnum):
    """An implementation of the operators; a larger value is more portable and slower."""

    NATIVE = 0
    """Kernels for this GPU's architecture (Gluon and CUDA C++) where they exist, else portable ones."""
    PORTABLE = 1
    """Triton kernels without architecture-specific features."""
    ATEN = 2


_INSTEAD = {
    Layer.PORTABLE: "portable Triton kernels instead, usually 1.5 to 3 times slower",
    Layer.ATEN: "ATen instead, usually as slow as the unrewritten program or slower",
}

_MORE = (
    "There is one such warning a process: sparse_inductor.report() lists every kernel that fails"
)

# The device types that have kernels.
DEVICES = {"cuda"}


class KernelWarning(UserWarning):
    """A warning that a kernel fails on this machine and that a slower layer computes its operator."""


class Fallback(NamedTuple):
    """An operator that a slower layer computes because a kernel failed."""

    operator: str
    device: str
    dtype: torch.dtype
    kernel: str
    """Module and name, such as `relu_ffn.hopper._product_kernel`."""
    error: str
    """Type and first line."""
    layer: Layer
    """The layer that computes the operator now."""

    def __str__(self) -> str:
        return (
            f"{self.kernel} fails on {self.device} with {_versions()} ({self.error}): "
            f"sparse_inductor::{self.operator} in {str(self.dtype).removeprefix('torch.')} is computed by "
            f"{_INSTEAD[self.layer]}"
        )

    def as_dict(self) -> dict[str, str]:
        """The fields as text, for JSON."""
        return {
            **{name: getattr(self, name) for name in ("operator", "device", "kernel", "error")},
            "dtype": str(self.dtype).removeprefix("torch."),
            "layer": self.layer.name.lower(),
            "versions": _versions(),
            "cost": _INSTEAD[self.layer],
        }


class _Here(threading.local):
    layer = Layer.NATIVE


_here = _Here()
_lock = threading.Lock()
_Key = tuple[int, torch.dtype]
# By operator, then by device and dtype.
_lowered: dict[str, dict[_Key, Layer]] = {}
_fallbacks: dict[Fallback, None] = {}
_warned = False


def current() -> Layer:
    """Return the layer that operators in this thread use."""
    return _here.layer


@contextlib.contextmanager
def at(layer: Layer) -> Iterator[None]:
    """Make operators in this thread use this layer within the block."""
    before, _here.layer = _here.layer, layer
    try:
        yield
    finally:
        _here.layer = before


def has_kernels(t: torch.Tensor) -> bool:
    """Whether there are kernels for operators on `t`, whatever the layer."""
    return t.device.type in DEVICES


def launches(t: torch.Tensor) -> bool:
    """Whether the current layer launches kernels for operators on `t`."""
    return has_kernels(t) and _here.layer < Layer.ATEN


def fallbacks() -> list[Fallback]:
    """Every fallback of the process, oldest first."""
    with _lock:
        return list(_fallbacks)


def forget() -> None:
    """Try every layer again, and warn again."""
    global _warned
    with _lock:
        for lowered in _lowered.values():
            lowered.clear()
        _fallbacks.clear()
        _warned = False


def is_lowered(operator: str, t: torch.Tensor) -> bool:
    """Whether a kernel of the operator is known to fail on the device and for the dtype of `t`."""
    return (t.get_device(), t.dtype) in _lowered.get(operator, ())


class Operator:
    """The device function of an operator, computed by the first layer that works.

    fn: takes tensors and plain values, a tensor first, and returns new tensors; it calls `launches` and, for its
    kernels, `current`. follows: the operator that saves the tensors which this operator reads. This operator never uses
    a faster layer than that operator, so no layer has to read tensors that slower layers save.
    """

    def __init__(self, name: str, fn: Callable[..., Any], follows: str | None = None) -> None:
        self.name, self.fn = name, fn
        self._lowered = _lowered.setdefault(name, {})
        self._followed = {} if follows is None else _lowered.setdefault(follows, {})

    def layer(self, device: int, dtype: torch.dtype) -> Layer:
        """The first layer that is not known to fail."""
        key = device, dtype
        return max(self._lowered.get(key, Layer.NATIVE), self._followed.get(key, Layer.NATIVE))

    def run(self, native: Callable[..., Any], args: Sequence[Any]) -> Any:
        """The operator's result; `native` is how `fn` is called in the first layer."""
        first = Layer.NATIVE
        if self._lowered or self._followed:
            first = self.layer(args[0].get_device(), args[0].dtype)
        if first == Layer.NATIVE:
            try:
                return native(*args)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                failures = [_noted(error)]
        else:
            failures = []
        for layer in Layer:
            if layer < max(first, Layer.PORTABLE):
                continue
            try:
                with at(layer):
                    result = self.fn(*args)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                failures.append(_noted(error))
            else:
                lasting = [e for e in failures if "out of memory" not in str(e).lower()]
                if lasting:
                    self._lower(args[0], layer, lasting)
                return result
        raise failures[0]

    def _lower(self, t: torch.Tensor, layer: Layer, failures: Sequence[Exception]) -> None:
        global _warned
        device = torch.cuda.get_device_name(t.device) if t.is_cuda else str(t.device)
        found = [
            Fallback(self.name, device, t.dtype, _kernel_of(e), _first_line(e), layer)
            for e in failures
        ]
        with _lock:
            self._lowered[t.get_device(), t.dtype] = layer
            _fallbacks.update(dict.fromkeys(found))
            first, _warned = not _warned, True
        for fallback in found:
            log.info("%s", fallback)
        if first:
            warn(f"{found[0]}. {_MORE}", KernelWarning, stacklevel=2)


def _noted(error: Exception) -> Exception:
    """Record the kernel in the error, release the tensors in its frames, and return it."""
    error.__dict__.setdefault("_sparse_inductor_kernel", _kernel_of(error))
    traceback.clear_frames(error.__traceback__)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        frame.f_locals  # noqa: B018 - until Python 3.13 a copy, which is only brought up to date when it is asked for
    return error


_KERNELS = f"{__package__}.kernels"


def _kernel_of(error: Exception) -> str:
    """Return the kernel whose launch raised the error; if unknown, the function that plans launches."""
    known = error.__dict__.get("_sparse_inductor_kernel")
    if known is not None:
        return str(known)
    planning: str | None = None
    kernel: str | None = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_KERNELS):
            planning = f"{module[len(_KERNELS) + 1 :]}.{frame.f_code.co_name}"
        for owner in (frame.f_locals.get("self"), frame.f_locals.get("kernel")):
            fn: Any = getattr(owner, "fn", None)
            module = getattr(fn, "__module__", None) or ""
            if module.startswith(_KERNELS):
                kernel = f"{module[len(_KERNELS) + 1 :]}.{fn.__name__}"
    return kernel or planning or "a kernel"


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


def _versions() -> str:
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = "not installed"
    return f"torch {torch.__version__}, triton {triton}"
