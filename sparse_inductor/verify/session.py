"""verify=True: the first real call of each rewritten graph checks every rewrite in it.

Each rewrite is wrapped in an operator, `sparse_inductor::verified`, that holds two subgraphs: the operations as
written, and the replacement. The first call runs both on the same inputs, runs the written subgraph in fp64 as well,
and compares values and, if gradients are needed, gradients for random cotangents (`accuracy`). If they agree, the
operator runs the rewritten subgraph from then on. If not, it returns the result of the written subgraph, runs that one
from then on, and says so in the report. Rewrites are checked independently of each other. `topk`, and a maximum on a
GPU, do not specify which of equal values they choose; if only their gradients differ, the comparison is repeated on
slightly perturbed inputs.

Cost: the first call runs all three programs, with the intermediate results that a rewrite avoids. Later calls pay for a
fusion barrier in Inductor and, in training, for a second forward of the subgraph in its backward. Such graphs are not
cached.

The written subgraph is derived from the user's program, not from the pattern's understanding of it (`cut`). It
includes all operations that may write to a result, inputs as they were when they were read, gradient modes, casts that
round, and whether each result requires a gradient.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import compat
from ..graph.fakes import fake
from ..ops._dispatch import define
from ..reporting.findings import Check
from ..reporting.records import Report
from .accuracy import (
    Chosen,
    Comparison,
    InDouble,
    LowestPrecision,
    compare,
    cotangents,
    gradients,
    to_double,
)
from .cut import Subgraph, Watch

log = logging.getLogger("sparse_inductor")

SHOWN = 3  # complaints shown per check
NUDGE = 1e-2  # relative perturbation, larger than the rounding of bf16
TIED = "; compared on inputs moved by 1 %, because gradients differ on these: equal values"


@dataclasses.dataclass
class Region:
    """The two subgraphs of one rewrite, and the state of their check."""

    check: Check
    report: Report
    written: Subgraph
    rewritten: Subgraph
    differentiable: Sequence[bool]
    """For each result whether it requires a gradient if an input does. A count of activations requires none."""
    origins: Sequence[int]
    """For each tensor the index of the tensor that receives its gradient. The two differ for a copy that was made
    because the original may be written to before the operator runs."""
    top: bool = False
    """Whether the results are the values and indices of a topk, which does not specify which of equal values it
    returns."""
    chosen: Subgraph | None = None
    lock: Any = dataclasses.field(default_factory=threading.RLock)

    def forward(self, values: Sequence[Any], needs: Sequence[bool]) -> tuple[Tensor, ...]:
        """Return the result. The first call chooses the subgraph for all calls."""
        with self.lock:
            if self.chosen is None:
                with compat.unobserved():
                    return self._first(values, needs)
        return _run(self.chosen, values)

    def backward(
        self, values: Sequence[Any], needs: Sequence[bool], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Return the gradients of the inputs in `needs`, after running the forward a second time."""
        outputs, leaves = self._run_with_grad(self.chosen or self.rewritten, values, needs)
        return self._gradients(outputs, leaves, needs, grads)

    def _run_with_grad(
        self, subgraph: Subgraph, values: Sequence[Any], needs: Sequence[bool]
    ) -> tuple[list[Tensor], dict[int, Tensor]]:
        """Return the results, and the leaves that need a gradient, by position."""
        inputs, leaves = list(values), {}
        for at, origin in enumerate(self.origins):
            if needs[origin]:
                leaves[at] = inputs[at] = values[at].detach().requires_grad_()
        with compat.autograd_on():
            # The first operation may write to an input in place, which autograd does not allow for a leaf.
            inputs = [v.view_as(v) if at in leaves else v for at, v in enumerate(inputs)]
            return list(subgraph(inputs)), leaves

    def _gradients(
        self,
        outputs: Sequence[Tensor],
        leaves: dict[int, Tensor],
        needs: Sequence[bool],
        cotangent: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """Return the gradients of the inputs in `needs`, including those of their copies."""
        sums: dict[int, Tensor | None] = {at: None for at, need in enumerate(needs) if need}
        for at, grad in zip(leaves, gradients(outputs, [*leaves.values()], cotangent)):
            if grad is not None:
                so_far = sums[self.origins[at]]
                sums[self.origins[at]] = grad if so_far is None else so_far + grad
        return list(sums.values())

    def _first(self, values: Sequence[Any], needs: Sequence[bool]) -> tuple[Tensor, ...]:
        try:
            got, plain, found = self._compare(values, needs)
        except torch.OutOfMemoryError:
            self.chosen = self.rewritten
            self._say("unchecked", "there was not enough memory to check it", [])
            return _run(self.rewritten, values)
        wrong = [c for c in found if not c.ok]
        tied = bool(wrong) and all(c.what.startswith("gradient") for c in wrong)
        tied = tied and (self.written.chooses or any(t.is_cuda for t in got))
        if tied:
            _, _, found = self._compare(_nudged(values, needs), needs)
            tied = all(c.ok for c in found)
        if not wrong or tied:
            self.chosen = self.rewritten
            text = _summary(found, any(needs))
            self._say("agrees", f"{text}{TIED if tied else ''}", found)
            return got
        self.chosen = self.written
        reason = "; ".join(map(str, wrong[:SHOWN]))
        reason += f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        self._say("differs", reason, found)
        log.warning(
            "verify: %s at %s is wrong; its result is not used: %s",
            self.check.pattern,
            self.check.location,
            reason,
        )
        return plain

    def _compare(
        self, values: Sequence[Any], needs: Sequence[bool]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], list[Comparison]]:
        """Return the results of the rewritten and of the written subgraph, and all comparisons."""
        drawn: list[Tensor | None] = []
        grads: list[Tensor | None] = []
        plain_grads: list[Tensor | None] = []
        got: Sequence[Tensor]
        plain: Sequence[Tensor]
        found = []
        if any(needs):
            got, leaves = self._run_with_grad(self.rewritten, values, needs)
            with self._choice(got) as choice, LowestPrecision() as precision:
                plain, plain_leaves = self._run_with_grad(self.written, values, needs)
            drawn = cotangents(plain)
            plain_grads = self._gradients(plain, plain_leaves, needs, drawn)
            grads = self._gradients(got, leaves, needs, drawn)
            found += [_needs_grad(i, *pair) for i, pair in enumerate(zip(got, plain, strict=True))]
        else:
            got = _run(self.rewritten, values)
            with self._choice(got) as choice, LowestPrecision() as precision:
                plain = _run(self.written, values)
        if choice is not None and not choice.right:
            found.append(Comparison("the choice", "is not of the largest"))
        truth, truth_grads = self._reference(values, needs, drawn, got)
        for i, three in enumerate(zip(got, plain, truth, strict=True)):
            ties = not three[0].is_floating_point()
            found.append(compare(f"result {i}", *three, ties=ties, precision=precision.dtype))
        for i, gradient in enumerate(zip(grads, plain_grads, truth_grads, strict=True)):
            found.append(compare(f"gradient {i}", *gradient, ties=True, precision=precision.dtype))
        return (
            tuple(t.detach() for t in got),
            tuple(t.detach() for t in plain),
            found,
        )

    def _choice(self, got: Sequence[Tensor]) -> contextlib.AbstractContextManager[Any]:
        """Make a written topk return the entries that the rewritten one has chosen."""
        if not self.top:
            return contextlib.nullcontext()
        return Chosen(next((t for t in got if not t.is_floating_point()), None))

    def _reference(
        self,
        values: Sequence[Any],
        needs: Sequence[bool],
        drawn: list[Tensor | None],
        got: Sequence[Tensor],
    ) -> tuple[Sequence[Tensor], list[Tensor | None]]:
        """Run the written subgraph in fp64, or in fp32 if that does not fit in memory."""
        for wide in (True, False):
            try:
                inputs = [to_double(v) if wide else _single(v) for v in values]
                # Dispatch modes are thread-local: autograd threads that an operator's kernel starts do not have them.
                with (
                    torch.autograd.set_multithreading_enabled(False),
                    self._choice(got),
                    InDouble() if wide else contextlib.nullcontext(),
                ):
                    if not any(needs):
                        return _run(self.written, inputs), []
                    outputs, leaves = self._run_with_grad(self.written, inputs, needs)
                    return outputs, self._gradients(outputs, leaves, needs, drawn)
            except torch.OutOfMemoryError:
                if not wide:
                    raise
        raise AssertionError("unreachable")

    def _say(self, verdict: str, detail: str, found: list[Comparison]) -> None:
        errors = [c.error for c in found if c.error is not None]
        plain = [c.plain_error for c in found if c.plain_error is not None]
        self.report.add_check(
            self.check._replace(
                verdict=verdict,
                detail=detail,
                error=max(errors, default=None),
                plain_error=max(plain, default=None),
            )
        )


