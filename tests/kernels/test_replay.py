"""Calls that are made again from what an earlier one allocated and launched: with the new tensors' values, and only
where nothing else happened on the way."""

from __future__ import annotations

import ctypes
import gc
import types
from typing import Any, NamedTuple

import pytest
import torch
import triton
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sparse_inductor.compat import triton as private
from sparse_inductor.kernels.common import launch as launching
from sparse_inductor.kernels.common import replay
from sparse_inductor.kernels.common.launch import launch


class Kernel:
    """Stands for a Triton kernel: `body` gets addresses and numbers, here of the CPU's memory."""

    def __init__(self, body) -> None:
        self.body, self.launched = body, 0

    def __getitem__(self, grid):
        def first(*args, num_warps, **constants):
            compiled = Compiled(self)
            compiled[grid](*args, *constants.values())
            return compiled

        return first


class Compiled:
    function = packed_metadata = None
    name = "a kernel"

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args: self.run(*(*grid, 1, 1)[:3], 0, *(None,) * 5, *args)

    @property
    def run(self):
        return self._run

    def _run(self, x, y, z, stream, function, packed, metadata, enter, leave, *args) -> None:
        self.kernel.launched += 1
        triton.knobs.runtime.launch_enter_hook(metadata)
        self.kernel.body(*(a.data_ptr() if isinstance(a, Tensor) else a for a in args))


def floats(address: int, n: int):
    return (ctypes.c_float * n).from_address(address)


def double(source: int, target: int, n: int, factor: int) -> None:
    for i, value in enumerate(floats(source, n)):
        floats(target, n)[i] = factor * value


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    for name in ("_compiled", "_seen", "_sorts"):
        monkeypatch.setattr(launching, name, {})
    monkeypatch.setattr(replay, "_plans", {})
    monkeypatch.setattr(triton.compiler, "CompiledKernel", Compiled)


def operator(kernel: Kernel, between=lambda t: t, end=lambda out: out):
    """y = 4 x + 0 by two launches through scratch memory; how often it was planned is kept in `.planned`."""

    def fn(x: Tensor, rows: list[Tensor], name: str):
        call.planned += 1
        scratch = torch.empty(x.numel() + 8)
        out = x.new_empty(x.shape)
        launch(kernel, (1,), (x, scratch[8:], x.numel()), {"F": 2}, 4)
        between(scratch)
        launch(kernel, (1,), (scratch[8:], out, x.numel()), {"F": 2}, 4)
        return end(out)

    call = replay.replayed(fn)
    call.planned = 0
    return call


ELSEWHERE = torch.ones(28)


def draws(n: int = 6) -> list[Tensor]:
    return [torch.randn(4, 5) for _ in range(n)]


def test_the_third_call_is_replayed_with_its_own_values():
    kernel = Kernel(double)
    call = operator(kernel)
    kept = []
    for x in draws():
        y = call(x, [], "a")
        torch.testing.assert_close(y, 4 * x)
        kept.append((x, y))
    assert call.planned == 2
    assert kernel.launched == 12
    for x, y in kept:  # no call wrote into another's result
        torch.testing.assert_close(y, 4 * x)


@pytest.mark.parametrize(
    "args",
    [
        (torch.randn(4, 6), [], "a"),
        (torch.randn(5, 4).t(), [], "a"),
        (torch.randn(21)[1:].view(4, 5), [], "a"),
        (torch.randn(4, 5), [], "b"),
        (torch.randn(4, 5), [torch.randn(3)], "a"),
    ],
    ids=["shape", "strides", "alignment", "option", "list"],
)
def test_another_layout_is_planned_anew(args):
    call = operator(Kernel(double))
    for x in draws(3):
        call(x, [], "a")
    call(*args)
    assert call.planned == 3


def test_another_setting_is_planned_anew(monkeypatch):
    call = operator(Kernel(double))
    for x in draws(3):
        call(x, [], "a")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if before == "highest" else "highest")
    try:
        call(draws(1)[0], [], "a")
    finally:
        torch.set_float32_matmul_precision(before)
    assert call.planned == 3


