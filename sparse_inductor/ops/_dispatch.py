"""What every operator here needs of the dispatcher: guards, registration, the way to its kernels."""

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

# What arguments an operator's device function can be handed as they are.
_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None), str, bool, int, float, torch.dtype))


def call_below_autograd(op: Any, fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    """The operator without its Autograd kernel: at once `on_gpu(fn)`, its CUDA kernel, where nobody else (a mode, a
    tensor subclass) wants to see the call, which saves the dispatcher's second turn; else through the dispatcher.

    The first argument is a tensor, and lists among the arguments hold tensors.
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


# By what computes them on a GPU.
_operators: dict[Callable[..., Any], Operator] = {}


def register_on_gpu(
    lib: torch.library.Library, name: str, fn: Callable[..., Any], follows: str | None = None
) -> None:
    """Registers what computes an operator on a GPU, by the first of its layers that works. follows: the operator that
    saves what this one reads."""
    _operators[fn] = Operator(name, fn, follows)
    lib.impl(name, untracked(on_gpu(fn)), "CUDA")


def has_layers(fn: Callable[..., Any]) -> bool:
    """Whether a function launches kernels, where others call operators that do."""
    return fn in _operators


@functools.cache
def on_gpu(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The CUDA kernel of an operator that `fn` computes: `fn`, whose launches are kept and replayed
    (`kernels.replay`) in its first layer, if it has layers."""
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
    """What computes an operator on a GPU, `native` its function `fn` in the first layer."""
    run = _operators[fn].run
    return lambda *args: run(native, args)


def untracked(fn: Callable[..., Any]) -> Callable[..., Any]:
    """What computes an operator, `fn`, with results that are views of nothing, however it reshapes them."""

    def call(*args: Any) -> Any:
        with compat.views_untracked():
            return fn(*args)

    return call


def replays() -> bool:
    """Whether launches can be recorded: what has no kernel works without Triton, and its interpreter tells nobody."""
    if importlib.util.find_spec("triton") is None:
        return False
    from ..compat.triton import interprets

    return not interprets()


def define(*schemas: str) -> torch.library.Library:
    """A library that declares these operators, for `register` to say the rest."""
    lib = torch.library.Library("sparse_inductor", "FRAGMENT")
    for schema in schemas:
        lib.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    return lib


# What computes the operators, by name.
functions: dict[str, Callable[..., Any]] = {}
# What makes a function of one's own for each place in generated code where sizes are known, by name.
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
    """Registers what computes an operator on a CPU and on a GPU, as `register_on_gpu`; its shapes; how it is spread
    over a mesh. autograd: what calls pass first, which asks `outside_transforms`, as `by_gradient` does; vmap is
    declined before it. composed: it calls other operators, which have layers and replay their launches, and may call
    others each time. site: makes what computes it at one place in generated code where sizes are known."""
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
    """What calls of an operator pass first: an autograd Function's `apply` where an argument at one of these places
    requires a gradient; else the operator, which `fn` computes, is called below autograd."""
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
    """What gives an operator's shapes, and has its kernels compiled in the background meanwhile: whoever asks for
    shapes on a GPU traces a graph that is to run there."""

    @functools.wraps(fake)
    def shapes(*args: Any) -> Any:
        try:
            wanted = launches(args[0]) and torch.cuda.is_available() and replays()
            if wanted and _settled(args) and not compat.keeps_operators():
                from ..kernels.common.ahead import compile_while_traced

                compile_while_traced(fn, args)
        except Exception as error:  # what fails, fails where it is launched
            log.debug("%s is not compiled while it is traced: %s", fn.__qualname__, error)
        return fake(*args)

    return shapes


def autocast_on(device_type: str) -> bool:
    """Whether the caller is under autocast; a device that has none (meta) never is."""
    # `torch.amp.is_autocast_available` would ask, but Dynamo of torch 2.11 cannot trace it.
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def as_autocast(first: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """An operator's operands in the dtype of the caller's autocast, if there is one; with a first one of fp64 as they
    are."""
    device = first.device.type
    if not autocast_on(device) or first.dtype == torch.float64:
        return (first, *others)
    dtype = torch.get_autocast_dtype(device)
    return tuple(None if t is None else t.to(dtype) for t in (first, *others))


def autocast_off(device_type: str) -> contextlib.AbstractContextManager[None]:
    """An operator's body computes in the dtypes it was given, whatever the caller's autocast says."""
    if not autocast_on(device_type):
        return contextlib.nullcontext()
    return torch.amp.autocast(device_type, enabled=False)


def inline(
    lib: torch.library.Library,
    op: str,
    fn: Callable[..., Any],
    applies: Callable[..., bool],
) -> None:
    """Where AOTAutograd traces the operator for a compiler, the graph gets what `fn`, which computes it, calls: ATen's
    operators, and launches that Inductor makes as its own, without the dispatcher and this package's Python. `fn` takes
    `run`, which launches its kernels: here `kernels.launch.captured`.

    Only if sizes, strides and numbers are all known and `applies` says so of the arguments: a launch is planned from
    them, and must not become a guard. An exported program keeps the operator, and so does one whose kernel has failed
    in this process: the operator has other layers. Triton's interpreter launches nothing.
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
        except Exception as error:  # the operator has more than one way to be computed
            log.debug("%s stays an operator, for its kernel fails: %s", name, error)
            return mode.__torch_dispatch__(func, types, args, kwargs)

    name = f"sparse_inductor::{op}"
    torch.library.register_torch_dispatch(name, compat.functional_mode(), rule, lib=lib)


def _settled(args: Sequence[Any]) -> bool:
    """Whether nothing about the arguments is symbolic."""
    for a in args:
        numbers = (*a.shape, *a.stride(), a.storage_offset()) if isinstance(a, Tensor) else (a,)
        if any(isinstance(n, (torch.SymInt, torch.SymFloat, torch.SymBool)) for n in numbers):
            return False
    return True


def outside_transforms(op: str, *args: Any) -> None:
    """Raises NotImplementedError where a torch.func transform or forward-mode differentiation goes through the
    operator: an Autograd kernel asks."""
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
    """An autograd Function's context; a checkpoint hands out what was saved only once."""

    def __init__(self, ctx: Any) -> None:
        self._ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class _Undifferentiable(torch.autograd.Function):
    """Gradients, of an operator and of the tensors that come after them: no gradient comes of these."""

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
    """Makes a function an autograd Function's backward whose gradients raise an error, which names the operator, where
    they are differentiated. linear: they depend on the incoming gradients alone.

    The error is on every way from a gradient to what it depends on: `once_differentiable` makes leaves of the
    gradients, and `torch.autograd.grad` with inputs passes those by.
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