def _single(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _nudged(values: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    """Return the values, with independent relative noise on each element of the tensors that need a gradient."""
    generator = torch.Generator().manual_seed(0)
    moved = list(values)
    for at, need in enumerate(needs):
        if need:
            noise = torch.randn(values[at].shape, generator=generator).to(values[at].device)
            moved[at] = (values[at] * (1 + NUDGE * noise)).to(values[at].dtype)
    return moved


def _summary(found: list[Comparison], with_gradients: bool) -> str:
    what = "values and gradients" if with_gradients else "values"
    ours = max((c.error for c in found if c.error is not None), default=0.0)
    plain = max((c.plain_error for c in found if c.plain_error is not None), default=0.0)
    return f"{what} agree with a reference: error {ours:.2g}, unrewritten {plain:.2g}"


def _run(subgraph: Subgraph, values: Sequence[Any]) -> tuple[Tensor, ...]:
    # Below autograd, a dispatch mode gets a composite operation whole (einsum), which autocast then passes over.
    with compat.autograd_on(), torch.no_grad():
        return subgraph(values)


def _needs_grad(number: int, got: Tensor, plain: Tensor) -> Comparison:
    """Compare whether a result requires a gradient in the two programs."""
    what = f"result {number}"
    if got.requires_grad == plain.requires_grad:
        return Comparison(what)
    return Comparison(
        what, f"gradient required: {got.requires_grad}, unrewritten {plain.requires_grad}"
    )


# --- The operator ---------------------------------------------------------------------------------

_regions: dict[str, Region] = {}
_numbers = itertools.count()

_lib = define(
    "verified(Tensor[] tensors, SymInt[] sizes, str key, bool[]? needs=None) -> Tensor[]",
    "verified_backward(Tensor[] grads, Tensor[] tensors, SymInt[] sizes, str key, bool[] needs) -> Tensor[]",
)
_OP, _BACKWARD = torch.ops.sparse_inductor.verified, torch.ops.sparse_inductor.verified_backward


def guard(watch: Watch, check: Check, report: Report, top: bool) -> None:
    """Wrap a replacement that `watch` has seen in the operator, which adds its findings to `report`. top: see
    `Region.top`."""
    key = f"{check.pattern} {next(_numbers)}"
    differentiable = [fake(old).requires_grad for old in watch.replaced]
    _regions[key] = Region(
        check, report, watch.written, watch.rewritten, differentiable, watch.origins, top
    )
    watch.enclose(_OP.default, key)


def _verified(tensors, sizes, key, needs=None):
    values = [*tensors, *sizes]
    found = _regions[key].forward(values, needs or [False] * len(tensors))
    return _owned(found, tensors)


def _verified_backward(grads, tensors, sizes, key, needs):
    found = _regions[key].backward([*tensors, *sizes], needs, grads)
    wanted = (t for t, need in zip(tensors, needs) if need)
    return [torch.zeros_like(t) if g is None else g.contiguous() for t, g in zip(wanted, found)]


def _owned(outputs, inputs):
    """Make the outputs contiguous and copy those that share memory with an input or another output, because an operator
    must not return aliases."""
    taken = {compat.storage_key(t) for t in inputs}
    owned = []
    for t in outputs:
        t = t.detach().contiguous()
        t = t.clone() if compat.storage_key(t) in taken else t
        taken.add(compat.storage_key(t))
        owned.append(t)
    return owned


def _fake(tensors, sizes, key, needs=None):
    found = _run(_regions[key].rewritten, [*tensors, *sizes])
    return [t.new_empty(t.shape) for t in found]


def _fake_backward(grads, tensors, sizes, key, needs):
    return [t.new_empty(t.shape) for t, need in zip(tensors, needs) if need]


class _Verified(torch.autograd.Function):
    @staticmethod
    def forward(ctx, sizes, key, needs, *tensors):
        ctx.save_for_backward(*tensors)
        ctx.call = sizes, key, needs
        with compat.below_autograd():
            out = _OP(list(tensors), sizes, key, needs)
        differentiable = _regions[key].differentiable
        ctx.mark_non_differentiable(*(t for t, flows in zip(out, differentiable) if not flows))
        return tuple(out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        given = [g.contiguous() for g in grads]
        found = iter(_BACKWARD(given, list(ctx.saved_tensors), *ctx.call))
        return None, None, None, *(next(found) if need else None for need in ctx.call[2])


def _autograd(tensors, sizes, key, needs=None):
    wanted = [t.requires_grad and torch.is_grad_enabled() for t in tensors]
    if any(wanted):
        return list(_Verified.apply(sizes, key, wanted, *tensors))
    with compat.below_autograd():
        return _OP(tensors, sizes, key, needs)


_lib.impl("verified", _autograd, "Autograd")
for _name, _kernel, _meta in (
    ("verified", _verified, _fake),
    ("verified_backward", _verified_backward, _fake_backward),
):
    for _key in ("CPU", "CUDA"):
        _lib.impl(_name, _kernel, _key)
    torch.library.register_fake(f"sparse_inductor::{_name}", _meta, lib=_lib)