@pytest.mark.parametrize(
    "between",
    [lambda t: t.sum().item(), lambda t: t.add_(ELSEWHERE), lambda t: torch.tensor([1.0]) * t],
    ids=["reads a number", "a tensor of its own", "a tensor from the host"],
)
def test_a_call_that_depends_on_more_than_its_arguments_goes_its_usual_way(between):
    call = operator(Kernel(double), between)
    for x in draws(5):
        call(x, [], "a")
    assert call.planned == 5


class Stream:
    """Stands for a stream; the current one's handle is 0 on a CPU."""

    def __init__(self, number: int) -> None:
        self.cuda_stream = number

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)


class Event:
    """Stands for an event, and writes down what becomes of it."""

    log: list[tuple[str, int, int]]

    def record(self, stream: Stream) -> None:
        self.log.append(("record", id(self), stream.cuda_stream))

    def wait(self, stream: Stream) -> None:
        self.log.append(("wait", id(self), stream.cuda_stream))


def two_streams(kernel: Kernel, wait_for: Event | None = None):
    """A call whose second stream begins behind its first launch, and is waited for behind the second."""
    main, side = Stream(0), Stream(7)

    def note_event(what: str, stream: Stream, event: Event) -> None:
        getattr(event, what)(stream)
        launching.note_event(what, stream, event)

    def fn(x: Tensor) -> Tensor:
        scratch, out = torch.empty(x.numel()), x.new_empty(x.shape)
        launch(kernel, (1,), (x, scratch, x.numel()), {"F": 2}, 4)
        forked, joined = Event(), Event()
        note_event("record", main, forked)
        note_event("wait", side, wait_for or forked)
        launch(kernel, (1,), (scratch, out, x.numel()), {"F": 2}, 4)
        note_event("record", side, joined)
        note_event("wait", main, joined)
        return out

    return fn


def test_streams_wait_for_each_other(monkeypatch):
    """Each call has events of its own."""
    monkeypatch.setattr(Event, "log", [], raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(0))
    call = replay.replayed(two_streams(Kernel(double)))
    kept = []
    for x in draws(5):
        monkeypatch.setattr(Event, "log", [])
        torch.testing.assert_close(call(x), 4 * x)
        kept.append(Event.log)
    assert type(*replay._plans.values()) is replay._Plan
    for log in kept:
        assert [(what, stream) for what, _, stream in log] == [
            ("record", 0), ("wait", 7), ("record", 7), ("wait", 0),
        ]  # fmt: skip
        assert log[0][1] == log[1][1] != log[2][1] == log[3][1]


def test_a_second_stream_is_waited_for_where_a_call_ends_by_an_error(monkeypatch):
    monkeypatch.setattr(Event, "log", [], raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(0))
    calls = []

    def fails_at_last(*args) -> None:
        calls.append(args)
        if len(calls) == 6:
            raise MemoryError
        double(*args)

    call = replay.replayed(two_streams(Kernel(fails_at_last)))
    for x in draws(2):
        call(x)
    monkeypatch.setattr(Event, "log", [])
    with pytest.raises(MemoryError):
        call(draws(1)[0])
    assert [(what, stream) for what, _, stream in Event.log] == [
        ("record", 0), ("wait", 7), ("record", 7), ("wait", 0),
    ]  # fmt: skip


def test_an_event_from_before_is_not_written_into_a_plan(monkeypatch):
    monkeypatch.setattr(Event, "log", [], raising=False)
    call = replay.replayed(two_streams(Kernel(double), Event()))
    for x in draws(3):
        torch.testing.assert_close(call(x), 4 * x)
    assert [*replay._plans.values()] == [None]


