"""Registration of operators with the dispatcher, and the functions that every operator uses: autograd, autocast and
launches of its kernels."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from .. import compat
from ..layers import Operator, is_lowered, launches
from ._sharding import Rule, share

log = logging.getLogger(__name__)

# Types of arguments that can be passed to an operator's device function without the dispatcher.
_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None), str, bool, int, float, torch.dtype))


def call_below_autograd(op: Any, fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Call the operator below its Autograd kernel. On a GPU, if no mode or tensor subclass intercepts the call, this
    calls the CUDA kernel `on_gpu(fn)` directly, which saves a second pass through the dispatcher. Any other call goes
    through the dispatcher.

    The first argument must be a tensor, and lists among the arguments must contain tensors.
    """
    if args[0].is_cuda and not compat.modes_active():
        for a in args:
            kind = type(a)
            if kind not in _PLAIN and not (kind is list and all(type(e) in _PLAIN for e in a)):
                break
        else:
            with compat.views_untracked():
                return on_gpu(fn)(*args)
    with compat.below_autograd():
        return op(*args)


# Operators by the function that computes them on a GPU.
_operators: dict[Callable[..., Any], Operator] = {}


def register_on_gpu(
    lib: torch.library.Library, name: str, fn: Callable[..., Any], follows: str | None = None
) -> None:
    """Registers `fn` as an operator's CUDA implementation, run in the first of its layers that works (see `layers`).
    follows: the operator that saves tensors for this one."""
    _operators[fn] = Operator(name, fn, follows)
    lib.impl(name, untracked(on_gpu(fn)), "CUDA")


def has_layers(fn: Callable[..., Any]) -> bool:
    """Whether a function launches kernels itself, rather than calling operators that do."""
    return fn in _operators


