"""Break-even points: at which sizes and densities each operator is faster than the operations that it replaces.

A row is a measurement with its date; the first row that fits decides. Blocks that no row fits were not measured and run
as written. On a GPU without rows for its architecture, only rewrites that avoid writing large intermediate tensors are
applied, at sizes where the portable kernels gained clearly on an H100. Symbolic sizes are judged by their hints, which
adds no guard.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ..kernels.common.arch import capability
from .popular import Apart
from .worth import Worth


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement.

    where: a compute capability such as "sm90" (H100, H200), "cuda" (any GPU) or "cpu". below: the share of active
    elements below which the operator is faster; 1 if it is faster for all data, 0 if it never is. least, most:
    inclusive bounds of the sizes for which the row holds. apart: `below` with popular neurons computed separately; 0
    without them.
    """

    operator: str
    where: str
    below: float
    reason: str
    date: str
    least: dict[str, int] = dataclasses.field(default_factory=dict)
    most: dict[str, int] = dataclasses.field(default_factory=dict)
    apart: float = 0.0

    def fits(self, sizes: dict[str, int]) -> bool:
        return all(sizes[n] >= v for n, v in self.least.items()) and all(
            sizes[n] <= v for n, v in self.most.items()
        )


_MILLION = 1_000_000
# Costs of popular neurons of a feed-forward block on an H100 and an H200, 2026-11-30. _POPULAR: one popular neuron for
# one row, relative to gathering it. _LAUNCHES: the additional launches, in gathered weight elements. _LOOK: reading the
# gates of a row, in gathered weight elements per neuron. Both count a third in training, where a step gathers four
# times as much, launches somewhat more, and reads the gates once.
_POPULAR, _LAUNCHES, _LOOK = 0.015, 130 * _MILLION, 2.5
# Rows x weight elements x branches from which on the kernels take longer than the host needs to launch them, in
# inference and in training.
_LEAST, _LEAST_TRAINED = 90_000 * _MILLION, 130_000 * _MILLION

