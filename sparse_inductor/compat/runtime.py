"""What happens when an operator runs: the dispatcher, streams, memory."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch


def below_autograd() -> contextlib.AbstractContextManager[None]:
    """Calls inside skip the Autograd keys: an operator's Autograd kernel uses it to reach the device kernels."""
    return torch._C._AutoDispatchBelowAutograd()


def views_untracked() -> contextlib.AbstractContextManager[None]:
    """Views made inside are tensors of their own for autograd. One that an operator returns may be written to in place
    by the caller: of a tracked view, made where no gradient is recorded, autograd refuses that."""
    return torch._C._AutoDispatchBelowADInplaceOrView()


@contextlib.contextmanager
def autograd_on() -> Iterator[None]:
    """Operations in the block are recorded for autograd, also where an operator's kernel or a compiled graph runs,
    below autograd."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for name in (
        "AutogradFunctionality",
        "AutogradOther",
        "AutogradNestedTensor",
        "ADInplaceOrView",
    ):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, name))
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


@functools.cache
def clamp_has_a_slope_at_its_bounds() -> bool:
    """Whether the gradient of `clamp` passes where a value equals the bound, as it does before torch 2.14."""
    found: list[bool] = []

    def ask() -> None:
        x = torch.zeros((), requires_grad=True)
        (slope,) = torch.autograd.grad(x.clamp(min=0), x)
        found.append(bool(slope))

    # A new thread has none of the modes and hooks that this one may have on: it is asked in the middle of a compile.
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return found[0]


def modes_active() -> bool:
    """Whether somebody has a mode on that every operator's call goes through."""
    return torch._C._len_torch_dispatch_stack() > 0


def observed() -> bool:
    """Whether somebody wants to see every operator's call: a mode, a profiler, or forward-mode differentiation, of
    which Dynamo's guards know nothing."""
    return modes_active() or torch.autograd._profiler_enabled() or forward_ad_active()


def exporting() -> bool:
    """Whether torch.export traces. `torch.compiler.is_exporting` is True of every program in Dynamo of torch 2.11."""
    return torch.compiler._is_exporting_flag


@contextlib.contextmanager
def unobserved() -> Iterator[bool]:
    """What is computed meanwhile passes through no dispatch mode of the caller's, and what autograd saves through no
    hook. Gives whether it passes through a hook that is not PyTorch's own otherwise.

    A checkpoint around a compiled function counts what its forward saves, and a mode counts or replaces what it
    computes: what a pass computes while the function is compiled is not part of it, nor what a check of it computes.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    hooks: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    present = torch._C._autograd._top_saved_tensors_default_hooks(True) or ()
    own = any(not getattr(h, "__module__", "").startswith("torch.") for h in present)
    if torch._C._autograd._saved_tensors_hooks_is_enabled():  # inside a transform they are refused
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    with hooks, _disable_current_modes():
        yield own


def checkpoint_under_way() -> Any:
    """The checkpoint (`use_reentrant=False`) that what is called now is part of, the same object in its forward and
    when that is computed again; None outside."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or getattr(hooks[0], "__module__", "") != "torch.utils.checkpoint":
        return None
    pack = inspect.unwrap(hooks[0])
    if not inspect.isfunction(pack):
        return None
    held = dict(zip(pack.__code__.co_freevars, pack.__closure__ or ()))
    if "frame" in held:
        return held["frame"].cell_contents
    return held["target_frame_ref"].cell_contents() if "target_frame_ref" in held else None


def symbolic_sizes() -> contextlib.AbstractContextManager[None]:
    """Operators that are made of others take fake tensors of symbolic sizes: that of a linear in torch 2.11 asks for
    their number of elements, unless its Python decomposition is used."""
    from torch._dispatch.python import enable_python_dispatcher

    return enable_python_dispatcher()


def transforms_active() -> bool:
    """Whether a transform of torch.func is under way."""
    return torch._C._are_functorch_transforms_active()


def forward_ad_active() -> bool:
    """Whether forward-mode differentiation is under way (`torch.autograd.forward_ad.dual_level`)."""
    return torch.autograd.forward_ad._current_level >= 0


def asked_for_shapes(t: torch.Tensor) -> bool:
    """Whether a function of `t` is run for its result's shape and dtype alone: on fakes, and nobody records it."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return isinstance(t, FakeTensor) and get_proxy_mode() is None


def functional_mode() -> type:
    """The mode under which AOTAutograd traces what a compiler gets."""
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    return FunctionalTensorMode


def plain_when_traced(kind: type) -> bool:
    """Whether `functional_mode` may look at a tensor of this type: no other subclass has a say before it."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return kind in (torch.Tensor, FunctionalTensor) or issubclass(kind, FakeTensor)


