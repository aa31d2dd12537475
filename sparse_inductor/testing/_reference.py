"""Assertions that a rewritten program computes the same as the unrewritten one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn

from .. import compat, session
from ..explanation.explain import Capture, Explanation, random_state_kept
from ..pattern import Pattern
from ..private_copy import private_copy
from ..verify.accuracy import (
    Comparison,
    InDouble,
    LowestPrecision,
    compare,
    cotangents,
    gradients,
    tensors_in,
    to_double,
)
from ._assertions import as_arguments, known
from ._messages import failure, nearest, shown_rewrites
from ._variation import varied

SHOWN = 8  # complaints shown per message


def assert_matches_reference(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    grads: bool = True,
    dtypes: Iterable[torch.dtype] | None = None,
    dynamic: bool | Sequence[bool | None] | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    only: str | Iterable[str] | None = None,
    vary: int = 3,
    codegen: bool = False,
    aot: bool = True,
    must_rewrite: bool = True,
    inference: bool = True,
) -> Explanation:
    """Assert that `fn(*args)` computes the same when it is rewritten.

    Runs three programs on the same inputs: rewritten, as written, and as written in fp64 throughout. Every tensor in
    the result, and every gradient for fixed random cotangents, must be as close to the fp64 result as that of the
    unrewritten program, up to the rounding of its dtype, and must be infinite or NaN in the same places. Shapes, dtypes
    and integers must be equal. If positions share a maximum exactly, the position of the gradient is not defined: use
    inputs without such ties (for a model without positional encoding, no repeated token in a sequence).

    Args:
        fn: a module or a function. Modules that a function refers to in its closure or globals are found.
        args, kwargs: the arguments of the call.
        grads: also run with gradients, and compare those of all inputs and parameters that require one.
        dtypes: floating-point dtypes to which parameters and inputs are converted, one run each; None: no conversion.
        dynamic: the argument `dynamic` of `torch.compile`, or several values for one run each.
        only: names of the active patterns. Defaults to those of the enabled session, or to all if there is none.
        vary: the number of further runs on inputs and parameters drawn around the given ones, so that a bias of zeros
            or a mask of ones hides no error. Shapes, signs of inputs, integers other than 0 and 1, and the values of
            tensors with few distinct values are kept. 0 turns it off.
        codegen: let Inductor generate and run code. Otherwise its passes and AOTAutograd run, and ATen executes the
            result.
        aot: if False, the rewritten Dynamo graph is executed directly with eager autograd. This finds most errors of a
            pattern in half the time.
        must_rewrite: fail if nothing was rewritten, because then nothing was compared.
        inference: also run without gradients. May be turned off if `grads` is on.

    Returns the explanation of the last program that was run, for `assert_rewrites` and `assert_not_rewritten`, which
    take it in place of a function. Its rewrites, near misses and graphs come from the same capture as the results.

    Raises AssertionError; ValueError if `grads` is on and nothing requires a gradient, if no run is requested, or for
    an unknown pattern name; and any error of `fn`.
    """
    fn, args, kwargs = compat.uncompiled(fn), as_arguments(args), dict(kwargs or {})
    patterns = _patterns(only)
    compiler = (
        functools.partial(compat.compile_graph, codegen=codegen)
        if codegen or aot
        else _as_rewritten
    )
    if grads and not _Program(fn, None).leaves(args, kwargs):
        raise ValueError(
            "grads=True, but neither a parameter of fn nor an argument requires a gradient: "
            "let one require it, or pass grads=False"
        )
    choices = dynamic if isinstance(dynamic, Sequence) else [dynamic]
    modes = [training for training, wanted in ((False, inference), (True, grads)) if wanted]
    runs = product([None] if dtypes is None else dtypes, choices, modes)
    explanation = None
    for dtype, sizes, training in runs:
        run = _Run(fn, args, kwargs, dtype, sizes, training, patterns, compiler)
        explanation = run.check(vary, must_rewrite)
    if explanation is None:
        raise ValueError("nothing to run: neither inference nor grads, or no dtype")
    return explanation


def _as_rewritten(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    return compat.pre_grad_passes(gm, inputs).forward


def _patterns(only: str | Iterable[str] | None) -> list[Pattern]:
    if only is None:
        return session.current_patterns()
    return [known(name) for name in ([only] if isinstance(only, str) else only)]


@dataclasses.dataclass
class _Result:
    """The outputs and gradients of a program, and the cotangents of the gradients."""

    outputs: list[torch.Tensor]
    grads: list[torch.Tensor | None]
    cotangents: list[torch.Tensor | None]


class _Program:
    """A runnable copy of `fn`. Setting its parameters does not affect the caller's."""

    def __init__(self, fn: Any, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self.fn, self.modules = private_copy(fn)
        for module in self.modules:
            module.to(dtype)
        self.call = self.fn
        self.parameters = _parameters(self.modules)

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        parameters: Sequence[torch.Tensor],
        training: bool,
        cotangent: list[torch.Tensor | None] | None = None,
    ) -> _Result:
        with torch.no_grad():
            for mine, value in zip(self.parameters.values(), parameters, strict=True):
                mine.copy_(value)
        args, kwargs = pytree.tree_map(self.own, (args, kwargs))
        leaves = self.leaves(args, kwargs)  # before the program adds its results to a dict
        with random_state_kept(args, kwargs):
            torch.manual_seed(0)
            with torch.set_grad_enabled(training):
                outputs = tensors_in(self.call(*args, **kwargs))
            if not training:
                return _Result(outputs, [], [])
            drawn = cotangents(outputs) if cotangent is None else cotangent
            found = gradients(outputs, [*leaves.values()], drawn)
        return _Result([o.detach() for o in outputs], found, drawn)

    def leaves(self, args: Any, kwargs: Any) -> dict[str, torch.Tensor]:
        """Return the tensors that require a gradient by name, parameters first, then inputs."""
        inputs = {f"input {i}": t for i, t in enumerate(_tensors((args, kwargs)))}
        return {n: t for n, t in (self.parameters | inputs).items() if t.requires_grad}

    def own(self, value: Any) -> Any:
        """Copy a tensor, because a program may write to its inputs."""
        if not isinstance(value, torch.Tensor):
            return value
        new = value.detach().clone()
        if self.dtype is not None and new.is_floating_point():
            new = new.to(self.dtype)
        return new.requires_grad_(value.requires_grad)