TABLE: Sequence[Row] = (
    # SPLADE head. logits: tokens x vocabulary.
    Row(
        "splade_head", "sm90", 1, "1.6x to 2.1x in inference and 0.98x to 4.9x in training on an H100",
        "2026-11-26", least={"logits": _MILLION, "tokens": 1024},
    ),
    Row(
        "splade_head", "sm90", 0, "one query of 32 tokens: 0.64x to 0.90x on an H100",
        "2026-11-26",
    ),
    Row(
        "splade_head", "cuda", 1, "portable kernels: 1.2x in inference, 2.6x in training on an H100",
        "2026-11-25", least={"logits": 30 * _MILLION},
    ),
    Row(
        "splade_head", "cpu", 1, "16 bits: 1.2x to 5.6x in inference, 19x in training on an AMD EPYC",
        "2026-11-26", most={"bits": 16},
    ),
    Row(
        "splade_head", "cpu", 1, "fp32: 1.04x in inference from 8 x 128 tokens on an AMD EPYC",
        "2026-11-26", least={"logits": 30 * _MILLION},
    ),
    Row(
        "splade_head", "cpu", 1, "fp32: 1.12x in training from 8 x 64 tokens on an AMD EPYC",
        "2026-11-26", least={"logits": 15 * _MILLION, "training": 1},
    ),
    Row(
        "splade_head", "cpu", 0, "few tokens in fp32: 0.34x to 1x on an AMD EPYC", "2026-11-26",
    ),
    # Entmax attention. scores: elements of queries @ keys.
    Row(
        "entmax_attention", "sm90", 1, "3x to 18x on an H100, with and without a mask", "2026-11-25"
    ),
    Row(
        "entmax_attention", "cuda", 1, "portable kernels were faster at this size on an H100",
        "2026-11-25", least={"scores": 4 * _MILLION},
    ),
    Row(
        "entmax_attention", "cpu", 1, "1.2x to 5.7x from 131,072 scores on an AMD EPYC",
        "2026-11-26", least={"scores": 131_072},
    ),
    Row("entmax_attention", "cpu", 0, "few scores: 0.24x to 0.51x on an AMD EPYC", "2026-11-26"),
    # Entmax of rows. elements: of the scores; columns: of a row; sorts: whether the program sorts the scores; training:
    # whether the scores require a gradient.
    Row("entmax", "sm90", 1, "faster than sorting or bisection on an H100", "2026-11-25"),
    Row(
        "entmax", "cuda", 1, "sorting or bisection passes over the scores many times",
        "2026-11-25", least={"elements": _MILLION},
    ),
    Row(
        "entmax", "cpu", 0, "rows of 2 to 5 that are sorted: 0.75x to 1.4x on an Intel Xeon",
        "2026-11-27", most={"columns": 7}, least={"sorts": 1},
    ),
    Row(
        "entmax", "cpu", 1, "1.2x with a backward from 65,536 elements on an Intel Xeon",
        "2026-11-27", least={"elements": 65_536, "training": 1},
    ),
    Row(
        "entmax", "cpu", 1, "1.4x to 5x from 262,144 elements on an AMD EPYC and an Intel Xeon",
        "2026-11-27", least={"elements": 262_144},
    ),
    Row("entmax", "cpu", 0, "few elements: 0.28x on an AMD EPYC", "2026-11-26"),
    # Sparse scores. products: queries x documents x terms; entries: documents x terms; best: the k of the top-k.
    # constant: the documents stay the same from call to call. There an index can be faster than the compiled program
    # and than the operator, although it computes a checksum of the documents at each call.
    Row(
        "sparse_scores", "sm90", 1, "an index of 100,000 documents: 2.0x to 2.5x for 8 queries, 5.1x to 7.4x for 32; of"
        " 1,000,000 4.4x for 8 on an H100", "2026-11-26",
        least={"constant": 1, "queries": 8, "entries": 12 * _MILLION, "documents": 10_000}, most={"best": 2048},
    ),
    Row(
        "sparse_scores", "sm90", 1, "an index of 10,000 documents, 32 queries, top-100: 1.1x to 1.4x on an H100",
        "2026-11-26", least={"constant": 1, "queries": 32, "entries": 1_280_000, "documents": 10_000},
        most={"best": 100},
    ),
    Row(
        "sparse_scores", "sm90", 0, "an index of few documents, or for few queries: 0.6x to 1.2x on an H100, for a"
        " checksum reads what the program reads", "2026-11-26", least={"constant": 1},
    ),
    Row(
        "sparse_scores", "cpu", 1, "an index, from two queries of 4,000 documents of 128 terms on: 1.03x to 5x on an"
        " Intel Xeon and an AMD EPYC", "2026-11-28",
        least={"constant": 1, "queries": 2, "documents": 2048, "entries": 512_000},
    ),
    Row(
        "sparse_scores", "cpu", 0, "an index of few documents, or for one query: 0.6x to 0.9x on an AMD EPYC and an"
        " Intel Xeon, where a checksum reads what the program reads", "2026-11-28", least={"constant": 1},
    ),
    Row(
        "sparse_scores", "sm90", 1, "2.1x at 100,000 documents and 32 queries on an H100",
        "2026-11-25", least={"queries": 32, "scores": 3_200_000},
    ),
    Row(
        "sparse_scores", "sm90", 0,
        "few queries or documents: 0.67x to 1.1x on an H100; a SparseIndex is faster", "2026-11-25",
    ),
    Row(
        "sparse_scores", "cpu", 1, "1.2x to 14x from 6 million products on an AMD EPYC",
        "2026-11-26", least={"products": 6 * _MILLION},
    ),
    Row(
        "sparse_scores", "cpu", 0, "few products: 0.13x to 1.1x on an AMD EPYC", "2026-11-26",
    ),
    # Feed-forward blocks. weight: elements of the down projection; shared: whether one matrix product computes both
    # factors; weighed: whether the program also computes a sum of the activations, weighted by neuron.
    Row(
        "relu_ffn", "sm90", 0, "both factors of one product: 1.0x at 0.3 % active on an H100",
        "2026-11-27", least={"shared": 1},
    ),
    Row(
        "relu_ffn", "sm90", 0.005,
        "training with a weighted sum of the activations: 1.9x to 2.0x at 0.3 % active on an H200", "2026-11-29",
        least={"weighed": 1, "training": 1, "tokens": 4096, "weight": 18 * _MILLION},
    ),
    Row(
        "relu_ffn", "sm90", 0, "training with a weighted sum of the activations: not measured at this size",
        "2026-11-29", least={"weighed": 1, "training": 1},
    ),
    Row(
        "relu_ffn", "sm90", 0, "products this small: 0.57x to 0.9x at every density on an H100",
        "2026-11-25", most={"weight": (1 << 22) - 1},
    ),
    Row(
        "relu_ffn", "sm90", 1, "gated, a few rows: 0.99x to 1.7x at every density on an H200",
        "2026-11-26", least={"branches": 2}, most={"tokens": 16, "training": 0},
    ),
    Row(
        "relu_ffn", "sm90", 0,
        "plain, a few rows: 0.85x to 1.4x on an H200, where counting takes longer than the gain",
        "2026-11-26", most={"tokens": 16, "training": 0},
    ),
    Row(
        "relu_ffn", "sm90", 0.008, "gated: 1.05x to 1.11x at 0.8 % active on an H100, less from 1 % on",
        "2026-11-28", least={"tokens": 4096, "branches": 2}, most={"training": 0}, apart=0.0100,
    ),
    Row(
        "relu_ffn", "sm90", 0.007, "gated, large weights: 1.12x at 0.6 % active, 0.97x at 0.8 % on an H100",
        "2026-11-28", least={"tokens": 2048, "weight": 40 * _MILLION, "branches": 2}, most={"training": 0},
        apart=0.0088,
    ),
    Row(
        "relu_ffn", "sm90", 0.006, "gated: 1.45x at 0.3 % active, 1.14x at 0.6 % on an H100",
        "2026-11-28", least={"tokens": 2048, "weight": 11 * _MILLION, "branches": 2}, most={"training": 0},
    ),
    Row(
        "relu_ffn", "sm90", 0.007, "plain: 1.19x to 1.22x at 0.6 % active, 1.10x at 0.8 % on an H100",
        "2026-11-28", least={"tokens": 4096}, most={"training": 0}, apart=0.0095,
    ),
    Row(
        "relu_ffn", "sm90", 0.005, "plain, large weights: 1.11x at 0.4 % active on an H100",
        "2026-11-26", least={"tokens": 2048, "weight": 40 * _MILLION}, most={"training": 0}, apart=0.0075,
    ),
    Row(
        "relu_ffn", "sm90", 0,
        "17 to 2,047 rows: no gain at any density on an H200; up to 4,095 of small weights 0.86x to 1.10x on an "
        "H100, which waited for the host",
        "2026-11-26", most={"training": 0},
    ),
    Row(
        "relu_ffn", "sm90", 0.0095, "training, gated: 1.6x at 0.6 % active, 1.07x to 1.15x at 1 % on an H100",
        "2026-11-28", least={"tokens": 8192, "branches": 2}, apart=0.0110,
    ),
    Row(
        "relu_ffn", "sm90", 0.0075, "training, gated, large weights: 1.32x at 0.6 % active, 1.13x at 0.8 % on an H100",
        "2026-11-28", least={"tokens": 2048, "weight": 40 * _MILLION, "branches": 2}, apart=0.008,
    ),
    Row(
        "relu_ffn", "sm90", 0.006, "training, large weights: 1.22x to 2.5x at up to 3 % active on an H200",
        "2026-11-30", least={"tokens": 8192, "weight": 40 * _MILLION}, apart=0.009,
    ),
    Row(
        "relu_ffn", "sm90", 0.006, "training, large weights: 1.06x at 1 % active, 0.86x at 3 % on an H200",
        "2026-11-30", least={"tokens": 2048, "weight": 40 * _MILLION}, apart=0.0058,
    ),
    Row(
        "relu_ffn", "sm90", 0.007, "training, plain: 1.30x to 1.32x at 0.6 % active, 1.09x at 0.8 % on an H100",
        "2026-11-28", least={"tokens": 8192}, apart=0.0095,
    ),
    Row(
        "relu_ffn", "sm90", 0.005, "training, plain, many neurons: 1.5x at 0.4 % active on an H200", "2026-11-29",
        least={"tokens": 4096, "weight": 36 * _MILLION}, most={"branches": 1},
    ),
    Row(
        "relu_ffn", "sm90", 0.0075, "training, gated: 1.41x to 1.50x at 0.6 % active, 1.18x at 0.8 % on an H100",
        "2026-11-28", least={"tokens": 2048, "weight": 11 * _MILLION, "branches": 2},
    ),
    Row(
        "relu_ffn", "sm90", 0, "training on few tokens: 0.79x to 1.06x at every density on an H100",
        "2026-11-26",
    ),
    Row(
        "relu_ffn", "cpu", 0.01, "decoding one row in fp32: 1.1x to 1.8x up to 1 % active on an AMD EPYC",
        "2026-11-26", least={"bits": 32, "weight": 1 << 22}, most={"tokens": 1, "training": 0},
    ),
    Row(
        "relu_ffn", "cpu", 0, "0.7x to 1.2x on an AMD EPYC, whatever is active", "2026-11-26",
    ),
    # TopK autoencoders. batch: whether the k largest are those of the whole batch; ratio: neurons / k, or for a batch
    # pre-activations / k; width: of the input, or of the decoder's result; changing: whether k is symbolic; kept:
    # whether the product is also read elsewhere, so that it has a gradient of its own.
    Row(
        "topk_encode", "cpu", 0, "training on few tokens with a product that is kept: 0.5x to 0.9x on an AMD EPYC",
        "2026-12-01", least={"kept": 1, "training": 1}, most={"tokens": 255},
    ),
    *(
        row
        for operator in ("topk_encode", "sparse_decode")
        for row in (
            Row(
                operator, "sm90", 1, "of a batch: 1.4x to 3.9x in training, 2.2x to 3.1x in inference, wall clock on an"
                " H200", "2026-12-01", most={"bits": 16},
                least={"batch": 1, "tokens": 4096, "neurons": 16_384, "width": 768, "ratio": 512},
            ),
            Row(
                operator, "sm90", 1, "of a batch in fp32, with TF32 or without: 2.7x to 5.2x in training, 2.3x to 3.5x"
                " in inference, wall clock on an H200", "2026-12-01", most={"bits": 32},
                least={"batch": 1, "tokens": 4096, "neurons": 24_576, "width": 768, "ratio": 512, "bits": 32},
            ),
            Row(operator, "cuda", 0, "of a small batch: not measured", "2026-12-01", least={"batch": 1}),
            Row(
                operator, "cpu", 1, "of a batch in fp32: 1.3x to 4.4x in training, 1.2x to 2.6x in inference on an AMD"
                " EPYC", "2026-12-01",
                least={"batch": 1, "tokens": 64, "neurons": 4096, "width": 512, "ratio": 128, "bits": 32},
                most={"bits": 32},
            ),
            Row(operator, "cpu", 0, "of a small batch: not measured", "2026-12-01", least={"batch": 1}),
            Row(
                operator, "cuda", 0, "k changes from call to call, and a GPU's kernels are compiled for each k",
                "2026-11-30", least={"changing": 1},
            ),
            Row(
                operator, "sm90", 1, "1.25x to 2.9x in training, 1.8x to 2.0x in inference on an H100", "2026-11-26",
                least={"tokens": 4096, "neurons": 16_384, "width": 768, "ratio": 512}, most={"bits": 16},
            ),
            Row(
                operator, "sm90", 1, "fp32: 2.9x in training with TF32, 5.1x without, wall clock on an H200",
                "2026-12-01", most={"bits": 32},
                least={"tokens": 4096, "neurons": 24_576, "width": 768, "ratio": 512, "bits": 32, "training": 1},
            ),
            Row(
                operator, "sm90", 0, "2,048 tokens or 12,288 neurons in training: 0.93x on an H100, which waits for"
                " the host", "2026-11-26", most={"bits": 16},
            ),
        )
    ),
    # Autoencoders that keep their activations. rectified: whether a ReLU alone computes the activations. ratio and
    # changing: as above, for a product that is only read by the top-k of a decoder's activations and returned, else 0.
    Row(
        "sparse_product", "sm90", 1, "the gradient of what is only returned is zero: 1.3x to 1.6x with TopK on an H200;"
        " 0.85x if it is dense, and at a width of 768 the host takes as long", "2026-12-01",
        least={"ratio": 512, "tokens": 4096, "neurons": 16_384, "width": 2304, "training": 1},
        most={"bits": 16, "changing": 0},
    ),
    Row(
        "sparse_product", "sm90", 0.004, "training behind a ReLU: 1.5x at 0.3 % active on an H200", "2026-11-29",
        least={"tokens": 4096, "neurons": 16_384, "width": 2304, "training": 1, "rectified": 1}, most={"bits": 16},
    ),
    Row(
        "sparse_product", "sm90", 0, "1.1x to 1.2x in training at 0.3 % active on an H200, less at 0.4 %", "2026-11-29",
    ),
    Row(
        "sparse_product", "cpu", 1, "the gradient of what is only returned is zero: 1.2x to 1.6x with TopK in fp32 on"
        " an AMD EPYC, 1x if it is dense", "2026-12-01",
        least={"ratio": 128, "tokens": 256, "neurons": 4096, "width": 512, "training": 1, "bits": 32},
        most={"bits": 32},
    ),
    Row(
        "topk_encode", "cpu", 1, "training in fp32: 1.4x to 3.2x with the decoder on an AMD EPYC", "2026-12-01",
        least={"tokens": 64, "neurons": 4096, "width": 512, "ratio": 128, "bits": 32, "training": 1}, most={"bits": 32},
    ),
    Row(
        "topk_encode", "cpu", 0, "in inference topk is as fast on an AMD EPYC", "2026-11-26",
        most={"training": 0},
    ),
    Row(
        "sparse_decode", "cpu", 1, "fp32: 1.3x to 3.2x with the encoder on an AMD EPYC", "2026-12-01",
        least={"tokens": 64, "neurons": 4096, "width": 512, "ratio": 128, "bits": 32}, most={"bits": 32},
    ),
    # TopK decoders written as a sum over gathered rows. entries: of all rows; bag: whether it is an embedding_bag;
    # copied: whether the operator transposes the weight; repeats: how often a row of it is gathered on average.
    Row(
        "gathered_decode", "cpu", 1, "gathered rows that are not written: 2x to 5x in inference in fp32", "2026-11-26",
        least={"entries": 2048, "width": 256, "bits": 32}, most={"training": 0, "bag": 0, "copied": 0},
    ),
    Row(
        "gathered_decode", "cpu", 1, "columns of a weight, each gathered twice: 1.3x to 3.5x in inference in fp32",
        "2026-12-01",
        least={"entries": 2048, "width": 256, "bits": 32, "repeats": 2}, most={"training": 0, "bag": 0},
    ),
    Row(
        "gathered_decode", "cpu", 0, "the operator transposes the weight: 0.1x to 0.4x for few entries", "2026-12-01",
        least={"copied": 1}, most={"training": 0, "bag": 0},
    ),
    Row(
        "gathered_decode", "cpu", 0, "embedding_bag is as fast, and a training step 0.6x to 0.95x", "2026-11-26",
    ),
)  # fmt: skip


