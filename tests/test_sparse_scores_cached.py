"""Documents that stay the same from call to call are searched by an index, and every write to them is detected."""

from __future__ import annotations

import copy
import functools
import gc
import os
import threading
import weakref

import pytest
import torch
from torch import nn

from processes import threads
from sparse_inductor.kernels.sparse_scores import cpu as native
from sparse_inductor.ops import _collections as cached
from sparse_inductor.ops._direct import site
from sparse_inductor.policy import unrest
from support import compile_without_codegen, index_pays, only

N, L, V, K = 60, 5, 40, 7
TOP = torch.ops.sparse_inductor.sparse_scores_topk
CACHED = torch.ops.sparse_inductor.sparse_scores_topk_cached

pytestmark = pytest.mark.skipif(not native.ready(wait=True), reason="no C++ compiler")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Builds indexes of small collections, too, after two calls."""
    index_pays(monkeypatch)
    monkeypatch.setattr(cached, "PATIENCE", 2)
    monkeypatch.delenv(cached.MEMORY_VARIABLE, raising=False)
    cached.forget()
    yield
    cached.forget()


class Held(nn.Module):
    """A module that holds its documents."""

    def __init__(
        self, layout: str = "padded", dtype: torch.dtype = torch.float32, op=CACHED
    ) -> None:
        super().__init__()
        self.op = op
        g = torch.Generator().manual_seed(0)
        ids = torch.stack([torch.randperm(V, generator=g)[:L] for _ in range(N)])
        ids[:, -1] = V  # padding
        values = torch.randint(1, 9, (N, L), generator=g).to(dtype)  # many scores are equal
        if layout != "padded":
            ids, values = ids.flatten(), values.flatten()
        self.register_buffer("ids", ids)
        self.register_buffer("values", values)
        self.rows = torch.arange(N).repeat_interleave(L).flip(0) if layout == "rows" else None
        self.offsets = torch.arange(0, N * L + 1, L) if layout == "offsets" else None

    def forward(self, q: torch.Tensor, op=None):
        op = op or self.op
        held = () if op is TOP else (15,)
        documents = self.ids, self.values, self.rows, self.offsets
        return op(q, *documents, N, K, torch.float32, "", *held)

    def used(self, q: torch.Tensor) -> bool:
        """Check a call against the operator, and return whether an index answered it."""
        before = sum(c.searches for c in cached.collections())
        torch.testing.assert_close(self(q), self(q, TOP), rtol=0, atol=0, equal_nan=True)
        return sum(c.searches for c in cached.collections()) > before


def queries(rows: int = 3) -> torch.Tensor:
    g = torch.Generator().manual_seed(1)
    return torch.randint(0, 3, (rows, V), generator=g).float()


def indexed(op=CACHED) -> tuple[Held, torch.Tensor]:
    """Return documents that have an index, and queries."""
    m, q = Held(op=op), queries()
    while not m.used(q):
        pass
    return m, q


@pytest.mark.parametrize(
    "layout, dtype",
    [("padded", torch.float32), ("rows", torch.bfloat16), ("offsets", torch.float32)],
)
def test_an_index_serves_after_some_calls(layout, dtype):
    m, q = Held(layout, dtype), queries()
    assert [m.used(q) for _ in range(4)] == [False, False, True, True]
    assert m.used(q[:1]) and m.used(q[0]) and m.used(q.bfloat16())
    (known,) = cached.collections()
    assert known.nbytes > 0 and "searched" in str(known) and known.as_dict()["note"] == ""


def _same_address(m):
    """Replace the documents by new ones at the same address, if the allocator reuses the freed memory."""
    address = m.values.data_ptr()
    new = m.values.neg()
    m.values = None
    gc.collect()
    taken = [torch.empty(N, L) for _ in range(64)]
    again = [t for t in taken if t.data_ptr() == address]
    m.values = again[0].copy_(new) if again else new


WRITES = {
    "in_place": lambda m: m.values.mul_(-1),
    "one_element": lambda m: m.values.data[N - 1, 2].add_(1e-3),
    "data": lambda m: m.values.data.mul_(-1),
    "data_is_another": lambda m: setattr(m.values, "data", m.values * 2),
    "detached": lambda m: m.values.detach().add_(1),
    "numpy": lambda m: m.values.numpy().__setitem__((3, 1), 50),
    "dlpack": lambda m: torch.from_dlpack(m.values).mul_(3),
    "set_": lambda m: m.values.set_(m.values * 3),
    "storage": lambda m: m.values.untyped_storage().copy_((m.values * 2).untyped_storage()),
    "resize_": lambda m: m.values.resize_(N * L + 5).resize_(N, L).mul_(2),
    "ids": lambda m: m.ids.numpy().__setitem__((0, 0), (m.ids[0, 0] + 1) % V),
    "swapped_rows": lambda m: m.ids.data.copy_(m.ids.flip(0)),
    "another_tensor": lambda m: setattr(m, "values", m.values * 2),
    "inference_mode": lambda m: torch.inference_mode()(lambda: m.values.data.mul_(2))(),
    "same_address": _same_address,
}


def at_a_site():
    return site("sparse_scores_topk_cached", "cpu", True)


@pytest.mark.parametrize("op", [lambda: CACHED, at_a_site], ids=["operator", "site"])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_seen(write, op):
    """Both the operator and its call site in generated code, which looks documents up once, detect it."""
    m, q = indexed(op())
    assert m.used(q)
    WRITES[write](m)
    assert not m.used(q), "the first call after a write is scored"
    assert any(m.used(q) for _ in range(8)), "documents that hold still are indexed again"


def test_documents_of_inference_mode_have_no_versions():
    with torch.inference_mode():
        m, q = indexed()
        m.values.mul_(-1)
        assert not m.used(q)


def test_each_index_takes_twice_the_calls_of_the_last():
    m, q = Held(), queries()
    waited = []
    for _ in range(3):
        waited.append(next(i for i in range(99) if m.used(q)))
        m.values.data.neg_()
    assert waited[0] < waited[1] < waited[2]
    assert cached.collections()[0].changes == 2


def test_weights_that_are_not_finite_are_scored():
    m, q = indexed()
    q[1, 3] = float("inf")
    assert m.used(queries()) and not m.used(q)
    m.values.data[4, 1] = float("nan")
    assert not any(m.used(queries()) for _ in range(9))
    assert "must be finite" in cached.collections()[0].note


def test_the_index_goes_with_the_documents():
    call, q = at_a_site(), queries()
    m = Held(op=call)
    other = copy.deepcopy(m)
    while not (m.used(q) and other.used(q)):
        pass
    gone, kept = (weakref.ref(c._built) for c in cached.collections())
    del m
    gc.collect()
    assert len(cached.collections()) == 1 and other.used(q) and gone() is None
    cached.forget()
    assert kept() is None and not other.used(q)


@pytest.mark.parametrize(
    "limit, note", [("0", None), ("1K", "more than the limit of 0 MiB"), ("x", None)]
)
def test_memory_is_bounded(monkeypatch, limit, note):
    monkeypatch.setenv(cached.MEMORY_VARIABLE, limit)
    m, q = Held(), queries()
    assert not any(m.used(q) for _ in range(6))
    assert [note in c.note for c in cached.collections()] == [True] * (note is not None)


def test_a_slower_index_is_not_built(monkeypatch):
    index_pays(monkeypatch, most={"queries": 2})
    m = Held()
    assert not any(m.used(queries(3)) for _ in range(9)) and not cached.collections()
    assert [m.used(queries(2)) for _ in range(3)] == [False, False, True]


def test_an_index_that_was_interrupted_is_built_later(monkeypatch):
    m, q = Held(), queries()
    with monkeypatch.context() as interrupted, pytest.raises(KeyboardInterrupt):
        interrupted.setattr(
            cached, "CheckedIndex", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        for _ in range(4):
            m(q)
    assert [m.used(q) for _ in range(3)][1:] == [True, True]


def test_deterministic_programs_wait_for_an_index(monkeypatch):
    """The first call that uses the index must not depend on the time that a thread takes to build it."""
    monkeypatch.setattr(cached, "ON_THE_SPOT", 0)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    m, q = Held(), queries()
    assert [m.used(q) for _ in range(3)] == [False, False, True]


def test_threads(monkeypatch):
    """Threads call while an index is built in the background, and while one of them writes."""
    monkeypatch.setattr(cached, "ON_THE_SPOT", 0)
    m, q, wrong = Held(), queries(), []
    before = m(q, TOP)
    held = threading.Barrier(5)

    def call(expected):
        held.wait()
        for _ in range(40):
            found = m(q)
            if not (torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])):
                wrong.append(found)

    for expected in (before, None):
        if expected is None:
            m.values.data.mul_(2)
            expected = m(q, TOP)
        with threads(*[functools.partial(call, expected)] * 4):
            held.wait()
        for t in threading.enumerate():  # builds that the threads started
            if t.name == "sparse_index_build":
                t.join()
        assert m.used(q)
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_knows_no_index():
    m, q = indexed()
    known = []

    def call():  # in a new thread, because OpenMP's threads of the forking thread do not exist in the child
        known.extend((len(cached.collections()), m.used(q), m.used(q), m.used(q)))

    child = os.fork()
    if child == 0:
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(20)
        os._exit(known != [0, False, False, True])
    assert os.waitpid(child, 0)[1] == 0


def test_the_operator():
    m, q = Held(), queries().requires_grad_()
    for _ in range(5):
        found, _ = m(q)
        (found * torch.arange(K)).sum().backward()
        (slope,) = torch.autograd.grad((m(q, TOP)[0] * torch.arange(K)).sum(), q)
        assert torch.equal(q.grad, slope)
        q.grad = None
    args = (q.detach(), m.ids, m.values, None, None, N, K, torch.float32)
    torch.library.opcheck(CACHED, args)


class Program(nn.Module):
    def __init__(self, cast=False):
        super().__init__()
        held = Held()
        ids = held.ids.clamp(max=V - 1)
        self.register_buffer("ids", ids.int() if cast else ids)
        self.register_buffer("values", held.values)

    def forward(self, q):
        return (q[:, self.ids.long()] * self.values).sum(-1).topk(K)


@pytest.mark.parametrize("policy, cast", [("always", True), ("never", False)])
def test_a_program_is_served_by_an_index(monkeypatch, policy, cast):
    m, q = Program(cast), queries()
    monkeypatch.setenv("SPARSE_INDUCTOR_POLICY", policy)
    with only("sparse_scores") as report, torch.no_grad():
        run = compile_without_codegen(m)
        for _ in range(5):
            found = run(q)
        assert torch.equal(found[0], m(q)[0])
        said = str(report)
    if policy == "never":
        assert not cached.collections() and "an index of" not in said
    else:
        assert f"{N} documents on cpu, an index of" in said
        assert cached.collections()[0].searches > 0


def test_an_exported_program_keeps_the_operator():
    with only("sparse_scores"), torch.no_grad():
        program = torch.export.export(Program(), (queries(),))
    assert not any("cached" in str(n.target) for n in program.graph.nodes)


def test_documents_that_change_go_back_to_as_written(monkeypatch):
    """If only an index is profitable and documents change at each call, the code is recompiled without it."""
    monkeypatch.setattr(unrest, "RESTLESS", 4)
    m, q = Program(), queries()
    monkeypatch.setenv("SPARSE_INDUCTOR_POLICY", "auto")
    with only("sparse_scores") as report, torch.no_grad():
        run = compile_without_codegen(m)
        for _ in range(9):
            m.values.add_(1)
            assert torch.equal(run(q)[0], m(q)[0])
        assert len(report.rewrites) == 1
        (pending,) = report.pending
        assert "change from call to call" in pending.reason
