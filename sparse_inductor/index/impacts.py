"""Export of an index as impacts (weights rounded to whole numbers), and the JSON vectors that Anserini (Lucene)
indexes."""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import json
import math
import os
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple, cast

import torch

from .documents import as_float, as_int
from .named import strings
from .segment import Segment
from .sources import Rows
from .sparse_index import SparseIndex
from .storage import PendingFile

FilePath = str | os.PathLike[str]
_BITS = 24  # the most bits of an impact, which fp32 represents exactly


class Imported(NamedTuple):
    """An index read from a file of another engine, with the names of documents and the terms, each by id."""

    index: SparseIndex
    names: list[str]
    terms: list[str]


def write_impacts(
    index: SparseIndex,
    path: FilePath,
    *,
    terms: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    bits: int = 8,
    scale: float | None = None,
) -> float:
    """Write a file that Anserini indexes as a JsonVectorCollection with `-impact -pretokenized`: one line
    `{"id": ..., "contents": "", "vector": {term: impact, ...}}` for each document. Deleted documents have no line.

    Arguments, rounding, return value and errors are those of `write_ciff`. The file is compressed if `path` ends with
    ".gz". Also raises ValueError for a term with white space, which Anserini would split.
    """
    words, labels, scale, parts = impacts_of(index, terms, names, bits, scale)
    for word in words:
        if word.split() != [word]:
            raise ValueError(f"the term {word!r} is empty or has white space")
    gone = index.operands()[2].tolist()

    def write(raw: BinaryIO) -> None:
        number = 0
        with gzip.open(raw, "wb") if _is_packed(path) else contextlib.nullcontext(raw) as packed:
            file = io.TextIOWrapper(cast(BinaryIO, packed), "utf-8")
            for rows in parts:
                edges, ids, impacts = (
                    t.tolist() for t in (rows.offsets, rows.terms, rows.weights.int())
                )
                for low, high in itertools.pairwise(edges):
                    if not gone[number]:
                        vector = {words[t]: w for t, w in zip(ids[low:high], impacts[low:high])}
                        line = {"id": labels[number], "contents": "", "vector": vector}
                        file.write(json.dumps(line, ensure_ascii=False) + "\n")
                    number += 1
            file.detach()

    PendingFile(path, write).commit()
    return scale


def read_impacts(
    path: FilePath,
    *,
    terms: Sequence[str] | None = None,
    scale: float = 1.0,
    weights: str = "float32",
    device: torch.device | str = "cpu",
) -> Imported:
    """Read documents `{"id": ..., "vector": {term: weight, ...}}`, one per line, in the format of Anserini's
    JsonVectorCollection. Without `terms`, the terms are those of the file in its order, and the file is read twice.

    Arguments and errors are those of `read_ciff`. The file is decompressed if `path` ends with ".gz". Weights need not
    be whole numbers.
    """
    known = ids_of(terms) if terms is not None else {}
    scale = as_scale(scale)
    if terms is None:
        for _, vector in _lines(path, scale):
            for word in vector:
                known.setdefault(word, len(known))
    names: list[str] = []

    def documents() -> Iterator[tuple[list[int], list[float]]]:
        for name, vector in _lines(path, scale):
            names.append(name)
            lost = next((word for word in vector if word not in known), None)
            if lost is not None:
                raise ValueError(f"{path} has the term {lost!r}, which is not in terms")
            yield [known[word] for word in vector], [*vector.values()]

    index = SparseIndex.build(
        documents(), num_terms=max(len(known), 1), weights=weights, device=device
    )
    return Imported(index, names, list(known))


def _is_packed(path: FilePath) -> bool:
    return os.fspath(path).endswith(".gz")


def _lines(path: FilePath, scale: float) -> Iterator[tuple[str, dict[str, float]]]:
    opened = gzip.open if _is_packed(path) else open
    number = 0
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            for text in file:
                number += 1
                if text.strip():
                    line = json.loads(text)
                    vector = {word: w / scale for word, w in line["vector"].items()}
                    yield str(line["id"]), vector
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged after line {number}: {error}") from None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        raise ValueError(
            f'{path}, line {number}: expected {{"id": ..., "vector": {{term: weight, ...}}}}'
        ) from None


# Shared with other formats


def labels_of(given: Sequence[str] | None, count: int, what: str) -> list[str]:
    """Return `count` distinct strings, one for each id; default the ids as decimals."""
    labels = [str(i) for i in range(count)] if given is None else strings(given, what)
    if len(labels) != count or len({*labels}) != count:
        raise ValueError(f"{what} must be {count} different strings, got {len({*labels})}")
    return labels


def ids_of(terms: Sequence[str]) -> dict[str, int]:
    words = strings(terms, "terms")
    return {word: at for at, word in enumerate(labels_of(words, len(words), "terms"))}


def as_scale(value: Any) -> float:
    scale = as_float(value, "scale")
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be finite and above 0, got {value!r}")
    return scale


class Impacts(NamedTuple):
    """An index as impacts: the strings of its terms (`words`) and documents (`labels`), impacts per unit of weight
    (`scale`), and the rows of each segment (`parts`) with impacts as weights, without impacts of 0."""

    words: list[str]
    labels: list[str]
    scale: float
    parts: Iterator[Rows]


def impacts_of(
    index: SparseIndex,
    terms: Sequence[str] | None,
    names: Sequence[str] | None,
    bits: int,
    scale: float | None,
) -> Impacts:
    """Convert an index for `write_ciff` and `write_impacts`, which document the arguments."""
    words = labels_of(terms, index.num_terms, "terms")
    labels = labels_of(names, len(index), "names")
    contents = index._contents.to(torch.device("cpu"))
    segments = contents.vacuumed().segments
    low, high = 0.0, 0.0
    for s in segments:
        if s.nnz:
            least, most = torch.aminmax(s.values())
            low, high = min(low, float(least)), max(high, float(most))
    if low < 0:
        raise ValueError(f"impacts cannot be negative, and the index has a weight of {low}")
    if not 1 <= as_int(bits, "bits") <= _BITS:
        raise ValueError(f"bits must be 1 to {_BITS}, got {bits}")
    if scale is None:
        scale = (2**bits - 1) / high if high else 1.0
    scale = as_scale(scale)
    if scale * high >= (1 << _BITS) - 0.5:
        raise ValueError(
            f"scale {scale} makes the largest weight, {high:g}, an impact of {scale * high:g}, beyond {_BITS} bits"
        )

    return Impacts(words, labels, scale, _impacts_by_segment(segments, scale))


def _impacts_by_segment(segments: Sequence[Segment], scale: float) -> Iterator[Rows]:
    zero = torch.zeros(1, dtype=torch.int64, device="cpu")
    if not segments:
        yield Rows(zero, zero[:0], zero[:0].float())
    for s in segments:
        impacts = (s.values().double() * scale).round().float()
        here = impacts > 0
        kept = torch.cat((zero, here.cumsum(0)))
        yield Rows(kept[s.offsets], s.term_ids()[here], impacts[here])