def look_up(operator: str, device: torch.device, **sizes: int) -> Worth:
    """Look up when an operator is faster at these sizes. A bool is a property of the program, such as `training`."""
    where = _places(device)
    for row in TABLE:
        if row.operator == operator and row.where in where and row.fits(sizes):
            return Worth(row.below, row.reason, _apart(row, sizes) if row.apart else None)
    shown = ", ".join(f"{n:,} {name}" for name, n in sizes.items() if not isinstance(n, bool))
    return Worth(0.0, f"not measured on {where[0]} for {shown}")


def _apart(row: Row, sizes: dict[str, int]) -> Apart | None:
    """Return the cost of popular neurons in a feed-forward block; None if the host's launches would take longer than
    the kernels."""
    gathered = sizes["tokens"] * sizes["weight"] * sizes["branches"]
    if gathered < (_LEAST_TRAINED if sizes["training"] else _LEAST):
        return None
    once = _LAUNCHES / gathered + _LOOK / (sizes["width"] * sizes["branches"])
    return Apart(row.apart, _POPULAR, once / 3 if sizes["training"] else once)


def _places(device: torch.device) -> tuple[str, ...]:
    """Return the values of `Row.where` that include a device, the most specific first."""
    if device.type != "cuda":
        return (device.type,)
    try:
        major, minor = capability(device)
    except (RuntimeError, AssertionError):  # exported for a GPU on a machine without one
        return ("cuda",)
    return (f"sm{major}{minor}", "cuda") if major else ("cuda",)
