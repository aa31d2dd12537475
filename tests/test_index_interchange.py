"""An index in other engines' formats: written files follow the formats' rules, and reading them restores the index."""

from __future__ import annotations

import gzip
import json
import os
import struct

import numpy as np
import pytest
import torch

from sparse_inductor import SparseIndex
from sparse_inductor.index import read_ciff, read_impacts, write_ciff, write_impacts

V, N = 12, 300  # differences and impacts have one or two bytes
TERMS = [f"t\u00e9rm{i}" for i in range(V)]
NAMES = [f"d{i}" for i in range(N)]
FORMATS = {"ciff": (write_ciff, read_ciff), "jsonl": (write_impacts, read_impacts)}


def collection(device: str = "cpu") -> tuple[SparseIndex, torch.Tensor]:
    torch.manual_seed(0)
    dense = torch.rand(N, V) * (torch.rand(N, V) < 0.2)
    dense[:, 3] = 0  # a term without postings
    dense[7] = 0  # a document without terms
    dense[::150, 5] = 1.0  # a posting list whose first document is 0
    dense[1::2, 5] = 0
    index = SparseIndex.build(dense)
    index.delete([11])
    return index, dense


def matrix(index: SparseIndex) -> torch.Tensor:
    return index.scores(torch.eye(index.num_terms)).T


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("bits", [3, 8, 16])
def test_what_is_written_comes_back_but_for_the_rounding(tmp_path, kind, bits):
    write, read = FORMATS[kind]
    index, dense = collection()
    path = tmp_path / f"x.{kind}"
    scale = write(index, path, terms=TERMS, names=NAMES, bits=bits)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    dense[11] = 0
    assert round(scale * float(dense.max())) == 2**bits - 1
    want = (dense.double() * scale).round()
    found, names, terms = read(path, terms=TERMS, scale=scale)
    if kind == "jsonl":  # a deleted document has no line
        want = want[torch.arange(N) != 11]
        assert names == NAMES[:11] + NAMES[12:]
    else:
        assert names == NAMES
    assert terms == TERMS
    torch.testing.assert_close(matrix(found).double() * scale, want, rtol=1e-6, atol=0)
    assert float((matrix(found).double() - want / scale).abs().max()) <= 0.5 / scale


@pytest.mark.parametrize("kind", FORMATS)
def test_impacts_are_exact_and_terms_are_the_files_own(tmp_path, kind):
    write, read = FORMATS[kind]
    index, _ = collection()
    write(index, tmp_path / "x", bits=8)
    found, _, terms = read(tmp_path / "x")
    assert sorted(terms, key=int) == [str(t) for t in range(V) if t != 3]
    again = read(tmp_path / "x", terms=[str(t) for t in range(V)])[0]
    assert torch.equal(matrix(again)[:, [int(t) for t in terms]], matrix(found))
    assert write(found, tmp_path / "y", terms=terms, scale=1.0) == 1.0
    twice = read(tmp_path / "y", terms=terms)[0]
    assert torch.equal(matrix(twice), matrix(found))


@pytest.mark.parametrize("name", ["x.ciff", "x.jsonl", "x.jsonl.gz"])
def test_two_exports_to_one_path_and_one_that_fails_leave_a_whole_file(tmp_path, name, monkeypatch):
    index, _ = collection()
    (write, _), sync, inner = FORMATS[name.split(".")[1]], os.fsync, []
    path = tmp_path / name

    def beside(handle):
        inner.append(handle)
        if len(inner) == 1:
            write(index, path, bits=3)
        sync(handle)

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", beside)
    write(index, path, bits=8)
    whole = path.read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(index, path, bits=16)
    monkeypatch.undo()
    assert len(inner) > 1 and path.read_bytes() == whole and [*tmp_path.iterdir()] == [path]
    write(index, path, bits=8)
    unpacked = gzip.decompress if name.endswith(".gz") else bytes
    assert unpacked(path.read_bytes()) == unpacked(whole)