def scaled_twice(factor: float):
    """Between its two launches ATen multiplies the scratch memory, in place and out of place."""
    kernel = Kernel(double)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        scratch = torch.empty(40)
        launch(kernel, (1,), (x, scratch[20:], 20), {"F": 2}, 4)
        scratch[20:].mul_(factor)
        total = torch.cumsum(scratch.view(2, 20)[1], 0)
        pairs = torch.stack([total, x.view(-1)]).to(torch.float64).sum(0)
        out = x.new_zeros(20)
        launch(kernel, (1,), (total[1:], out, 19), {"F": 2}, 4)
        return out, pairs.view(4, 5)

    return replay.replayed(fn)


@pytest.mark.parametrize("autocast", [False, True])
def test_what_aten_computes_on_the_way_is_computed_again(autocast):
    call = scaled_twice(3.0)
    for x in draws(5):
        with torch.autocast("cpu", enabled=autocast):
            out, pairs = call(x)
        total = torch.cumsum(6 * x.view(-1), 0)
        torch.testing.assert_close(out[:19], 2 * total[1:])
        assert out[19] == 0
        torch.testing.assert_close(pairs, (total + x.view(-1)).double().view(4, 5))
    assert [type(plan) for plan in replay._plans.values()] == [replay._Plan]


def test_views_and_allocations_are_nothing_more():
    call = operator(Kernel(double), lambda t: torch.empty_like(t.view(2, -1).t()))
    for x in draws(5):
        torch.testing.assert_close(call(x, [], "a"), 4 * x)
    assert call.planned == 2


@pytest.mark.parametrize(
    "end", [lambda out: out[1:], lambda out: (out, out.view(-1))], ids=["a part", "one twice"]
)
def test_results_that_share_memory_are_not_replayed(end):
    call = operator(Kernel(double), end=end)
    for x in draws(5):
        call(x, [], "a")
    assert call.planned == 5


def test_nested_results_with_empty_ones_and_none():
    call = operator(Kernel(double), end=lambda out: (out.view(20), [None, out.new_empty(0, 3)]))
    for x in draws(5):
        y, (none, empty) = call(x, [], "a")
        torch.testing.assert_close(y, 4 * x.view(20))
        assert none is None and empty.shape == (0, 3)
    assert call.planned == 2


def test_a_tensor_from_before_is_not_written_into_a_plan():
    constant = torch.ones(20)
    kernel = Kernel(double)

    def fn(x):
        out = torch.empty_like(x)
        launch(kernel, (1,), (constant, out, 20), {"F": 2}, 4)
        return out

    call = replay.replayed(fn)
    for x in draws(4):
        call(x)
    assert list(replay._plans.values()) == [None]


def test_inputs_that_share_a_storage_are_told_apart():
    """Gate and up as halves of one weight in one call, and as two weights in the next."""

    def add(a: int, b: int, out: int, n: int) -> None:
        for i in range(n):
            floats(out, n)[i] = floats(a, n)[i] + floats(b, n)[i]

    kernel = Kernel(add)

    def fn(a, b):
        out = torch.empty_like(a)
        launch(kernel, (1,), (a, b, out, 8), {}, 4)
        return out

    call = replay.replayed(fn)
    for _ in range(3):
        both = torch.randn(2, 8)
        torch.testing.assert_close(call(*both), both.sum(0))
    a, b = torch.randn(8), torch.randn(8)
    torch.testing.assert_close(call(a, b), a + b)
    same = torch.randn(8)
    for _ in range(3):  # the same layout: replayed, with one tensor twice
        torch.testing.assert_close(call(same, same), 2 * same)


def test_one_tensor_given_twice_is_no_plan_for_two():
    kernel = Kernel(double)

    def fn(a, b):
        out = torch.empty_like(a)
        launch(kernel, (1,), (b, out, 8), {"F": 2}, 4)
        return out

    call = replay.replayed(fn)
    same = torch.randn(8)
    for _ in range(3):
        call(same, same)
    a, b = torch.randn(8), torch.randn(8)
    torch.testing.assert_close(call(a, b), 2 * b)


class Pair(NamedTuple):
    tensor: Any
    number: int


