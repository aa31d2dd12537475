"""Operators on DTensors: sharding rules for a device mesh.

A rule labels the dimensions of the tensors with letters, as einsum does ("B" the batch, "V" the vocabulary), and says
which letters may be sharded. If B is sharded, every tensor with a B is sharded in that dimension and the others are
replicated; a result without a B is then a partial sum if the rule says so (gradients), else replicated. For each
dimension of the mesh the choice that moves the fewest elements is taken. A dimension that is sharded in another way,
such as a sequence, is gathered.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

# A letter for each dimension, "" for a dimension that is never sharded. Several letters mean that the dimension is
# sharded with each of them; this is for opaque tensors that the forward saves for its backward.
Dims = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Rule:
    """A sharding rule for one call.

    inputs: letters of each tensor argument, in the order of the schema (None if the argument is None).
    outputs: letters of each resulting tensor (None for the gradient of an absent tensor); for a list of unknown length
        the last entry applies to the rest.
    ways: the sets of letters that may be sharded over one dimension of the mesh.
    sums: whether a result without the letter is a partial sum. even: letters with sizes that must divide evenly.
    skip, deciding: the index of the first tensor argument that the choice depends on, and the number of such arguments.
        A backward depends on its forward's arguments only, so that it makes the same choice.
    """

    inputs: tuple[Dims | None, ...]
    outputs: tuple[Dims | None, ...]
    ways: tuple[str, ...]
    sums: bool = False
    even: str = ""
    skip: int = 0
    deciding: int | None = None

    def backward(
        self,
        grads: Sequence[Dims | None],
        saved: Sequence[Dims | None],
        results: Sequence[Dims | None],
    ) -> Rule:
        """The rule of this call's backward, which takes gradients, the inputs and saved tensors, and returns the
        gradients of some inputs."""
        return dataclasses.replace(
            self,
            inputs=(*grads, *self.inputs, *saved),
            outputs=tuple(results),
            sums=True,
            skip=len(grads),
            deciding=sum(letters is not None for letters in self.inputs),
        )


def dims(t: Tensor | None, letters: str) -> Dims | None:
    """The letters of a tensor that broadcasts: aligned at the right, "" for size 1. "." is never sharded."""
    if t is None:
        return None
    named = letters[len(letters) - t.dim() :]
    return tuple(
        "" if c == "." or (type(s) is int and s == 1) else c for c, s in zip(named, t.shape)
    )


def whole(*args: Any) -> Rule:
    """The rule of an operator that every process computes on whole tensors."""
    return Rule(tuple(dims(t, "." * t.dim()) for t in args if isinstance(t, Tensor)), (("",),), ())


def share(lib: torch.library.Library, op: str, rule: Callable[..., Rule]) -> None:
    """Registers `rule`, which takes the operator's arguments, for DTensors."""
    if not torch.distributed.is_available():
        return
    from torch.distributed.tensor import DTensor

    def spread(cls: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return _spread(op, func, args, kwargs or {}, rule)

    torch.library.register_torch_dispatch(f"sparse_inductor::{op}", DTensor, spread, lib=lib)


def _spread(op: str, func: Any, args: Any, kwargs: Any, rule: Callable[..., Rule]) -> Any:
    from torch.distributed.tensor import DTensor

    leaves, structure = pytree.tree_flatten((args, kwargs))
    tensors = [t for t in leaves if isinstance(t, Tensor)]
    if not all(isinstance(t, DTensor) for t in tensors):
        raise TypeError(
            f"sparse_inductor::{op} takes either DTensors or plain tensors, got both: distribute_tensor, or "
            "DTensor.from_local, makes a DTensor of a plain one"
        )
    mesh = tensors[0].device_mesh
    if any(t.device_mesh != mesh for t in tensors):
        raise ValueError(f"the DTensors of sparse_inductor::{op} are on different meshes")
    said = rule(*args, **kwargs)
    inputs = [letters for letters in said.inputs if letters is not None]
    assert len(inputs) == len(tensors), (op, said)
    sizes = {c: s for letters, t in zip(inputs, tensors) for c, s in zip(letters, t.shape) if c}
    ways = _choose(said, inputs, tensors, mesh, sizes)
    moved = iter(
        _part(t, [_placed(letters, way) for way in ways]) for letters, t in zip(inputs, tensors)
    )
    local = pytree.tree_map(lambda x: next(moved) if isinstance(x, Tensor) else x, leaves)
    args, kwargs = pytree.tree_unflatten(local, structure)
    results, form = pytree.tree_flatten(func(*args, **kwargs))
    wrapped = [
        _wrap(r, said.outputs[min(i, len(said.outputs) - 1)], ways, said, mesh, sizes)
        for i, r in enumerate(results)
    ]
    return pytree.tree_unflatten(wrapped, form)


def _part(t: Any, placements: list[Any]) -> Tensor:
    """This process's part of a DTensor after redistribution to `placements`."""
    if list(t.placements) != placements:
        # This runs below autograd, where `redistribute` of torch 2.11 fails for a tensor that requires a gradient.
        t = t.detach().redistribute(placements=placements)
    return t.to_local()


def _choose(
    rule: Rule, inputs: list[Dims], tensors: list[Any], mesh: Any, sizes: dict[str, Any]
) -> list[str]:
    """The letters that are sharded over each dimension of the mesh, "" if all its processes do the same work."""
    chosen: list[str] = []
    looked_at = slice(rule.skip, rule.deciding and rule.skip + rule.deciding)
    for at in range(mesh.ndim):
        parts = mesh.size(at)

        def fits(way: str, parts: int = parts) -> bool:
            for c in way:
                if c in sizes:
                    already = math.prod(mesh.size(i) for i, w in enumerate(chosen) if c in w)
                    even = c in rule.even or already > 1
                    if sizes[c] < already * parts or (even and sizes[c] % (already * parts)):
                        return False
            return True

        def cost(way: str, at: int = at) -> float:
            return sum(
                _moved(t, t.placements[at], _placed(letters, way))
                for letters, t in list(zip(inputs, tensors))[looked_at]
            )

        chosen.append(min(["", *(w for w in rule.ways if fits(w))], key=cost))
    return chosen


def _placed(letters: Dims, way: str) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    at = next((i for i, named in enumerate(letters) if any(c in way for c in named)), None)
    return Replicate() if at is None else Shard(at)


def _moved(t: Any, now: Any, wanted: Any) -> float:
    """The approximate number of elements that are sent to change a tensor's placement."""
    if now == wanted:
        return 0
    if now.is_replicate():
        return 0 if wanted.is_shard() else 1
    return t.numel() * (2 if now.is_partial() else 1)


def _wrap(
    local: Tensor,
    letters: Dims | None,
    ways: Sequence[str],
    rule: Rule,
    mesh: Any,
    sizes: dict[str, Any],
) -> Any:
    from torch.distributed.tensor import DTensor, Partial, Replicate

    asked = letters is not None and not (local.dim() == 1 and local.numel() == 0)
    letters = letters[: local.dim()] if letters and asked else ()
    placements = []
    shape = list(local.shape)
    for at, way in enumerate(ways):
        placed = _placed(letters, way)
        if placed.is_shard():
            whole = sizes.get(letters[placed.dim])
            shape[placed.dim] = shape[placed.dim] * mesh.size(at) if whole is None else whole
        elif way and rule.sums and asked:
            placed = Partial()
        else:
            placed = Replicate()
        placements.append(placed)
    stride = _like(local, shape)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def _like(local: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor of this shape, with dimensions in the memory order of `local`."""
    strides = [1] * len(shape)
    step = 1
    for i in sorted(range(len(shape)), key=lambda i: (local.stride(i), -i)):
        strides[i], step = step, step * shape[i]
    return tuple(strides)
