"""Runs a program eagerly and rewritten, and returns the differences. A difference that plain torch.compile shows as
well is not ours.

Rounding may differ, and a program may amplify it. Values that are not within `CLOSE` are therefore compared with the
program's own sensitivity: the change of its results when each operation's result is off by up to a rounding of its
dtype, and their distance from the results in fp64 (where narrowing casts still round).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

import sparse_inductor
from sparse_inductor import compat, rewrite
from sparse_inductor.testing import compile_without_codegen
from sparse_inductor.verify.accuracy import cotangents, gradients, tensors_in

from .program import Program

__all__ = ["Finding", "Outcome", "check"]

CLOSE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
DRAWS = 6  # runs with random roundings that measure the sensitivity
# The entmax package's closed forms raise this for a row with a NaN; the operator's row is NaN.
DOCUMENTED = "index -1 is out of bounds"
# Eager raises this for dtypes that NumPy lacks; Dynamo computes NumPy calls with torch's operators.
NUMPY = "Got unsupported ScalarType"
# Autograd raises this if a saved tensor was written to. An operator may have saved other tensors than the original
# program: then its gradient is that of the values before the write. It may also have saved more arguments: then the
# write of a later graph raises this.
WRITTEN = "modified by an inplace operation"
# Marks writes to saved tensors that autograd does not see. Eager's gradient uses the written values, an operator's may
# use the earlier ones (docs/promises.md).
UNSEEN = ".numpy()"
POLICY: Any = os.environ.get("SPARSE_INDUCTOR_POLICY", "always")
SPREAD = 4  # a right result may be further off than the worst of these runs by this factor


@dataclasses.dataclass(frozen=True)
class Finding:
    """A difference; `kind` is its kind: value, gradient, requires_grad, alias, exception ..."""

    kind: str
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}: {self.what}"


@dataclasses.dataclass
class Outcome:
    """The result of checking a program.

    findings: what is wrong. rewritten: the patterns that rewrote it. invalid: every eager call raises.
    """

    findings: list[Finding]
    rewritten: frozenset[str] = frozenset()
    invalid: bool = False
    theirs: list[Finding] = dataclasses.field(default_factory=list)
    """Differences between plain torch.compile and eager."""


@dataclasses.dataclass
class Result:
    """The effects of one call: what it returned, wrote and raised."""

    outputs: list[Tensor] = dataclasses.field(default_factory=list)
    needs_grad: list[bool] = dataclasses.field(default_factory=list)
    grads: list[Tensor | None] = dataclasses.field(default_factory=list)
    inputs: list[Tensor] = dataclasses.field(default_factory=list)
    aliases: frozenset[tuple[str, str]] = frozenset()
    refused: list[str] = dataclasses.field(default_factory=list)
    """For each output, the error message when the caller writes to it, or ""."""
    error: BaseException | None = None
    where: str = ""
    random: Tensor | None = None
    wrote: bool = False
    """Whether it wrote to an argument."""
    broken: bool = False
    """Whether Dynamo had a graph break in this call or an earlier one, or compiled several graphs."""


def check(program: Program, verify: bool = False) -> Outcome:
    """Compare the program's calls, rewritten, with the eager ones."""
    torch._dynamo.reset()  # eager's `cond` compiles its branches, which must not happen twice
    fn = program.function()
    eager = [run(program, fn, call) for call in range(len(program.sizes))]
    report = sparse_inductor.report()
    report.clear()
    rewrite.failures.clear()
    got = compiled(program, fn, enabled=True, verify=verify)
    rewritten = frozenset(r.pattern for r in report.rewrites)
    for call, ours in enumerate(got):
        if ours.error is None and WRITTEN in str(eager[call].error):
            eager[call] = run(program, fn, call, mode=_copies_of_what_is_saved())
    findings, theirs = [], []
    for call, (ours, right) in enumerate(zip(got, eager)):
        findings += differences(program, call, ours, right, right)
    if findings and (documented := program.documented()) is not program:
        meant, shared = documented.function(), set()
        for call, ours in enumerate(got):
            right = run(documented, meant, call)
            found = differences(documented, call, ours, right, right)
            shared |= {(f.kind, f.where) for f in found}
        findings = [f for f in findings if (f.kind, f.where) in shared]
    if findings and program.training and any(UNSEEN in s.text for s in program.steps):
        saved = set()
        for call, ours in enumerate(got):
            before = run(program, fn, call, mode=_copies_of_what_is_saved())
            saved |= {(f.kind, f.where) for f in differences(program, call, ours, before, before)}
        findings = [f for f in findings if (f.kind, f.where) in saved]
    if findings and program.stage == "graph":  # count only findings that a later stage shows, too
        return check(dataclasses.replace(program, stage="aot"), verify)
    if findings:
        plain = compiled(program, fn, enabled=False)
        if any(p.error is not None and ours.error is None for p, ours in zip(plain, got)):
            # A call that raises in plain torch.compile and not in ours decides nothing. For such calls, compare what
            # Dynamo alone makes of the two programs.
            alone = dataclasses.replace(program, stage="graph")
            raises = [p.error is not None for p in plain]
            for results, enabled in ((plain, False), (got, True)):
                again = compiled(alone, fn, enabled)
                results[:] = [a if r else b for a, b, r in zip(again, results, raises)]
        if raised := [p for p in plain if p.error is not None]:
            # If the backend fails to compile a program, Dynamo runs later calls eagerly, or tries again. So an error of
            # ours counts as plain torch.compile's if any of its calls raises the same type.
            refused = {type(p.error): p for p in raised}
            plain = [refused.get(type(ours.error), p) for p, ours in zip(plain, got)]
        shared = set()
        for call, (ours, right, compiled_) in enumerate(zip(got, eager, plain)):
            theirs += differences(program, call, compiled_, right, right)
            other = right if compiled_.error is not None and ours.error is None else compiled_
            shared |= {(f.kind, f.where) for f in differences(program, call, ours, other, right)}
        findings = [f for f in findings if (f.kind, f.where) in shared]
    if program.stage == "aot" and {f.kind for f in findings} == {"write"}:
        # This stage runs the graph op by op in ATen, which returns views where generated code returns new tensors.
        return check(dataclasses.replace(program, stage="codegen"), verify)
    findings += [Finding("raised", "pattern", failure) for failure in rewrite.failures]
    checks = [c for c in report.checks if c.verdict == "differs"]
    findings += [Finding("caught", c.pattern, c.detail) for c in checks]
    return Outcome(findings, rewritten, all(r.error is not None for r in eager), theirs)