@functools.cache
def on_gpu(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The CUDA implementation of the operator that `fn` computes: `fn` itself, or, if it has layers, `fn` in the first
    layer that works, with launches recorded and replayed in the first one (`kernels.common.replay`)."""
    if not has_layers(fn):
        return fn

    @functools.cache
    def replaying() -> Callable[..., Any]:
        if not replays():
            return fn
        from ..kernels.common.replay import replayed

        return replayed(fn)

    return layered(fn, lambda *args: replaying()(*args))


def layered(fn: Callable[..., Any], native: Callable[..., Any]) -> Callable[..., Any]:
    """A function that computes an operator on a GPU: `native` in the first layer, `fn` in the others."""
    run = _operators[fn].run
    return lambda *args: run(native, args)


def untracked(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Make `fn` return results that autograd does not track as views, even if `fn` reshapes them."""

    def call(*args: Any) -> Any:
        with compat.views_untracked():
            return fn(*args)

    return call


def replays() -> bool:
    """Whether launches can be recorded: not without Triton, on which ATen implementations do not depend, and not under
    its interpreter, which does not launch."""
    if importlib.util.find_spec("triton") is None:
        return False
    from ..compat.triton import interprets

    return not interprets()


def define(*schemas: str) -> torch.library.Library:
    """A library that declares these operators, to be passed to `register`."""
    lib = torch.library.Library("sparse_inductor", "FRAGMENT")
    for schema in schemas:
        lib.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    return lib


# The functions that compute the operators, by name.
functions: dict[str, Callable[..., Any]] = {}
# Factories, by operator name, that create a separate function for each call site with known sizes in generated code.
sites: dict[str, Callable[[], Callable[..., Any]]] = {}


def register(
    lib: torch.library.Library,
    name: str,
    fn: Callable[..., Any],
    fake: Callable[..., Any],
    rule: Callable[..., Rule],
    autograd: Callable[..., Any] | None = None,
    follows: str | None = None,
    composed: bool = False,
    site: Callable[[], Callable[..., Any]] | None = None,
) -> None:
    """Registers an operator.

    fn: computes it on a CPU and on a GPU, as in `register_on_gpu`. fake: gives the shapes of its results. rule: how it
        is sharded over a mesh.
    autograd: its Autograd kernel, which must call `outside_transforms`, as `by_gradient` does. vmap raises an error
        before this kernel is reached.
    composed: `fn` calls other operators, which have layers and replay their launches; different calls may use
        different operators.
    site: creates the function for a call site with known sizes in generated code.
    """
    functions[name] = fn
    if site is not None:
        sites[name] = site
    lib.impl(name, untracked(fn), "CPU")
    if composed:
        lib.impl(name, untracked(fn), "CUDA")
    else:
        register_on_gpu(lib, name, fn, follows)
        fake = _compiling(fn, fake)
    torch.library.register_fake(f"sparse_inductor::{name}", fake, lib=lib)
    share(lib, name, rule)
    if autograd is not None:
        lib.impl(name, autograd, "Autograd")
        lib.impl(name, lambda *args, **kwargs: _decline(name), "FuncTorchBatched")


def by_gradient(
    name: str, fn: Callable[..., Any], apply: Callable[..., Any], places: Sequence[int]
) -> Callable[..., Any]:
    """The Autograd kernel of an operator. It calls `apply` of an autograd Function if an argument at one of `places`
    requires a gradient; otherwise it calls the operator, which `fn` computes, below autograd."""
    op = getattr(torch.ops.sparse_inductor, name)

    def call(*args: Any) -> Any:
        outside_transforms(name, *args)
        if torch.is_grad_enabled():
            for place in places:
                if args[place] is not None and args[place].requires_grad:
                    return apply(*args)
        return call_below_autograd(op, fn, args)

    return call


def _compiling(fn: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `fake` so that it also starts to compile the operator's kernels in the background: a fake call on a GPU
    means that a graph is being traced that will run there."""

    @functools.wraps(fake)
    def shapes(*args: Any) -> Any:
        try:
            wanted = launches(args[0]) and torch.cuda.is_available() and replays()
            if wanted and _settled(args) and not compat.keeps_operators():
                from ..kernels.common.ahead import compile_while_traced

                compile_while_traced(fn, args)
        except Exception as error:  # the launch will raise it again
            log.debug("%s is not compiled while it is traced: %s", fn.__qualname__, error)
        return fake(*args)

    return shapes


def autocast_on(device_type: str) -> bool:
    """Whether the caller is under autocast; always False for the meta device, which has no autocast."""
    # Not by `torch.amp.is_autocast_available`, which Dynamo of torch 2.11 cannot trace.
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def as_autocast(first: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """An operator's operands in the dtype of the caller's autocast; unchanged without autocast, or if the first operand
    is fp64."""
    device = first.device.type
    if not autocast_on(device) or first.dtype == torch.float64:
        return (first, *others)
    dtype = torch.get_autocast_dtype(device)
    return tuple(None if t is None else t.to(dtype) for t in (first, *others))


def autocast_off(device_type: str) -> contextlib.AbstractContextManager[None]:
    """A context without autocast, in which an operator's body computes in the dtypes of its operands."""
    if not autocast_on(device_type):
        return contextlib.nullcontext()
    return torch.amp.autocast(device_type, enabled=False)


def inline(
    lib: torch.library.Library,
    op: str,
    fn: Callable[..., Any],
    applies: Callable[..., bool],
) -> None:
    """Inline the operator when AOTAutograd traces it for a compiler. The graph then contains the ATen operators and
    Triton launches of `fn`, which computes the operator, and Inductor generates these launches without the dispatcher
    or this package's Python. `fn` takes a keyword argument `run` that launches its kernels; here it is
    `kernels.common.launch.captured`.

    This requires known sizes, strides and numbers, because launches are planned from them without adding guards, and
    `applies` must return True for the arguments. The operator is kept in an exported program, if one of its kernels has
    failed in this process, because the operator can fall back to other layers, and under Triton's interpreter, which
    does not launch.
    """

    def rule(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if not all(map(compat.plain_when_traced, types)):
            return NotImplemented
        if (
            compat.keeps_operators()
            or is_lowered(op, args[0])
            or not _settled(args)
            or not (replays() and applies(*args))
        ):
            return mode.__torch_dispatch__(func, types, args, kwargs)
        try:
            from ..kernels.common.launch import captured

            with mode:
                return fn(*args, run=captured)
        except Exception as error:  # the operator can fall back to another layer
            log.debug("%s stays an operator, for its kernel fails: %s", name, error)
            return mode.__torch_dispatch__(func, types, args, kwargs)

    name = f"sparse_inductor::{op}"
    torch.library.register_torch_dispatch(name, compat.functional_mode(), rule, lib=lib)


def _settled(args: Sequence[Any]) -> bool:
    """Whether all numbers, sizes, strides and offsets of the arguments are known."""
    for a in args:
        numbers = (*a.shape, *a.stride(), a.storage_offset()) if isinstance(a, Tensor) else (a,)
        if any(isinstance(n, (torch.SymInt, torch.SymFloat, torch.SymBool)) for n in numbers):
            return False
    return True


def recorded(*tensors: Tensor | None) -> bool:
    """Whether autograd records a call with these tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def outside_transforms(op: str, *args: Any) -> None:
    """Raises NotImplementedError if a torch.func transform or forward-mode differentiation is applied to the operator.
    Autograd kernels call this."""
    if compat.transforms_active():
        _decline(op)
    if compat.forward_ad_active() and any(map(_has_tangent, pytree.tree_leaves(args))):
        raise NotImplementedError(
            f"sparse_inductor::{op} has no forward-mode derivative: call the operations that it stands for, which "
            "torch.compile leaves as they are inside torch.autograd.forward_ad.dual_level"
        )


def _has_tangent(a: Any) -> bool:
    return isinstance(a, Tensor) and torch.autograd.forward_ad.unpack_dual(a).tangent is not None


class _UnpackedOnce:
    """A wrapper of an autograd Function's context that reads `saved_tensors` once, since checkpointing allows a single
    access."""

    def __init__(self, ctx: Any) -> None:
        self._ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class _Undifferentiable(torch.autograd.Function):
    """The identity on an operator's gradients. The tensors they depend on follow as inputs; the backward raises an
    error."""

    @staticmethod
    def forward(ctx, op, number, *tensors):
        ctx.op = op
        return tensors[:number]

    @staticmethod
    def backward(ctx, *grads):
        message = "has a first derivative only: its gradient cannot be differentiated"
        raise RuntimeError(f"sparse_inductor::{ctx.op} {message}")


def first_order(
    op: str, linear: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator for the backward of an autograd Function. Differentiating the gradients that it returns raises an
    error that names the operator. linear: the gradients depend on the incoming gradients only.

    The error is raised on every path from a gradient to a tensor it depends on. `once_differentiable` is not enough: it
    makes the gradients leaves, which `torch.autograd.grad` with explicit inputs ignores.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def run(ctx: Any, *grads: Tensor | None) -> Any:
            if not torch.is_grad_enabled():
                return backward(ctx, *grads)
            once = _UnpackedOnce(ctx)
            with torch.no_grad():
                out = backward(once, *grads)
            of = grads if linear else (*grads, *once.saved_tensors)
            several = out if isinstance(out, tuple) else (out,)
            marked = _Undifferentiable.apply(op, len(several), *several, *of)
            return marked if isinstance(out, tuple) else marked[0]

        return run

    return decorate


def _decline(op: str) -> NoReturn:
    raise NotImplementedError(
        f"sparse_inductor::{op} takes no part in torch.func's transforms (grad, vjp, jvp, vmap): call the operations "
        "that it stands for, which torch.compile leaves as they are there"
    )