class _Run:
    """One combination of dtype, dynamic sizes and mode."""

    def __init__(
        self,
        fn: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dtype: torch.dtype | None,
        dynamic: bool | None,
        training: bool,
        patterns: list[Pattern],
        compiler: Callable[[fx.GraphModule, list[Any]], Callable[..., Any]],
    ) -> None:
        self.fn, self.args, self.kwargs = fn, args, kwargs
        self.training, self.patterns = training, patterns
        self.capture = Capture(patterns)
        self.plain = _Program(fn, dtype)
        self.truth = _Program(fn, torch.float64)
        self.rewritten = _Program(fn, dtype)
        self.title = ", ".join(
            [
                str(dtype or "dtypes as given").removeprefix("torch."),
                "training" if training else "inference",
                *(() if dynamic is None else (f"dynamic={dynamic}",)),
            ]
        )

        def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            with self.capture.of(gm):
                return compiler(gm, inputs)

        self.rewritten.call = torch.compile(self.rewritten.fn, backend=backend, dynamic=dynamic)

    def check(self, vary: int, must_rewrite: bool) -> Explanation:
        parameters = self.plain.parameters.values()
        values = [nn.Parameter(p.detach().clone(), p.requires_grad) for p in parameters]
        given = (self.args, self.kwargs, values)
        with session.prepared(self.patterns), compat.fresh_capture():
            for number in range(vary + 1):
                args, kwargs, values = varied(given, number) if number else given
                found = self._compare(args, kwargs, values, tolerant=bool(number))
                if must_rewrite and not self.capture.report.rewrites:
                    self._fail("nothing was rewritten, so there is nothing to compare", [])
                wrong = [c for c in found if not c.ok]
                if wrong:
                    on = f"inputs varied, draw {number}" if number else "inputs as given"
                    shown = [f"  {c}" for c in wrong[:SHOWN]]
                    if len(wrong) > SHOWN:
                        shown.append(f"  and {len(wrong) - SHOWN} more")
                    self._fail(f"the rewritten program computes something else ({on})", shown)
        return self.capture.explanation()

    def _compare(
        self, args: Any, kwargs: Any, parameters: list[torch.Tensor], tolerant: bool
    ) -> list[Comparison]:
        try:
            with LowestPrecision() as precision:
                plain = self.plain.run(args, kwargs, parameters, self.training)
        except Exception:
            if tolerant:
                return []  # a program need not support varied inputs
            raise
        # The reference starts from inputs rounded to the program's dtype: that rounding is not an error of either one.
        wide_args, wide_kwargs = pytree.tree_map(
            lambda t: to_double(self.plain.own(t)), (args, kwargs)
        )
        with _in_double():
            truth = self.truth.run(
                wide_args, wide_kwargs, parameters, self.training, plain.cotangents
            )
        got = self.rewritten.run(args, kwargs, parameters, self.training, plain.cotangents)
        names = [*self.plain.leaves(args, kwargs)]
        return _comparisons(got, plain, truth, names, precision.dtype)

    def _fail(self, headline: str, details: list[str]) -> None:
        explanation = self.capture.explanation()
        report = explanation.report
        if report.rewrites:
            after = shown_rewrites(report, {r.pattern for r in report.rewrites})
        else:
            after = "\n".join(nearest(explanation, p) for p in self.patterns)
        text = "\n".join([f"{headline} [{self.title}]", *details])
        raise AssertionError(failure(text, [after], explanation))


def _parameters(modules: Iterable[nn.Module]) -> dict[str, torch.Tensor]:
    """Return the parameters of all modules by name, each once."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            found.setdefault(id(parameter), (name, parameter))
    names: dict[str, torch.Tensor] = {}
    for name, parameter in found.values():
        names[name if name not in names else f"{name} ({len(names)})"] = parameter
    return names


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@contextlib.contextmanager
def _in_double() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(InDouble())
        yield


def _comparisons(
    got: _Result,
    plain: _Result,
    truth: _Result,
    names: Sequence[str],
    precision: torch.dtype | None,
) -> list[Comparison]:
    """Compare all outputs and gradients; `names` are those of the leaves."""
    if not len(got.outputs) == len(plain.outputs) == len(truth.outputs):
        text = f"there are {len(got.outputs)} tensors, unrewritten {len(plain.outputs)}"
        return [Comparison("result", text)]
    found = []
    for i, three in enumerate(zip(got.outputs, plain.outputs, truth.outputs, strict=True)):
        ties = not three[0].is_floating_point()
        what = f"output {i} {list(three[1].shape)}"
        found.append(compare(what, *three, ties=ties, precision=precision))
    for i, three in enumerate(zip(got.grads, plain.grads, truth.grads, strict=True)):
        found.append(compare(f"gradient of {names[i]}", *three, ties=True, precision=precision))
    return found