@pytest.mark.parametrize("kind", [lambda *pair: pair, Pair])
def test_tuples_and_descriptors_get_the_new_addresses(kind):
    seen = []
    kernel = Kernel(lambda pair, box, out: seen.append((pair, box.base.data_ptr(), box.shape)))

    def fn(x):
        out = torch.empty_like(x)
        box = types.SimpleNamespace(base=x, shape=[4, 5], block_shape=[2, 5])
        launch(kernel, (1,), (kind(x, 3), box, out), {}, 4)
        return out

    call = replay.replayed(fn)
    for x in draws(4):
        call(x)
        pair, address, shape = seen[-1]
        assert (address, shape) == (x.data_ptr(), [4, 5])
        assert pair[0] is x or pair == (x.data_ptr(), 3)


ENCODED: list[int] = []


def make_tensordesc_arg(box, metadata) -> list:
    ENCODED.append(box.base.data_ptr())
    return [(metadata, box.base.data_ptr()), *box.shape]


class Run:
    """As Triton 3.6 launches a kernel whose second parameter is a tensor descriptor."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False

    def __init__(self, kernel: Kernel) -> None:
        launcher = lambda *args: kernel.body(*args[13:])
        tensordesc_indices, tensordesc_meta = {1}, ["a box"]

        def inner(*args):
            given = list(args[:13])
            for i, a in enumerate(args[13:]):
                box = i in tensordesc_indices
                given += make_tensordesc_arg(a, tensordesc_meta[0]) if box else [a]
            launcher(*given)

        self.launch = inner

    def __call__(self, x, y, z, stream, function, *args) -> None:
        early = self.launch_cooperative_grid, self.launch_pdl, None, None
        self.launch(x, y, z, stream, function, *early, *args)


def test_a_descriptor_is_encoded_once_an_address(monkeypatch):
    seen = []
    kernel = Kernel(lambda x, box, *rest: seen.append((box, rest)))
    monkeypatch.setattr(Compiled, "run", property(lambda compiled: Run(compiled.kernel)))

    def fn(x):
        out = torch.empty_like(x)
        box = types.SimpleNamespace(base=x, shape=[4, 5], block_shape=[2, 5])
        launch(kernel, (1,), (x, box, out), {"F": 2}, 4)
        return out

    call = replay.replayed(fn)
    held = draws(2)
    for x in held:
        call(x)
    ENCODED.clear()
    for x in held * 3:
        out = call(x)
        box, rest = seen[-1]
        assert box == ("a box", x.data_ptr())
        assert rest == (4, 5, out.data_ptr(), 2)
    assert [x.data_ptr() for x in held] == ENCODED


def test_a_launcher_of_triton_is_taken_apart():
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    if not hasattr(driver, "make_tensordesc_arg"):
        pytest.skip("this Triton encodes tensor descriptors elsewhere")
    launcher = lambda *args: None
    signature = {"x": "*bf16", "box": "tensordesc<bf16[32, 64]>", "n": "i32"}
    wrapped = driver.wrap_handle_tensordesc(launcher, signature, [{"a": 1}])
    direct, encoded = private._encoders(wrapped)
    if direct is wrapped:
        assert encoded == {}
        pytest.skip("this Triton's launcher keeps what it calls under other names")
    assert direct is launcher
    assert [*encoded] == [1]
    assert encoded[1].keywords == {"metadata": {"a": 1}}


class Packed(Run):
    """As later ones do: what a kernel is given goes on in one tuple."""

    def __call__(self, x, y, z, stream, function, *args) -> None:
        self.launch(x, y, z, stream, function, False, False, *args[:4], None, None, args[4:])


class Failing(Run):
    def __call__(self, *args) -> None:
        raise TypeError("the arguments are looked at")


@pytest.mark.parametrize("how", [Run, Packed, Failing, object])
def test_a_launch_is_made_directly_only_where_it_hands_on_what_it_is_given(how, monkeypatch):
    run = how(Kernel(double)) if how is not object else lambda *args: None
    compiled = types.SimpleNamespace(run=run, function="f", packed_metadata="m")
    direct = private.direct_launch(compiled)
    if how is Run:
        assert direct.more == ("f", False, False, None, None, "m", None, None, None)
    else:
        assert direct is None
        launch, first, more, encoded = launching.bound(compiled, (3,))
        assert (launch, first, encoded) == (run, (3, 1, 1), {})
        assert more == ("f", "m", None, None, None)


class Elsewhere(Kernel):
    """Launched past `CompiledKernel.run`."""

    def __getitem__(self, grid):
        def first(*args, num_warps, **constants):
            compiled = Compiled(self)
            compiled._run(*grid, 1, 1, 0, *(None,) * 5, *args, *constants.values())
            return compiled

        return first


class Reordered(Kernel):
    """Its launches get the function last of what comes before the arguments."""

    def __getitem__(self, grid):
        def first(*args, num_warps, **constants):
            compiled = Compiled(self)
            compiled.function = "the function"
            compiled.run(*grid, 1, 1, 0, *(None,) * 4, "the function", *args, *constants.values())
            return compiled

        return first


@pytest.mark.parametrize("kernel", [Elsewhere, Reordered])
def test_an_operator_whose_launches_are_not_seen_is_planned_anew(kernel):
    call = operator(kernel(double))
    for x in draws(4):
        torch.testing.assert_close(call(x, [], "a"), 4 * x)
    assert call.planned == 4


def test_without_a_place_to_see_launches_from_nothing_is_replayed(monkeypatch):
    monkeypatch.setattr(triton.compiler, "CompiledKernel", type("CompiledKernel", (), {}))
    call = operator(Kernel(double))
    for x in draws(4):
        torch.testing.assert_close(call(x, [], "a"), 4 * x)
    assert call.planned == 4


def test_a_launch_that_triton_makes_itself_is_part_of_a_plan():
    kernel, other = Kernel(double), Kernel(double)
    call = operator(kernel, lambda t: other[(1,)](t[8:], t[8:], 20, F=3, num_warps=4))
    for x in draws(4):
        torch.testing.assert_close(call(x, [], "a"), 12 * x)
    assert call.planned == 2
    assert other.launched == 4


def test_much_scratch_memory_is_freed_on_the_way_instead(monkeypatch):
    monkeypatch.setattr(replay, "MOST_SCRATCH", 100)
    call = operator(Kernel(double))
    for x in draws(4):
        torch.testing.assert_close(call(x, [], "a"), 4 * x)
    assert call.planned == 4


def test_a_failing_call_leaves_no_plan():
    def fn(x):
        raise ValueError("no")

    call = replay.replayed(fn)
    for x in draws(4):
        with pytest.raises(ValueError):
            call(x)
    assert launching._observer is None


def test_a_call_holds_no_tensor_when_it_has_ended():
    """Neither the one that is recorded nor any other: not even in a cycle that Python would find later."""
    call = operator(Kernel(double))
    call(*draws(1), [], "a")
    collects = gc.isenabled()
    gc.disable()
    try:
        for _ in range(3):
            x = torch.randn(4, 5)
            y = call(x, [], "a")
            storages = [StorageWeakRef(t.untyped_storage()) for t in (x, y)]
            del x, y
            assert all(s.expired() for s in storages)
    finally:
        if collects:
            gc.enable()


def test_many_shapes_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(replay, "MOST_PLANS", 10)
    call = operator(Kernel(double))
    for n in range(1, 100):
        call(torch.randn(n), [], "a")
    assert len(replay._plans) <= 10


def test_a_profiler_of_launches_sees_them_all(monkeypatch):
    call = operator(Kernel(double))
    for x in draws(3):
        call(x, [], "a")
    monkeypatch.setattr(launching, "profiler_attached", lambda: True)
    call(draws(1)[0], [], "a")
    assert call.planned == 3