@pytest.mark.parametrize("kind", FORMATS)
def test_no_documents(tmp_path, kind):
    write, read = FORMATS[kind]
    write(SparseIndex(3), tmp_path / "x")
    found, names, terms = read(tmp_path / "x")
    assert (len(found), names, terms) == (0, [], [])


# The format written by hand (https://github.com/osirrc/ciff): messages are delimited by their lengths


def message(*fields: tuple[int, int | bytes]) -> bytes:
    out = b""
    for tag, value in fields:
        if isinstance(value, bytes):
            out += bytes((tag << 3 | 2, len(value))) + value
        else:
            out += bytes((tag << 3, value))
    return out


def delimited(*messages: bytes) -> bytes:
    return b"".join(bytes((len(m),)) + m for m in messages)


def test_bytes_of_a_small_file(tmp_path):
    index = SparseIndex.build([([0, 1], [1.0, 3.0]), ([1], [2.0])], num_terms=2)
    write_ciff(index, tmp_path / "x", terms=["b", "a"], names=["one", "two"], scale=1.0)
    posting = lambda gap, impact: (4, message((1, gap), (2, impact)))
    about = b"sparse_inductor: impacts, 1.0 times the weights"
    assert (tmp_path / "x").read_bytes() == delimited(
        message((1, 1), (2, 2), (3, 2), (4, 2), (5, 2), (6, 6))
        + b"\x39" + struct.pack("<d", 3.0) + message((8, about)),
        message((1, b"a"), (2, 2), (3, 5), posting(0, 3), posting(1, 2)),  # terms have to be in order
        message((1, b"b"), (2, 1), (3, 1), posting(0, 1)),
        message((1, 0), (2, b"one"), (3, 4)), message((1, 1), (2, b"two"), (3, 2)),
    )  # fmt: skip


@pytest.mark.parametrize("order", ["canonical", "other"])
def test_a_file_of_another_writer(tmp_path, order):
    """proto3 omits zeros, so document number 0 is not in the file. Fields may be in another order."""
    first, second = message((2, 9)), message((1, 2), (2, 4))
    if order == "other":
        second = message((2, 4), (1, 2))
    (tmp_path / "x").write_bytes(delimited(
        message((2, 1), (3, 3)), message((1, b"w"), (4, first), (4, second)),
        message((2, b"one")), message((1, 1), (2, b"two")), message((1, 2), (2, b"three")),
    ))  # fmt: skip
    index, names, terms = read_ciff(tmp_path / "x")
    assert (names, terms) == (["one", "two", "three"], ["w"])
    assert matrix(index)[:, 0].tolist() == [9, 0, 4]


