"""Requirements on every operator: shapes, dtypes and strides as in its fake kernel, equal results in every layout,
results that are not views, and the checks of `torch.library.opcheck`, forward and backward."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sparse_inductor import ops
from sparse_inductor.ops import _dispatch
from support import Promises

LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "channels_last": lambda t: t.movedim(1, -1).contiguous().movedim(-1, 1) if t.dim() > 2 else t,
    "batch_inside": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1) if t.dim() > 1 else t,
    "strided": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "every_other": lambda t: t.repeat_interleave(2, 0)[::2],
    "expanded": lambda t: t[:1].expand(t.shape),
    "offset": lambda t: torch.cat([t, t])[len(t) :],
}


def programs(batch: int, length: int):
    """Return for each name a function that calls operators on tensors, and the shapes of these tensors."""
    x, square, heads = (batch, length, 4), (6, 4), (batch, 2, length, 4)
    head, block, attend = ops.splade_head, ops.relu_ffn, ops.entmax_attention
    scores = functools.partial(
        ops.sparse_scores, ids=torch.tensor([0, 1, 2, 3]), values=torch.ones(4)
    )
    kept = torch.arange(length).expand(batch, -1) % 3 > 0
    lengths = torch.arange(batch) % (length + 1)
    # In a layout with equal rows of a weight, rounding would otherwise decide which values are the largest.
    apart = torch.arange(6.0)
    return {
        "relu_ffn": (lambda x, w, d: block(x, w, d), (x, square, (4, 6))),
        "relu_ffn_gated": (
            lambda x, w, d, u, r, a, b, c: block(
                x, w, d, u, gate_bias=a, down_bias=b, return_stats=True, residual=r, stat_weight=c
            ),
            (x, square, (4, 6), square, x, (6,), (4,), (6,)),
        ),
        "relu_ffn_shift": (lambda x, w, d, s: block(x, w, d, shift=s), (x, square, (4, 6), (4,))),
        "relu_ffn_thresholds": (
            lambda x, w, d: block(x, w, d, thresholds=torch.linspace(-1, 1, 6)), (x, square, (4, 6)),
        ),
        "splade_head": (lambda x, w, b: head(x, w, b), (x, square, (6,))),
        "splade_head_rows": (
            lambda x, w, m: head(x, w, None, rows=[m], steps="row_mul(0) | relu | log1p"),
            (x, square, (batch, length)),
        ),
        "splade_head_mask": (lambda x, w, b: head(x, w, b, kept, return_argmax=True), (x, square, (6,))),
        "splade_head_steps": (
            lambda x, w, b, m: head(x, w, b, rows=[m > 0], steps="square | row_where(0, -1)"),
            (x, square, (6,), (batch, length)),
        ),
        "splade_head_axes": (
            lambda h, w, b: head(h, w, b, rows=[torch.linspace(-1, 1, length)], steps="row_add(0) | relu"),
            (heads, square, (6,)),
        ),
        "splade_head_half": (
            lambda x, w: head(x.bfloat16(), w.bfloat16(), steps="tanh", out_dtype=torch.float32), (x, square),
        ),
        "splade_head_states": (lambda x: head(x, torch.linspace(-1, 1, 24).view(square)), (x,)),
        "splade_head_weight": (lambda w: head(torch.linspace(-1, 1, 4 * length).view(length, 4), w), (square,)),
        "entmax": (lambda x: ops.entmax(x), (x,)),
        "entmax_rows_inside": (lambda x: ops.entmax(x, 2.0, dim=1), (x,)),
        "entmax_alpha": (lambda x, a: ops.entmax(x, 1.5 + a.sigmoid() / 4), (x, (batch, length, 1))),
        "entmax_attention": (lambda q, k, v: attend(q, k, v), (heads,) * 3),
        "entmax_attention_bias": (
            lambda q, k, v, b, a: attend(q, k, v, 1.5 + a.sigmoid() / 4, bias=b),
            (*(heads,) * 3, (batch, 2, length, length), (batch, 2, length, 1)),
        ),
        "entmax_attention_masks": (
            lambda q, k, v: attend(
                q, k, v, 1.3, mask=kept[:, None, None], key_lengths=lengths, causal=True, fill=-1e9, added=True
            ),
            (heads, *((batch, 1, length, 4),) * 2),
        ),
        "sparse_scores": (
            lambda q: ops.sparse_scores(q, torch.tensor([[0, 1], [2, 3]]), torch.ones(2, 2)), ((batch, 4),),
        ),
        "sparse_scores_rows": (
            lambda q: scores(q, rows=torch.tensor([1, 0, 2, 0]), num_docs=3), ((batch, 4),),
        ),
        "sparse_scores_offsets": (lambda q: scores(q, offsets=torch.tensor([0, 3, 3, 4])), ((batch, 4),)),
        "sparse_scores_topk": (
            lambda q: scores(q, offsets=torch.tensor([0, 3, 3, 4]), k=2)[0], ((batch, 4),),
        ),
        "topk_encode": (lambda x, w, b: ops.topk_encode(x, w, b + apart, k=2)[0], (x, square, (6,))),
        "topk_encode_scores": (
            lambda x, w: ops.topk_encode(x, w, k=2, scores=(x @ w.t() + apart).detach(), ordered=False)[0],
            (x, square),
        ),
        "topk_encode_shift": (
            lambda x, w, s: ops.topk_encode(x, w, apart, k=2, shift=s)[0], (x, square, (4,)),
        ),
        "sparse_decode": (
            lambda v, w, b: ops.sparse_decode(v, torch.arange(4).expand(v.shape), w, b), (x, square, (4,)),
        ),
        "batch_topk_encode": (
            lambda x, w, b: ops.batch_topk_encode(x, w, b + apart, k=min(9, 6 * x[..., 0].numel()))[0],
            (x, square, (6,)),
        ),
        "batch_topk_encode_scores": (
            lambda x, w, s: ops.batch_topk_encode(
                x, w, k=3, scores=(x @ w.t() + apart).detach(), ordered=False, shift=s
            )[0],
            (x, square, (4,)),
        ),
        "batch_topk_decode": (
            lambda v, w, b: ops.batch_topk_decode(v, torch.tensor([11, 3, 0, 7]), w, b, sizes=(3, 1)),
            ((4,), square, (4,)),
        ),
        "sparse_product": (lambda x, w, b: ops.sparse_product(x, w, b), (x, (4, 6), (6,))),
        "sparse_product_relu": (lambda x, w: ops.sparse_product(x, w, relu=True), (x, (4, 6))),
        "sparse_gradient_linear": (
            lambda x, w, b, s: ops.sparse_gradient_linear(x, w, b, shift=s), (x, square, (6,), (4,)),
        ),
    }  # fmt: skip


PROGRAMS = [*programs(1, 1)]
# Together their tensors have every kind of axis. The others are only run by opcheck, in one layout and size.
OF_ANY_SIZE = (
    "relu_ffn", "relu_ffn_gated", "splade_head", "splade_head_rows", "splade_head_steps", "entmax",
    "entmax_rows_inside", "entmax_alpha", "entmax_attention", "entmax_attention_bias", "sparse_scores",
    "topk_encode", "sparse_decode", "sparse_product", "sparse_gradient_linear",
)  # fmt: skip
# These are composed of other operators and return views of their results.
COMPOSED = (
    "sparse_product", "sparse_product_relu", "sparse_gradient_linear",
    "batch_topk_encode", "batch_topk_encode_scores", "batch_topk_decode",
)  # fmt: skip


def tensors(shapes, layout=LAYOUTS["contiguous"]):
    g = torch.Generator().manual_seed(0)
    return [layout(torch.randn(s, generator=g)).detach().requires_grad_() for s in shapes]


def step(fn, inputs, layout=LAYOUTS["contiguous"]):
    """Return the results of the operators, and gradients for cotangents of the given layout."""
    results = [t for t in pytree.tree_leaves(fn(*inputs)) if t.requires_grad]
    g = torch.Generator().manual_seed(1)
    cotangents = [layout(torch.randn(t.shape, generator=g)) for t in results]
    learnt = [t for t in inputs if t.requires_grad]
    return results, torch.autograd.grad(results, learnt, cotangents, allow_unused=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OF_ANY_SIZE)
def test_a_layout_changes_strides_alone_and_as_the_fake_says(name, layout):
    for batch, length in ((3, 5), (1, 5), (3, 1), (0, 5)):
        if batch == 0 and layout == "offset":
            continue
        fn, shapes = programs(batch, length)[name]
        inputs = tensors(shapes, LAYOUTS[layout])
        with Promises() as promises:
            found = step(fn, inputs, LAYOUTS[layout])
            with torch.no_grad():
                fn(*inputs)
        gradients = {op for op in promises.seen if op.endswith("backward") or "outer" in op}
        assert gradients and promises.seen > gradients
        if (batch, length) != (3, 5):
            continue
        copies = [t.detach().contiguous().requires_grad_() for t in inputs]
        wanted = step(fn, copies, lambda t: LAYOUTS[layout](t).contiguous())
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", OF_ANY_SIZE)
def test_a_gradient_that_alone_is_asked_for_is_the_same(name):
    fn, shapes = programs(3, 5)[name]
    inputs = tensors(shapes)
    _, wanted = step(fn, inputs)
    for i, want in enumerate(wanted):
        if want is not None:
            alone = [t.detach().requires_grad_(t is inputs[i]) for t in inputs]
            torch.testing.assert_close(step(fn, alone)[1], (want,))


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_views_of_nothing(name):
    """The caller may write to results; autograd refuses writes to views that an autograd.Function returned."""
    fn, shapes = programs(3, 5)[name]
    inputs = tensors(shapes)
    for _ in range(2):
        results, _ = step(fn, inputs)
        for result in results:
            assert not result._is_view() or name in COMPOSED
            result.mul_(2)


@pytest.mark.parametrize("name", OF_ANY_SIZE)
def test_compiled_for_any_size(name):
    """Results have the same bits as in eager mode and may be written to."""
    fn, _ = programs(3, 5)[name]
    compiled = torch.compile(fn, fullgraph=True, dynamic=True, backend="aot_eager")
    for sizes in ((3, 5), (4, 7)):
        inputs = tensors(programs(*sizes)[name][1])
        found = step(compiled, inputs)
        torch.testing.assert_close(found, step(fn, inputs), rtol=0, atol=0)
        for result in found[0]:
            result.mul_(2)


def calls(name: str) -> list[tuple[Any, tuple[Any, ...]]]:
    """Return the operators that a training step calls, also indirectly by autograd and other operators, with their
    arguments."""
    made: list[tuple[Any, tuple[Any, ...]]] = []

    class Above(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if str(func).startswith("sparse_inductor."):
                made.append((func.default, args))
            return func(*args, **(kwargs or {}))

    class Below(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "sparse_inductor":
                made.append((func, pytree.tree_map_only(Tensor, Tensor.detach, args)))
            return func(*args, **(kwargs or {}))

    fn, shapes = programs(3, 5)[name]
    with Above(), Below():
        step(fn, tensors(shapes))
    return made


@pytest.mark.parametrize("name", PROGRAMS)
def test_opcheck(name):
    """Each operator is checked once: public ones with gradients, others with the arguments that autograd passes."""
    for op, args in {op: (op, args) for op, args in reversed(calls(name))}.values():
        torch.library.opcheck(op, args)


def test_every_operator_is_called_here():
    """Operators without a gradient are the exception; they have separate tests."""
    called = {op._schema.name.partition("::")[2] for name in PROGRAMS for op, _ in calls(name)}
    elsewhere = {name for name in _dispatch.functions if name.startswith("sparse_scores_")}
    assert called >= {*_dispatch.functions} - elsewhere
