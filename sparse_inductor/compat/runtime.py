"""Access to the runtime: the dispatcher, autograd, modes, streams and memory."""

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
    """Return a context in which calls skip the Autograd keys: in it, an Autograd kernel can call the device kernels."""
    return torch._C._AutoDispatchBelowAutograd()


def views_untracked() -> contextlib.AbstractContextManager[None]:
    """Return a context in which autograd does not track views. Callers can then write in place to a view that an
    operator returns; autograd refuses that for a tracked view made while no gradients are recorded."""
    return torch._C._AutoDispatchBelowADInplaceOrView()


@contextlib.contextmanager
def autograd_on() -> Iterator[None]:
    """Record the operations in the block for autograd, even within an operator's kernel or a compiled graph, which run
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

    # A new thread has none of this thread's modes and hooks: this function may run in the middle of a compile.
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return found[0]


def modes_active() -> bool:
    """Whether a dispatch mode, which intercepts every operator call, is active."""
    return torch._C._len_torch_dispatch_stack() > 0


def observed() -> bool:
    """Whether a dispatch mode, a profiler, or forward-mode differentiation observes every operator call; Dynamo has no
    guards for them."""
    return modes_active() or torch.autograd._profiler_enabled() or forward_ad_active()


def exporting() -> bool:
    """Whether torch.export traces. `torch.compiler.is_exporting` is True of every program in Dynamo of torch 2.11."""
    return torch.compiler._is_exporting_flag


@contextlib.contextmanager
def unobserved() -> Iterator[bool]:
    """Hide the operations in the block from the caller's dispatch modes, and the tensors that autograd saves from its
    saved-tensor hooks. Yields whether the caller has a hook that is not one of PyTorch's own.

    A checkpoint around a compiled function counts the tensors that its forward saves, and a mode may count or replace
    operations. The operations of a pass during the compile, or of a check, do not belong to that function.
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
    """Return the checkpoint (`use_reentrant=False`) around the current call, the same object in its forward and in its
    recomputation; None outside checkpoints."""
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
    """Return a context in which composite operators accept fake tensors of symbolic sizes. In torch 2.11, the linear
    operator requires their number of elements unless its Python decomposition is used."""
    from torch._dispatch.python import enable_python_dispatcher

    return enable_python_dispatcher()


def transforms_active() -> bool:
    """Whether a transform of torch.func is active."""
    return torch._C._are_functorch_transforms_active()


def forward_ad_active() -> bool:
    """Whether forward-mode differentiation is active (`torch.autograd.forward_ad.dual_level`)."""
    return torch.autograd.forward_ad._current_level >= 0


def asked_for_shapes(t: torch.Tensor) -> bool:
    """Whether a function of `t` runs only for its result's shape and dtype: on fake tensors, without being traced."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return isinstance(t, FakeTensor) and get_proxy_mode() is None


def functional_mode() -> type:
    """Return the mode under which AOTAutograd traces the graphs for a compiler."""
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    return FunctionalTensorMode


def plain_when_traced(kind: type) -> bool:
    """Whether `functional_mode` may handle a tensor of this type: no other subclass takes precedence over it."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return kind in (torch.Tensor, FunctionalTensor) or issubclass(kind, FakeTensor)


def computes_as_tensors_do(kind: type) -> bool:
    """Whether a type is a plain or fake tensor, or one of torch.distributed, for which the operators have rules. Other
    subclasses may redefine any operation."""
    from torch._subclasses.fake_tensor import FakeTensor

    plain = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return (
        kind in plain
        or issubclass(kind, FakeTensor)
        or kind.__module__.startswith("torch.distributed.")
    )


def keeps_operators() -> bool:
    """Whether tracing keeps operators as single nodes: in torch.export, because its programs outlive the kernels."""
    from torch.export._trace import custom_triton_ops_decomposition_disabled

    return custom_triton_ops_decomposition_disabled()


