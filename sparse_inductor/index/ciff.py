"""An index in the Common Index File Format, which PISA, JASS, Terrier and Lucene read and write.

The format is https://github.com/osirrc/ciff: a sequence of protocol buffers, each preceded by its length.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np
import torch

from .impacts import FilePath, Imported, as_scale, ids_of, impacts_of
from .segment import Postings, Segment
from .sources import Rows
from .sparse_index import SparseIndex
from .storage import PendingFile

# Tags: a posting is field 4 of a list; document and impact are fields 1 and 2 of a posting.
_POSTING, _DOCUMENT, _IMPACT = 0x22, 0x08, 0x10


def write_ciff(
    index: SparseIndex,
    path: FilePath,
    *,
    terms: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    bits: int = 8,
    scale: float | None = None,
) -> float:
    """Write a Common Index File Format file, which appears only when it is complete.

    An impact is `round(scale * weight)`. Weights below half a step of `1 / scale` are dropped; the others are off by at
    most half a step. Deleted documents keep their number and are empty. While the file is written, memory holds a
    second copy of the postings.

    Args:
        index: an index with weights of at least 0.
        path: the file.
        terms: V strings, the term of each id, such as a tokenizer's vocabulary; default the ids as decimals.
        names: N strings, the name of each document; default the ids as decimals.
        bits: the largest weight becomes `2 ** bits - 1`; 1 to 24.
        scale: impacts per unit of weight, in place of `bits`.

    Returns:
        the scale, for `read_ciff` and for queries in the other engine.

    Raises:
        ValueError: a weight is negative, an impact exceeds 24 bits, or terms or names have a wrong number or repeat.
    """
    words, labels, scale, parts = impacts_of(index, terms, names, bits, scale)
    rows = Rows.join([*parts])
    own = torch.repeat_interleave(rows.offsets.diff())
    lengths = torch.zeros(rows.count, dtype=torch.int64, device="cpu")
    lengths.index_add_(0, own, rows.weights.long())
    postings = Segment(rows.offsets, rows.terms.int(), rows.weights).postings(index.num_terms)
    edges = postings.offsets.tolist()
    held = [t for t in range(index.num_terms) if edges[t + 1] > edges[t]]
    total = int(lengths.sum())

    def write(file: BinaryIO) -> None:
        _put(
            file,
            _number(1, 1) + _number(2, len(held)) + _number(3, len(index)) + _number(4, len(held))
            + _number(5, len(index)) + _number(6, total)
            + _varint(7 << 3 | 1) + struct.pack("<d", total / max(len(index), 1))
            + _text(8, f"sparse_inductor: impacts, {scale!r} times the weights"),
        )  # fmt: skip
        for t in sorted(held, key=lambda t: words[t].encode()):
            _put(file, _posting_list(words[t], postings, edges[t], edges[t + 1]))
        for number, (name, length) in enumerate(zip(labels, lengths.tolist())):
            _put(file, _number(1, number) + _text(2, name) + _number(3, length))

    PendingFile(path, write).commit()
    return scale


def read_ciff(
    path: FilePath,
    *,
    terms: Sequence[str] | None = None,
    scale: float = 1.0,
    weights: str = "float32",
    device: torch.device | str = "cpu",
) -> Imported:
    """Read a Common Index File Format file as an index. Meanwhile, memory holds a second copy of the postings.

    Args:
        path: the file, uncompressed.
        terms: V strings, the term of each id; default the terms of the file in its order.
        scale: the return value of `write_ciff`: a weight is `impact / scale`.
        weights, device: see `SparseIndex.build`.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is truncated or not a CIFF file, or has a term that is not in `terms`.
    """
    scale = as_scale(scale)
    lists, names = _parsed(path)
    known = None if terms is None else ids_of(terms)
    ids = []
    for at, (word, numbers, _) in enumerate(lists):
        term = at if known is None else known.get(word)
        if term is None:
            raise ValueError(f"{path} has the term {word!r}, which is not in terms")
        ids.append(np.full(len(numbers), term))
    none = [np.zeros(0, np.int64)]
    docs, impacts = (np.concatenate([part[i] for part in lists] or none) for i in (1, 2))
    if docs.size and not 0 <= docs.min() <= docs.max() < len(names):
        raise ValueError(f"{path} has postings of documents that are not among its {len(names)}")
    labels = [word for word, _, _ in lists] if terms is None else list(terms)
    index = SparseIndex(max(len(labels), 1), weights).to(device)
    index.append(
        torch.sparse_coo_tensor(
            torch.from_numpy(np.stack((docs, np.concatenate(ids or none)))),
            torch.from_numpy(impacts / scale),
            (len(names), index.num_terms),
            check_invariants=False,
        )
    )
    return Imported(index, names, labels)


# Protocol buffers: https://protobuf.dev/programming-guides/encoding


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _text(field: int, value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _put(file: BinaryIO, message: bytes) -> None:
    file.write(_varint(len(message)) + message)


def _posting_list(word: str, postings: Postings, low: int, high: int) -> bytes:
    """Return the message of a term's postings. Document ids are written as differences."""
    docs = postings.docs[low:high].numpy().astype(np.int64)
    impacts = postings.weights[low:high].numpy().astype(np.int64)
    gap, gap_used = _varints(np.diff(docs, prepend=0))
    impact, impact_used = _varints(impacts)
    sizes = 2 + gap_used.sum(1) + impact_used.sum(1)
    column = lambda tag: np.full((len(docs), 1), tag, np.uint8)
    written = np.hstack((
        column(_POSTING), sizes[:, None].astype(np.uint8), column(_DOCUMENT), gap, column(_IMPACT), impact,
    ))  # fmt: skip
    two, one = np.ones((len(docs), 3), bool), np.ones((len(docs), 1), bool)
    body = written[np.hstack((two, gap_used, one, impact_used))].tobytes()
    return _text(1, word) + _number(2, len(docs)) + _number(3, int(impacts.sum())) + body


