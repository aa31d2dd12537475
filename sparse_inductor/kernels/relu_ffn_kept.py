"""Room to keep both projections of a training step whose rows are all on the dense path.

The packed form holds sparse rows. Of dense ones nothing is in it, so the backward makes their projections again: two
products of eleven, where autograd, which keeps three tensors [M, N], has nine. An untrained model has only such rows.
Whether a step has them is known on the device alone, after its memory is allocated; but a layer's steps are alike. So
the host looks at a layer's counts now and then, without waiting for them, and where the last ones it has seen were all
dense, the next step's are allocated with room behind them:

    [M] int32 counts | whole: int32, 1 if the projections are there, else 0 | gate [M + PAD, N] | up [M + PAD, N]

Only memory and time depend on what the host has seen: the device writes `whole`, the backward makes the projections
again where it says that they are not there, and the numbers are the same. Whoever copies the counts (offloading) copies
no room. A CUDA graph has what the host had seen when it was captured.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .relu_ffn_heavy import PAD

__all__ = ["Kept", "counts", "expected", "forget", "look", "of"]

# A layer's counts are looked at once in so many steps: a copy of a few numbers takes the host 5 us.
EVERY = 16
# Counts that are looked at.
SAMPLE = 32
# Layers that are remembered: 128 bytes each. More start over.
MOST = 4096
# Where things begin in memory, in bytes.
_ALIGN = 1024

# By a layer's weight: its line among the seen counts, and its steps.
_lines: dict[tuple[int, ...], list[int]] = {}
_seen: torch.Tensor | None = None


class Kept(NamedTuple):
    """whole: [1] int32. gate, up: [M + PAD, N], up None without a second projection."""

    whole: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor | None

    def rows(self, part: slice) -> Kept:
        """Of these tokens, and PAD more."""
        rows = slice(part.start, part.stop + PAD.value)
        return Kept(self.whole, self.gate[rows], None if self.up is None else self.up[rows])


def _places(M: int, N: int, gated: bool, itemsize: int) -> tuple[int, int, int]:
    """Bytes in front of `whole`, of a projection, and of all."""
    start = -(-4 * M // _ALIGN) * _ALIGN
    each = -(-(M + PAD.value) * N * itemsize // _ALIGN) * _ALIGN
    return start, each, start + _ALIGN + (1 + gated) * each


def counts(x: torch.Tensor, N: int, gated: bool) -> torch.Tensor:
    """[M] int32, uninitialised, for tokens x [M, K], with room behind it."""
    M = len(x)
    *_, size = _places(M, N, gated, x.element_size())
    return torch.empty(size // 4, dtype=torch.int32, device=x.device)[:M]


def of(count: torch.Tensor, dtype: torch.dtype, N: int, gated: bool) -> Kept | None:
    """The room behind counts, if there is any."""
    M = len(count)
    start, each, size = _places(M, N, gated, dtype.itemsize)
    if (
        count.untyped_storage().nbytes() != size
        or count.storage_offset()
        or not count.is_contiguous()
    ):
        return None

    def at(place: int, length: int, dtype: torch.dtype) -> torch.Tensor:
        words = count.as_strided((length * dtype.itemsize // 4,), (1,), place // 4)
        return words.view(dtype)

    rows = M + PAD.value
    first = start + _ALIGN
    made = [
        at(first + i * each, each // dtype.itemsize, dtype)[: rows * N].view(rows, N)
        for i in range(1 + gated)
    ]
    return Kept(at(start, 1, torch.int32), made[0], made[1] if gated else None)


def forget() -> None:
    """Drop what was seen."""
    global _seen
    _lines.clear()
    _seen = None


def _layer(weight: torch.Tensor) -> tuple[int, ...]:
    return weight.data_ptr(), weight.get_device(), *weight.shape


def expected(weight: torch.Tensor, cap: int) -> bool:
    """Whether the counts last seen of the layer with this gate weight were all above cap."""
    line, seen = _lines.get(_layer(weight)), _seen
    if line is None or seen is None:  # a backward's thread may forget them meanwhile
        return False
    return all(c > cap for c in seen[line[0]].tolist())


def look(weight: torch.Tensor, count: torch.Tensor) -> None:
    """Have some counts of a step of the layer with this gate weight copied to the host, where it is time."""
    global _seen
    if torch.cuda.is_current_stream_capturing():
        return
    layer = _layer(weight)
    line = _lines.get(layer)
    if line is None:
        if len(_lines) >= MOST:
            forget()
        line = _lines[layer] = [len(_lines), 0]
    if line[1] % EVERY == 0:
        if _seen is None:
            _seen = torch.zeros(MOST, SAMPLE, dtype=torch.int32, device="cpu", pin_memory=True)
        _seen[line[0]].copy_(count[:SAMPLE], non_blocking=True)
    line[1] += 1