def launch_settings() -> tuple[Any, ...]:
    """Return the settings of torch on which launches of kernels may depend, in addition to their tensors."""
    return torch._C._get_float32_matmul_precision(), torch._C._get_cublas_allow_tf32()


def cuda_driver() -> ctypes.CDLL:
    """Return the library of the CUDA driver; raises OSError if there is none."""
    return ctypes.CDLL("libcuda.so.1")


def cuda_error(code: int) -> str:
    """Return the driver's description of an error code."""
    text = ctypes.c_char_p()
    cuda_driver().cuGetErrorString(code, ctypes.byref(text))
    return (text.value or b"unknown").decode()


@functools.cache
def _torch_in_c(kind: str) -> ctypes.CDLL:
    """Load the library with the C functions that AOTInductor's programs call, for a type of device."""
    return ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / f"libtorch_{kind}.so"))


@functools.cache
def product_functions(kind: str, name: str) -> list[ctypes.c_void_p] | None:
    """Return the addresses of the C functions that create a tensor from given memory on a type of device, release it,
    and compute a product, such as "mm_out"; None if this torch lacks one of them."""
    names = "create_tensor_from_blob", "delete_tensor_object", f"{kind}_{name}"
    try:
        library = _torch_in_c(kind)
        return [ctypes.cast(library[f"aoti_torch_{n}"], ctypes.c_void_p) for n in names]
    except (OSError, AttributeError):
        return None


def dtype_code(dtype: torch.dtype) -> int:
    """Return the code of a dtype for the functions of `product_functions`."""
    return int(_torch_in_c("cpu")[f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}"]())


def device_type_code(kind: str) -> int:
    """Return the code of a type of device for the functions of `product_functions`."""
    return int(_torch_in_c("cpu")[f"aoti_torch_device_type_{kind}"]())


def works_beside_captures() -> bool:
    """Let this thread allocate on GPUs while another captures a CUDA graph, which otherwise raises an error in both
    threads. Returns whether the driver supports this."""
    relaxed = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
    try:
        exchange = cuda_driver().cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return False
    return exchange(ctypes.byref(relaxed)) == 0


def raw_stream(device: torch.device) -> int:
    """Return the handle of the device's current stream; 0 for a CPU."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


def stream_getter(device: torch.device) -> Callable[[], int]:
    """Return a function that returns `raw_stream(device)` with a single C call."""
    if device.type != "cuda":
        return lambda: 0
    return functools.partial(torch._C._cuda_getCurrentRawStream, device.index)


def current_device() -> int:
    """Return the index of the current GPU; the process must have used a GPU before."""
    return torch._C._cuda_getDevice()


def allocator(device: torch.device) -> Callable[..., torch.Tensor]:
    """Return `torch.empty_strided(size, stride, dtype)` for the device (of several GPUs, for the current one). On GPUs
    it is the function of Inductor's generated code, which takes a third of the host time of torch.empty_strided."""
    if device.type == "cuda":
        return torch._C._dynamo.guards._empty_strided_cuda
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)


def lazy_clone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that shares memory until either tensor is written to; a full copy if this torch, or the tensor's
    storage, does not support that."""
    try:
        return torch._lazy_clone(tensor)
    except (AttributeError, RuntimeError):
        return tensor.clone()


def outside_modes() -> contextlib.AbstractContextManager[object]:
    """Return a context whose operations the program's dispatch modes do not see."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def storage_key(t: torch.Tensor) -> int:
    """Return a key that tensors with the same storage share."""
    return int(t.untyped_storage()._cdata)


def coo_entries(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (indices, values) of a sparse COO tensor as stored: possibly unsorted and with duplicate indices."""
    return t._indices(), t._values()


def is_view(t: torch.Tensor) -> bool:
    """Whether autograd tracks a tensor as a view of another one."""
    return t._is_view()


def marked_as_parameter(t: Any) -> bool:
    """Whether a fake tensor represents a module's parameter."""
    return bool(getattr(t, "_is_param", False))