def computes_as_tensors_do(kind: type) -> bool:
    """Whether fake values of this type are plain tensors, or those of torch.distributed, which operators have rules
    for; other subclasses may do anything where an operation is called on them."""
    from torch._subclasses.fake_tensor import FakeTensor

    plain = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return (
        kind in plain
        or issubclass(kind, FakeTensor)
        or kind.__module__.startswith("torch.distributed.")
    )


def keeps_operators() -> bool:
    """Whether an operator stays whole when traced: in torch.export, whose programs outlive their kernels."""
    from torch.export._trace import custom_triton_ops_decomposition_disabled

    return custom_triton_ops_decomposition_disabled()


def launch_settings() -> tuple[Any, ...]:
    """What the launch code of kernels may ask torch for, beside what is to be seen of the tensors."""
    return torch._C._get_float32_matmul_precision(), torch._C._get_cublas_allow_tf32()


def cuda_driver() -> ctypes.CDLL:
    """The CUDA driver; raises OSError where there is none."""
    return ctypes.CDLL("libcuda.so.1")


def cuda_error(code: int) -> str:
    """What the driver says of an error."""
    text = ctypes.c_char_p()
    cuda_driver().cuGetErrorString(code, ctypes.byref(text))
    return (text.value or b"unknown").decode()


@functools.cache
def _torch_in_c(kind: str) -> ctypes.CDLL:
    """The library with the C functions that AOTInductor's programs call, of a type of device."""
    return ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / f"libtorch_{kind}.so"))


@functools.cache
def product_functions(kind: str, name: str) -> list[ctypes.c_void_p] | None:
    """Addresses of the C functions that make a tensor of given memory on a type of device, that release it, and that
    compute a product, such as "mm_out"; None where this torch lacks one."""
    names = "create_tensor_from_blob", "delete_tensor_object", f"{kind}_{name}"
    try:
        library = _torch_in_c(kind)
        return [ctypes.cast(library[f"aoti_torch_{n}"], ctypes.c_void_p) for n in names]
    except (OSError, AttributeError):
        return None


def dtype_code(dtype: torch.dtype) -> int:
    """A dtype as those functions take it."""
    return int(_torch_in_c("cpu")[f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}"]())


def device_type_code(kind: str) -> int:
    """A type of device as those functions take it."""
    return int(_torch_in_c("cpu")[f"aoti_torch_device_type_{kind}"]())


def works_beside_captures() -> bool:
    """Let this thread allocate on GPUs while another captures a CUDA graph, which would otherwise end in an error, for
    both; whether the driver does so."""
    relaxed = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
    try:
        exchange = cuda_driver().cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return False
    return exchange(ctypes.byref(relaxed)) == 0


def raw_stream(device: torch.device) -> int:
    """The handle of the device's current stream; 0 for a CPU."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


def stream_getter(device: torch.device) -> Callable[[], int]:
    """What gives `raw_stream(device)`, in a call of C alone."""
    if device.type != "cuda":
        return lambda: 0
    return functools.partial(torch._C._cuda_getCurrentRawStream, device.index)


def current_device() -> int:
    """The current GPU's number, of a process that has used one."""
    return torch._C._cuda_getDevice()


def allocator(device: torch.device) -> Callable[..., torch.Tensor]:
    """`torch.empty_strided(size, stride, dtype)` on the device (on the current one of several GPUs): what Inductor's
    own code allocates with, a third of the host's time."""
    if device.type == "cuda":
        return torch._C._dynamo.guards._empty_strided_cuda
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)


def lazy_clone(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that shares memory until one of both is written to; at once where this torch, or the
    tensor's storage, cannot do that."""
    try:
        return torch._lazy_clone(tensor)
    except (AttributeError, RuntimeError):
        return tensor.clone()


def outside_modes() -> contextlib.AbstractContextManager[object]:
    """What the program's modes do not see."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def storage_key(t: torch.Tensor) -> int:
    """What tensors in the same memory have in common."""
    return int(t.untyped_storage()._cdata)


def coo_entries(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(indices, values) of a sparse COO tensor as they are: not sorted, perhaps, and an entry in parts."""
    return t._indices(), t._values()


def is_view(t: torch.Tensor) -> bool:
    """Whether a tensor is a view of another one that autograd knows of."""
    return t._is_view()


def marked_as_parameter(t: Any) -> bool:
    """Whether a fake tensor stands for a module's parameter."""
    return bool(getattr(t, "_is_param", False))