def test_a_damaged_file_is_refused(tmp_path):
    index, _ = collection()
    write_ciff(index, tmp_path / "x")
    data = (tmp_path / "x").read_bytes()
    for size in (0, 1, 30, len(data) // 2, len(data) - 1):
        (tmp_path / "x").write_bytes(data[:size])
        with pytest.raises(ValueError, match="x is "):
            read_ciff(tmp_path / "x")
    (tmp_path / "x").write_bytes(bytes([4, 16, 0, 24, 1, 3, 18, 1, 255]))  # a name that is no text
    with pytest.raises(ValueError, match="x is not a CIFF file, or damaged"):
        read_ciff(tmp_path / "x")
    draw = np.random.default_rng(0)
    for _ in range(300):  # any bytes raise nothing but ValueError
        data = bytearray(draw.bytes(40))
        data[:2] = 4, 0x10
        (tmp_path / "x").write_bytes(data)
        with pytest.raises(ValueError, match=r"."):
            read_ciff(tmp_path / "x")


def test_lines_are_what_anserini_reads(tmp_path):
    index = SparseIndex.build([([0, 1], [1.0, 0.1]), ([1], [2.0])], num_terms=2)
    write_impacts(index, tmp_path / "x.jsonl.gz", terms=["a", "b"], bits=3)
    with gzip.open(tmp_path / "x.jsonl.gz", "rt") as file:
        lines = [json.loads(line) for line in file]
    assert lines == [
        {"id": "0", "contents": "", "vector": {"a": 4}},  # 0.1 rounds to 0
        {"id": "1", "contents": "", "vector": {"b": 7}},
    ]
    assert read_impacts(tmp_path / "x.jsonl.gz").names == ["0", "1"]


@pytest.mark.parametrize(("work", "said"), [
    (lambda i, p: write_ciff(i, p, terms=["a"] * V), "terms must be 12 different"),
    (lambda i, p: write_ciff(i, p, names=["a"]), "names must be 300 different"),
    (lambda i, p: write_ciff(i, p, bits=25), "bits must be"),
    (lambda i, p: write_ciff(i, p, scale=1e9), "makes the largest weight"),
    (lambda i, p: write_impacts(i, p, terms=["a b", *TERMS[1:]]), "white space"),
    (lambda i, p: write_ciff(SparseIndex.build(-torch.eye(V)), p), "weight of -1.0"),
    (lambda i, p: write_ciff(i, p, bits="8"), "bits must be an int, got '8'"),
    (lambda i, p: write_impacts(i, p, bits=7.5), "bits must be an int, got 7.5"),
    (lambda i, p: write_ciff(i, p, scale="a"), "scale must be a number and not NaN, got 'a'"),
    (lambda i, p: write_ciff(i, p, scale=0), "scale must be finite and above 0, got 0"),
    (lambda i, p: read_impacts(p, scale=0), "scale must be finite and above 0, got 0"),
    (lambda i, p: (write_ciff(i, p), read_ciff(p, scale=float("inf"))), "above 0, got inf"),
    (lambda i, p: read_impacts(p, terms=["x"]), "not in terms"),
    (lambda i, p: (write_ciff(i, p), read_ciff(p, terms=["x"])), "not in terms"),
])  # fmt: skip
def test_what_is_refused(tmp_path, work, said):
    index, _ = collection()
    write_impacts(index, tmp_path / "x")
    with pytest.raises(ValueError, match=said):
        work(index, tmp_path / "x")


@pytest.mark.parametrize(("work", "said"), [
    (lambda i, p: write_ciff(i, p, terms=range(V)), "terms must be strings, got 0"),
    (lambda i, p: write_impacts(i, p, names=5), "names must be a list of strings, got 5"),
    (lambda i, p: write_impacts(i, p, terms="abcdefghijkl"), "terms must be a list of strings"),
    (lambda i, p: read_ciff(p, terms=5), "terms must be a list of strings, got 5"),
])  # fmt: skip
def test_names_that_are_no_strings(tmp_path, work, said):
    index, _ = collection()
    write_ciff(index, tmp_path / "x")
    with pytest.raises(TypeError, match=said):
        work(index, tmp_path / "x")


@pytest.mark.parametrize(
    "rest", ["", ', "vector": {"a": "1"}', ', "vector": {"a": 1' + "0" * 400 + "}"]
)
def test_a_line_that_is_no_document_is_named(tmp_path, rest):
    (tmp_path / "x").write_text('{"id": 1, "vector": {}}\n{"id": 2' + rest + "}\n")
    with pytest.raises(ValueError, match="line 2: expected"):
        read_impacts(tmp_path / "x")


@pytest.mark.parametrize("name", ["x", "x.gz"])
def test_a_damaged_file_of_lines_is_named(tmp_path, name):
    whole = b'{"id": 1, "vector": {"a": 1}}\n'
    (tmp_path / name).write_bytes(gzip.compress(whole)[:-9] if name == "x.gz" else whole + b"\xff")
    with pytest.raises(ValueError, match=f"{name} is damaged after line"):
        read_impacts(tmp_path / name)