def compiled(
    program: Program, fn: Callable[..., Any], enabled: bool, verify: bool = False
) -> list[Result]:
    """Compile the program once, run all of its calls, and return their results."""
    torch._dynamo.reset()
    on: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if enabled:
        on = sparse_inductor.enabled(verify=verify, policy=POLICY)
    with on:
        model = _Model(program, fn) if program.weights else None
        whole = fn if model is None else model.forward
        call = COMPILING[program.stage](whole, dynamic=program.dynamic)
        if model is not None:
            model.compiled = call
            call = model
        results: list[Result] = []
        for number in range(len(program.sizes)):
            before = _parts()
            results.append(run(program, call, number))
            results[-1].broken = _parts() - before > 1 or any(r.broken for r in results)
        return results


def _parts() -> int:
    """Return the number of graphs that Dynamo has made plus the number of graph breaks."""
    counters = torch._dynamo.utils.counters
    return int(counters["stats"]["unique_graphs"]) + sum(counters["graph_break"].values())


def _graph(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    return compat.pre_grad_passes(gm, inputs).forward


COMPILING: dict[str, Callable[..., Any]] = {
    "graph": functools.partial(torch.compile, backend=_graph),
    "aot": compile_without_codegen,
    "codegen": torch.compile,
}


class _Model(nn.Module):
    """A module whose parameters are the program's weights; it is called with all of the program's arguments."""

    def __init__(self, program: Program, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn, self.at = fn, program.weights
        given = program.arguments()
        self.parameters_ = nn.ParameterList(nn.Parameter(given[at].detach()) for at in self.at)
        self.compiled: Callable[..., Any] = self.forward

    def adopted(self, arguments: list[Tensor]) -> list[Tensor]:
        """Return the arguments with the weights replaced by parameters that share their memory."""
        arguments = list(arguments)
        for i, at in enumerate(self.at):
            given, parameter = arguments[at].detach(), self.parameters_[i]
            if given.shape == parameter.shape:
                parameter.data = given
            else:  # autograd may still hold an accumulator of the old parameter, for gradients of the old shape
                self.parameters_[i] = parameter = nn.Parameter(given)
            arguments[at] = parameter.requires_grad_(arguments[at].requires_grad)
        return arguments

    def forward(self, *rest: Tensor) -> Any:
        arguments = list(rest)
        for parameter, at in zip(self.parameters_, self.at):
            arguments.insert(at, parameter)
        return self.fn(*arguments)

    def __call__(self, *arguments: Tensor) -> Any:
        return self.compiled(*(a for at, a in enumerate(arguments) if at not in self.at))


def run(
    program: Program, fn: Callable[..., Any], call: int, mode: Any = None, wide: bool = False
) -> Result:
    """Run one call and its backward. wide: inputs are converted to fp64."""
    result = Result()
    arguments = program.arguments(call)
    if wide:
        arguments = [_wide(t) for t in arguments]
    if isinstance(fn, _Model):
        arguments = fn.adopted(arguments)
    torch.manual_seed(program.seed % 1000)
    autocast = (
        torch.autocast("cpu", dtype=torch.bfloat16)
        if program.autocast and not wide
        else contextlib.nullcontext()
    )
    try:
        with warnings.catch_warnings(), mode or contextlib.nullcontext():
            warnings.simplefilter("ignore")
            result.where = "forward"
            versions = [a._version for a in arguments]
            with autocast, torch.set_grad_enabled(program.training):
                # A program may write to its arguments. If one is a leaf that requires a gradient, that raises.
                returned = fn(*arguments)
            outputs = tensors_in(returned)
            result.wrote = versions != [a._version for a in arguments]
            result.random = torch.get_rng_state()
            result.needs_grad = [o.requires_grad for o in outputs]
            result.aliases = _aliases(outputs, arguments, program)
            result.outputs = [
                o.detach().as_subclass(Tensor).clone(memory_format=torch.preserve_format)
                for o in outputs
            ]
            result.inputs = [a.detach().clone() for a in arguments]
            if program.training:
                result.where = "backward"
                leaves = [a for a in arguments if a.requires_grad and a.is_leaf]
                result.grads = gradients(outputs, leaves, cotangents(outputs))
                result.refused = [_refused(o) for o in outputs]
    except Exception as error:
        # The traceback's frames would keep a checkpoint of torch 2.11 active, and its hooks would see all tensors that
        # are saved from now on.
        result.error = error.with_traceback(None)
    return result


def _copies_of_what_is_saved() -> contextlib.AbstractContextManager[Any]:
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t)


def _refused(output: Tensor) -> str:
    try:
        output.zero_()
    except RuntimeError as error:
        return _line(error)
    return ""


def _wide(t: Tensor) -> Tensor:
    if not t.is_floating_point():
        return t
    return t.detach().double().requires_grad_(t.requires_grad)


def _aliases(
    outputs: list[Tensor], arguments: list[Tensor], program: Program
) -> frozenset[tuple[str, str]]:
    named = [
        *((f"output {i}", t) for i, t in enumerate(outputs)),
        *zip((i.name for i in program.inputs), arguments),
    ]
    found = set()
    for at, (name, t) in enumerate(named[: len(outputs)]):
        for other, u in named[at + 1 :]:
            if (
                t.numel()
                and u.numel()
                and t.untyped_storage().data_ptr() == u.untyped_storage().data_ptr()
            ):
                found.add((name, other))
    return frozenset(found)


# --- Differences -----------------------------------------------------------------------------------------


def differences(
    program: Program, call: int, got: Result, other: Result, eager: Result
) -> list[Finding]:
    """Return the findings that distinguish the result `got` from `other`."""

    def finding(kind: str, name: str, what: str) -> Finding:
        return Finding(kind, f"call {call}, {name}", what)

    if got.error is not None or other.error is not None:
        if other.error is not None and DOCUMENTED in str(other.error):
            return []
        # Eager's `cond` is compiled, and there Dynamo cannot trace the entmax package.
        if isinstance(other.error, torch._dynamo.exc.Unsupported) and got.error is None:
            return []
        if NUMPY in str(other.error) and got.error is None:
            return []
        if got.wrote and got.broken and other.error is None and WRITTEN in str(got.error):
            return []
        if got.error is None or other.error is None:
            who, result = ("this program", got) if other.error is None else ("the other", other)
            what = f"{who} alone raises {type(result.error).__name__}: {_line(result.error)}"
            return [finding("exception", result.where, what)]
        return []
    if len(got.outputs) != len(other.outputs):
        return [finding("count", "outputs", f"{len(got.outputs)}, not {len(other.outputs)}")]
    found = []
    if program.stage != "codegen" and not torch.equal(got.random, other.random):
        found.append(finding("random", "state", "it is another one"))
    for pair in sorted(got.aliases ^ other.aliases):
        which = "have" if pair in got.aliases else "do not have"
        found.append(finding("alias", " and ".join(pair), f"{which} one memory"))
    pairs: list[tuple[str, str, Tensor | None, Tensor | None]] = []
    for i, (a, b) in enumerate(zip(got.outputs, other.outputs)):
        pairs.append(("value", f"output {i}", a, b))
        of = [("dtype", a.dtype, b.dtype), ("shape", tuple(a.shape), tuple(b.shape))]
        of += [("requires_grad", got.needs_grad[i], other.needs_grad[i])]
        if a.numel() and a.shape == b.shape:
            of.append(("stride", _strides(a), _strides(b)))
        if got.refused and got.refused[i] and other.refused and not other.refused[i]:
            of.append(("write", got.refused[i], "allowed"))  # torch.compile allows more than eager
        found += [finding(kind, f"output {i}", f"{x}, not {y}") for kind, x, y in of if x != y]
    leaves = [i.name for i in program.inputs if i.grad]
    pairs += [("gradient", n, a, b) for n, a, b in zip(leaves, got.grads, other.grads)]
    pairs += [("input", i.name, a, b) for i, a, b in zip(program.inputs, got.inputs, other.inputs)]
    off = [at for at, (_, _, a, b) in enumerate(pairs) if not _close(a, b)]
    if (
        program.exact
    ):  # these programs test the gradients of ties, which random roundings would break
        off = [at for at in off if not _within(*pairs[at][2:], pairs[at][3], [pairs[at][3]])]
    elif off and eager.error is None:
        others = [_flat(r) for r in _others(program, call)]
        centre = _flat(eager)
        others = [o for o in others if len(o) == len(centre)]
        if len(centre) == len(pairs):
            off = [
                at for at in off if not _within(*pairs[at][2:], centre[at], [o[at] for o in others])
            ]
    return found + [finding(*pairs[at][:2], _described(*pairs[at][2:])) for at in off]


def _flat(result: Result) -> list[Tensor | None]:
    return [*result.outputs, *result.grads, *result.inputs]


def _line(error: BaseException) -> str:
    text = str(error).strip().splitlines() or [""]
    return text[0][:240]


def _strides(t: Tensor) -> list[int]:
    return [stride for stride, size in zip(t.stride(), t.shape) if size > 1]


def _close(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:  # no gradient and a gradient of zeros are equivalent
        present = a if a is not None else b
        return present is None or not present.any()
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    tolerance = CLOSE.get(a.dtype, 0.2)
    x, y = a.double(), b.double()
    scale = float(y[y.isfinite()].abs().mean()) if y.isfinite().any() else 1.0
    return torch.allclose(
        x, y, rtol=tolerance, atol=tolerance * max(min(scale, 1e30), 1e-3), equal_nan=True
    )


def _within(
    a: Tensor | None, b: Tensor | None, eager: Tensor | None, others: list[Tensor | None]
) -> bool:
    """Whether `a` is no further from `b` than the others are from eager's, in the root mean square and at most."""
    if a is None or b is None or eager is None or not a.shape == b.shape == eager.shape:
        return False
    near = [o.to(a.dtype).double() for o in others if o is not None and o.shape == a.shape]
    if a.dtype != b.dtype or not near:
        return False
    x, y, z = a.double(), b.double(), eager.double()
    if not torch.stack([_finite_alike(o, x) for o in (y, *near)]).any(0).all():
        return False
    gap, tolerance = _gap(x, y), CLOSE.get(a.dtype, 0.2)
    spread = torch.stack([_gap(o, z) for o in near])
    typical, worst = float(spread.square().mean(-1).sqrt().max()), float(spread.max())
    is_typical = float(gap.square().mean().sqrt()) <= SPREAD * typical + tolerance
    return is_typical and float(gap.max()) <= SPREAD * worst + 4 * tolerance


def _finite_alike(x: Tensor, y: Tensor) -> Tensor:
    """Return where both are NaN, both are infinite, or neither is."""
    return (x.isnan() == y.isnan()) & (x.isinf() == y.isinf())


def _gap(x: Tensor, y: Tensor) -> Tensor:
    counts = y.isfinite() & x.isfinite()
    return torch.where(counts, (x - y).abs() / y.abs().clamp(min=1.0), 0.0).flatten()


def _described(a: Tensor | None, b: Tensor | None) -> str:
    if a is None or b is None:
        return f"{'None' if a is None else 'a tensor'}, eager {'None' if b is None else 'a tensor'}"
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype} {tuple(a.shape)}, eager {b.dtype} {tuple(b.shape)}"
    wrong = ~torch.isclose(
        a.double(), b.double(), rtol=CLOSE.get(a.dtype, 0.0), atol=1e-6, equal_nan=True
    )
    if not wrong.any():
        return "differs slightly"
    at = tuple(int(i) for i in wrong.nonzero()[0])
    count = f"{int(wrong.sum())} of {wrong.numel()}, the first at {list(at)}"
    return f"{count}: {a[at].item():.6g}, eager {b[at].item():.6g}"


# --- The program's sensitivity --------------------------------------------------------------------------


def _others(program: Program, call: int) -> list[Result]:
    fn = program.function(branching=False)
    modes = [functools.partial(_Jitter, seed) for seed in range(DRAWS)] + [_Wide]
    others = []
    for mode in modes:
        result = run(program, fn, call, mode=mode(), wide=mode is _Wide)
        if WRITTEN in str(result.error):
            with _copies_of_what_is_saved():
                result = run(program, fn, call, mode=mode(), wide=mode is _Wide)
        others.append(result)
    return [o for o in others if o.error is None]


_aten = torch.ops.aten
# Operators that move or select values and round none.
_EXACT = {
    getattr(_aten, name)
    for name in (
        "relu relu_ max min amax amin maximum minimum fmax fmin where clamp clamp_ clamp_min "
        "clamp_min_ clamp_max gather index index_select masked_fill masked_fill_ cat stack "
        "topk sort clone copy_ _to_copy neg neg_ abs fill_ zero_ zeros zeros_like ones "
        "ones_like full full_like empty empty_like new_zeros new_full new_empty new_ones "
        "scalar_tensor lift_fresh arange threshold flip roll eq ne gt ge lt le sign tril triu "
        "embedding detach alias set_ rand_like bernoulli_ bernoulli threshold_backward "
        "constant_pad_nd repeat scatter index_put index_put_ nan_to_num round floor ceil"
    ).split()
    if hasattr(_aten, name)
}


class _Jitter(TorchDispatchMode):
    """A dispatch mode that perturbs every rounded result by up to a rounding of its dtype."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if getattr(func, "overloadpacket", None) in _EXACT or getattr(func, "is_view", False):
            return out
        for t in tensors_in(out):
            if t.is_floating_point() and t.dtype in CLOSE and t.numel():
                u = torch.rand(t.shape, generator=self.generator, dtype=torch.float64) * 2 - 1
                t.copy_((t.double() * (1 + torch.finfo(t.dtype).eps * u)).to(t.dtype))
        return out


_NARROW = {torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2}


class _Wide(TorchDispatchMode):
    """A dispatch mode that computes in fp64; a cast to a narrower dtype rounds, and its result is fp64 again.

    Unlike verify's `InDouble` it leaves the dtype of random numbers as it is, which decides their values.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if (
            func.overloadpacket is _aten._to_copy
            and isinstance(args[0], Tensor)
            and args[0].is_floating_point()
        ):
            dtype = kwargs.get("dtype")
            if dtype is not None and dtype.is_floating_point:
                value = func(*args, **kwargs)
                return value.double()
        if func._schema.is_mutable:
            return func(*args, **kwargs)
        args, kwargs = pytree.tree_map(_double, (args, kwargs))
        return pytree.tree_map(_double, func(*args, **kwargs))


def _double(value: Any) -> Any:
    return (
        value.double()
        if isinstance(value, Tensor) and value.dtype in (torch.float32, *_NARROW)
        else value
    )