def _varints(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the varint bytes [n, 5] of whole numbers, and a mask of the bytes that are written."""
    parts = values[:, None] >> np.arange(0, 35, 7)
    used = parts > 0
    used[:, 0] = True
    more = np.hstack((used[:, 1:], np.zeros((len(values), 1), bool)))
    return (parts & 0x7F | more * 0x80).astype(np.uint8), used


def _parsed(path: FilePath) -> tuple[list[tuple[str, np.ndarray, np.ndarray]], list[str]]:
    """Return the posting lists, each as (term, documents, impacts), and the names of the documents."""
    with open(path, "rb") as file:
        header = _message(file, path)
        lists, count = header.get(2, 0), header.get(3, 0)
        damaged = ValueError(f"{path} is not a CIFF file, or damaged")
        try:
            if lists + count > os.fstat(file.fileno()).st_size:
                raise damaged
            found = [_read_list(_delimited(file, path), path) for _ in range(lists)]
            names = [""] * count
            for _ in range(count):
                record = _message(file, path)
                names[record.get(1, 0)] = record.get(2, b"").decode()
        # For example, a text in place of a number, or bytes that are no text.
        except (TypeError, AttributeError, IndexError, UnicodeDecodeError):
            raise damaged from None
    return found, names


def _delimited(file: BinaryIO, path: FilePath) -> bytes:
    """Read the bytes of the next message."""
    size, shift = 0, 0
    while True:
        byte = file.read(1)
        if not byte or shift > 28:
            raise ValueError(f"{path} is not a CIFF file, or truncated")
        size |= (byte[0] & 0x7F) << shift
        shift += 7
        if byte[0] < 0x80:
            break
    data = file.read(size)
    if len(data) < size:
        raise ValueError(f"{path} is truncated")
    return data


def _message(file: BinaryIO, path: FilePath) -> dict[int, Any]:
    return _values(_delimited(file, path), path)


def _values(data: bytes, path: FilePath) -> dict[int, Any]:
    return {field: value for field, value, _ in _fields(data, path)}


def _fields(data: bytes, path: FilePath) -> Iterator[tuple[int, Any, int]]:
    """Yield the fields of a message as (number, value, offset of the field); a value is an int or bytes."""
    at = 0

    def number() -> int:
        nonlocal at
        value, shift = 0, 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    try:
        while at < len(data):
            start, tag = at, number()
            value: Any
            if tag & 7 == 0:
                value = number()
            elif tag & 7 in (1, 2, 5):
                size = {1: 8, 5: 4}.get(tag & 7) or number()
                value, at = data[at : at + size], at + size
                if at > len(data):
                    raise IndexError
            else:
                raise IndexError
            yield tag >> 3, value, start
    except IndexError:
        raise ValueError(f"{path} is not a CIFF file, or damaged") from None


def _read_list(data: bytes, path: FilePath) -> tuple[str, np.ndarray, np.ndarray]:
    """Return the term, documents and impacts of a posting list's message."""
    word, start = "", len(data)
    for field, value, at in _fields(data, path):
        if field == 1:
            word = value.decode()
        if field == 4:  # the rest of the message is postings
            start = at
            break
    found = _posting_columns(np.frombuffer(data, np.uint8)[start:])
    if found is None:  # the writer used another order of fields
        given = [_values(v, path) for f, v, _ in _fields(data[start:], path) if f == 4]
        found = np.array([[p.get(1, 0), p.get(2, 0)] for p in given], np.int64)
    return word, found[:, 0].cumsum(), found[:, 1]


def _posting_columns(data: np.ndarray) -> np.ndarray | None:
    """Parse postings as differences of documents and impacts, [n, 2]. Returns None if the data have any other fields or
    another order of fields."""
    ends = (data < 0x80).nonzero()[0]
    if not len(ends) or ends[-1] + 1 < len(data):
        return None
    # Tags, lengths and values are all varints.
    starts = np.concatenate(([0], ends[:-1] + 1))
    shifts = (np.arange(len(data)) - np.repeat(starts, ends - starts + 1)) * 7
    numbers = np.add.reduceat((data & 0x7F).astype(np.int64) << shifts, starts)
    if len(numbers) > 2 and numbers[2] == _IMPACT:  # document 0 is omitted, as the default value
        numbers = np.insert(numbers, 2, (_DOCUMENT, 0))
    if len(numbers) % 6:
        return None
    rows = numbers.reshape(-1, 6)
    if (rows[:, [0, 2, 4]] != (_POSTING, _DOCUMENT, _IMPACT)).any():
        return None
    return rows[:, [3, 5]]
