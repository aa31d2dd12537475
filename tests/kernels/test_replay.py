"""Replay: a call repeats the recorded allocations and launches of an earlier one with its own tensors.

This happens only if the recorded call did nothing else.
"""

from __future__ import annotations

import ctypes
import gc
import types
import weakref
from typing import Any, NamedTuple

import pytest
import torch
import triton
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sparse_inductor import compat
from sparse_inductor.compat import triton as private
from sparse_inductor.kernels.common import launch as launching
from sparse_inductor.kernels.common import launches, recording, replay
from sparse_inductor.kernels.common.launch import launch


class Kernel:
    """A fake Triton kernel that runs `body` with addresses in CPU memory and numbers."""

    def __init__(self, body) -> None:
        self.body, self.launched = body, 0

    def __getitem__(self, grid):
        def first(*args, num_warps, **constants):
            compiled = Compiled(self, args, tuple(constants.values()))
            self.launch(compiled, grid, *args, *constants.values())
            return compiled

        return first

    def launch(self, compiled, grid, *args) -> None:
        compiled[grid](*args)


class Config(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint) for name in ("x", "y", "z", "threads", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("number", ctypes.c_uint),
    ]  # fmt: skip


class Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]


def kind_of(a) -> Any:
    if isinstance(a, tuple):
        return tuple(map(kind_of, a))
    if isinstance(a, Tensor):
        return "*fp32"
    if hasattr(a, "block_shape"):
        return "tensordesc<fp32[2, 5]>"
    return {int: "i64", float: "fp32"}.get(type(a), "constexpr")


def flat(a) -> list:
    return [e for part in a for e in flat(part)] if isinstance(a, tuple) else [a]


class Compiled:
    """A fake compiled kernel; the fake driver finds it by the number of its function."""

    name = "a kernel"
    packed_metadata = None
    known: dict[int, Compiled] = {}
    options: dict[str, Any] = {}

    def __init__(self, kernel: Kernel, args: tuple, constants: tuple = ()) -> None:
        self.kernel, self.constants = kernel, constants
        kinds = [*map(kind_of, args), *("constexpr" for _ in constants)]
        self.src = types.SimpleNamespace(signature=dict(enumerate(kinds)))
        usual = {
            "num_warps": 4, "num_ctas": 1, "shared": 256, "launch_pdl": False,
            "launch_cooperative_grid": False, "global_scratch_size": 0, "profile_scratch_size": 0,
            "tensordesc_meta": ["a box"],
        }  # fmt: skip
        self.metadata = types.SimpleNamespace(**usual | self.options)
        self.function = len(Compiled.known) + 1
        Compiled.known[self.function] = self

    def types(self) -> list:
        """Return the ctypes types of its parameters as the driver sees them."""
        found: list = []
        for kind in flat(tuple(self.src.signature.values())):
            if kind.startswith("tensordesc"):
                found += [Map, *[ctypes.c_int32] * 2, *[ctypes.c_int64] * 2]
            elif kind != "constexpr":
                found.append(ctypes.c_float if kind == "fp32" else ctypes.c_uint64)
        return found

    def __getitem__(self, grid):
        return lambda *args: self.run(
            *(*grid, 1, 1)[:3], 0, self.function, self.packed_metadata, *(None,) * 3, *args
        )

    @property
    def run(self):
        return self._run

    def _run(self, x, y, z, stream, function, packed, metadata, enter, leave, *args) -> None:
        self.kernel.launched += 1
        triton.knobs.runtime.launch_enter_hook(metadata)
        self.kernel.body(*(a.data_ptr() if isinstance(a, Tensor) else a for a in args))


class Map(ctypes.Structure):
    _fields_ = [("address", ctypes.c_uint64), ("more", ctypes.c_char * 120)]


Pointers = ctypes.POINTER(ctypes.c_void_p)
Sizes = ctypes.POINTER(ctypes.c_size_t)


class Driver:
    """A fake CUDA driver: launches call the kernels' bodies."""

    def __init__(self) -> None:
        self.configs: list[Config] = []
        self.code = 0
        pointer, number = ctypes.c_void_p, ctypes.c_int
        made = ctypes.CFUNCTYPE
        self.functions = [
            made(number, ctypes.POINTER(Config), pointer, Pointers, pointer)(self.launch),
            made(number, pointer, ctypes.c_ubyte, ctypes.c_size_t, pointer)(lambda *_: 1),
            made(number, pointer, ctypes.c_size_t, Sizes, Sizes)(self.parameter),
            made(number, ctypes.POINTER(Map), pointer)(self.replace),
            made(number, Pointers)(self.context),
            made(number, pointer)(lambda context: 0),
        ]

    def launch(self, config, function, given, _) -> int:
        compiled = Compiled.known[function]
        values = [kind.from_address(given[i]) for i, kind in enumerate(compiled.types())]
        numbers = [v if isinstance(v, Map) else v.value for v in values]
        self.configs.append(Config.from_buffer_copy(config[0]))
        given_attributes = (Attribute * config[0].number).from_address(config[0].attributes)
        self.attributes = {a.id: tuple(a.value) for a in given_attributes}
        compiled.kernel.launched += 1
        compiled.kernel.body(*numbers, *compiled.constants)
        return self.code

    def parameter(self, function, i, at, size) -> int:
        kinds = [*Compiled.known[function].types(), *[ctypes.c_void_p] * 2]
        if i >= len(kinds):
            return 1
        size[0] = ctypes.sizeof(kinds[i])
        return 0

    def replace(self, box, address) -> int:
        box[0].address = address
        return 0

    def context(self, context) -> int:
        context[0] = 1
        return 0


@pytest.fixture(autouse=True)
def driver(monkeypatch):
    for name in ("_compiled", "_seen", "_sorts"):
        monkeypatch.setattr(launching, name, {})
    monkeypatch.setattr(replay, "_plans", {})
    monkeypatch.setattr(Compiled, "known", {})
    monkeypatch.setattr(triton.compiler, "CompiledKernel", Compiled)
    made = Driver()
    library = launches.library([ctypes.cast(f, ctypes.c_void_p) for f in made.functions])
    monkeypatch.setattr(launches, "available", lambda: library)
    return made


def floats(address: int, n: int):
    return (ctypes.c_float * n).from_address(address)


def double(source: int, target: int, n: int, factor: int) -> None:
    for i, value in enumerate(floats(source, n)):
        floats(target, n)[i] = factor * value


def operator(kernel: Kernel, between=lambda t: t, end=lambda out: out):
    """Return a replayed function that computes 4 x in two launches, with scratch memory between them.

    `.planned` counts the runs of its Python code.
    """

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


def planned(call, n: int = 4, factor: int = 4) -> int:
    """Call it with `n` tensors, check the results `factor * x`, and return how often its Python code ran."""
    before = call.planned
    for x in draws(n):
        torch.testing.assert_close(call(x, [], "a"), factor * x)
    return call.planned - before


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
    for x, y in kept:  # no call overwrote the result of another one
        torch.testing.assert_close(y, 4 * x)


def test_scratch_memory_is_shared_by_what_is_used_one_after_the_other():
    """Each of seven launches reads the previous one's result; a later launch reads the first tensor again."""
    kernel, freed = Kernel(double), []

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        first = at = torch.empty_like(x)
        launch(kernel, (1,), (x, at, x.numel()), {"F": 2}, 4)
        for _ in range(7):
            before, at = at, torch.empty_like(x)
            launch(kernel, (1,), (before, at, x.numel()), {"F": 2}, 4)
            ref = weakref.ref(before.untyped_storage())
            del before
            freed.append(ref() is None)
        total = x.new_zeros(len(x))
        again, out = torch.empty_like(x), torch.empty_like(x)
        launch(kernel, (1,), (first, again, x.numel()), {"F": 2}, 4)
        launch(kernel, (1,), (at, out, x.numel()), {"F": 2}, 4)
        return out, total.add_(again)

    call = replay.replayed(fn)
    for _ in range(5):
        x = torch.randn(1024)
        out, total = call(x)
        torch.testing.assert_close(out, 512 * x)
        torch.testing.assert_close(total, 4 * x)
    assert freed == 2 * [False, *[True] * 6]  # the recorded call frees tensors, too
    (plan,) = replay._plans.values()
    # At most three of nine tensors are alive at a time. Preserving addresses modulo a page may need more room.
    assert 3 * x.nbytes <= plan._scratch < 6 * x.nbytes


def test_another_tensor_at_an_address_that_was_freed_is_not_the_one_before():
    kernel = Kernel(lambda *_: None)

    def fn(x: Tensor) -> Tensor:
        made, out = torch.empty(20), torch.empty_like(x)
        launch(kernel, (1,), (x, made, 20), {}, 4)
        there = (ctypes.c_float * 20).from_address(made.data_ptr())
        del made
        launch(kernel, (1,), (torch.frombuffer(there, dtype=torch.float32), out, 20), {}, 4)
        return out

    call = replay.replayed(fn)
    for x in draws(3):
        call(x)
    assert [*replay._plans.values()] == [None]


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
    assert planned(call) == 2
    call(*args)
    assert call.planned == 3


def test_another_setting_is_planned_anew(monkeypatch):
    call = operator(Kernel(double))
    assert planned(call) == 2
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if before == "highest" else "highest")
    try:
        assert planned(call, 1) == 1
    finally:
        torch.set_float32_matmul_precision(before)


USUAL = {
    "reads a number": {"between": lambda t: t.sum().item()},
    "a tensor of its own": {"between": lambda t: t.add_(ELSEWHERE)},
    "a tensor from the host": {"between": lambda t: torch.tensor([1.0]) * t},
    "a part is the result": {"end": lambda out: out[1:]},
    "one tensor is two results": {"end": lambda out: (out, out.view(-1))},
}


@pytest.mark.parametrize("name", USUAL)
def test_what_depends_on_more_than_its_arguments_or_shares_memory_goes_its_usual_way(name):
    call = operator(Kernel(double), **USUAL[name])
    for x in draws(5):
        call(x, [], "a")
    assert call.planned == 5


def test_an_error_of_the_driver_is_raised(driver, monkeypatch):
    monkeypatch.setattr(compat, "cuda_error", lambda code: "out of memory")
    call = operator(Kernel(double))
    assert planned(call) == 2
    driver.code = 2
    with pytest.raises(RuntimeError, match="error 2: out of memory"):
        call(draws(1)[0], [], "a")


def test_a_launch_on_another_stream_goes_its_usual_way(monkeypatch):
    streams = iter(range(1, 100))
    monkeypatch.setattr(compat, "raw_stream", lambda device: next(streams))
    call = operator(Kernel(double))
    assert planned(call) == 4


def scaled_between():
    """Return a replayed function in which ATen operators, in place and out of place, run between two launches."""
    kernel = Kernel(double)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        scratch = torch.empty(40)
        launch(kernel, (1,), (x, scratch[20:], 20), {"F": 2}, 4)
        scratch[20:].mul_(3.0)
        total = torch.cumsum(scratch.view(2, 20)[1], 0)
        pairs = torch.stack([total, x.view(-1)]).to(torch.float64).sum(0)
        out = x.new_zeros(20)
        launch(kernel, (1,), (total[1:], out, 19), {"F": 2}, 4)
        return out, pairs.view(4, 5)

    return replay.replayed(fn)


@pytest.mark.parametrize("autocast", [False, True])
def test_what_aten_computes_on_the_way_is_computed_again(autocast):
    call = scaled_between()
    for x in draws(5):
        with torch.autocast("cpu", enabled=autocast):
            out, pairs = call(x)
        total = torch.cumsum(6 * x.view(-1), 0)
        torch.testing.assert_close(out[:19], 2 * total[1:])
        assert out[19] == 0
        torch.testing.assert_close(pairs, (total + x.view(-1)).double().view(4, 5))
    assert [type(plan) for plan in replay._plans.values()] == [replay.Plan]


def product_of(x: Tensor, w: Tensor, kind: str) -> Tensor:
    """Return a product of x [4, 5] and w [6, 5]."""
    if kind == "mm":
        return x @ w.t()
    if kind == "mm, out":
        return torch.mm(x.t()[:, 1:], x[1:], out=x.new_empty(5, 5))
    if kind == "addmm":
        return torch.addmm(w.view(-1)[:6], x, w.t())
    if kind == "addmm, out":
        return torch.addmm(x[0, :1], x, w.t(), out=x.new_empty(4, 6))
    return (x @ w.t()).addmm_(x, w.t())


PRODUCTS = ("mm", "mm, out", "addmm", "addmm, out", "addmm, in place")


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("kind", PRODUCTS)
def test_products_are_made_among_the_launches(kind, there, monkeypatch):
    if not there:
        monkeypatch.setattr(compat, "product_functions", lambda *_: None)
    kernel = Kernel(double)

    def fn(x: Tensor, w: Tensor) -> Tensor:
        doubled = torch.empty_like(x)
        launch(kernel, (1,), (x, doubled, x.numel()), {"F": 2}, 4)
        product = product_of(doubled, w, kind)
        out = torch.empty_like(product)
        launch(kernel, (1,), (product, out, out.numel()), {"F": 2}, 4)
        return out

    call = replay.replayed(fn)
    for x in draws(5):
        w = torch.randn(6, 5)
        torch.testing.assert_close(call(x, w), 2 * product_of(2 * x, w, kind))
    (plan,) = replay._plans.values()
    assert type(plan) is replay.Plan and (len(plan._parts) == 1) == there


def test_a_product_that_fails_says_so(monkeypatch):
    functions = compat.product_functions("cpu", "mm_out")
    failing = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 3)(lambda *_: 1)
    address = ctypes.cast(failing, ctypes.c_void_p)
    monkeypatch.setattr(compat, "product_functions", lambda *_: [*functions[:2], address])
    call = replay.replayed(lambda x: x @ x.t())
    for x in draws(2):
        call(x)
    with pytest.raises(RuntimeError, match="a matrix product failed"):
        call(x)


def test_views_and_allocations_are_nothing_more():
    call = operator(Kernel(double), lambda t: torch.empty_like(t.view(2, -1).t()))
    assert planned(call) == 2


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


def doubled(kernel: Kernel, part=lambda t: t):
    """Return a function that doubles the second of two tensors, or a part of it."""

    def fn(a, b):
        out = torch.empty_like(part(a))
        launch(kernel, (1,), (part(b), out, 8), {"F": 2}, 4)
        return out

    return fn


def test_inputs_that_share_a_storage_are_told_apart():
    """For example, gate and up are halves of one weight in one call, and two weights in the next."""

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
    for _ in range(3):  # the layout is the same, so the call is replayed with one tensor twice
        torch.testing.assert_close(call(same, same), 2 * same)


def test_one_tensor_given_twice_is_no_plan_for_two():
    call = replay.replayed(doubled(Kernel(double)))
    same = torch.randn(8)
    for _ in range(3):
        call(same, same)
    a, b = torch.randn(8), torch.randn(8)
    torch.testing.assert_close(call(a, b), 2 * b)


def test_one_tensor_given_twice_is_replayed_where_it_is_again():
    """For example, one weight serves both projections. The kernel reads a part of it, so only its storage identifies
    it."""
    kernel = Kernel(double)
    site = replay.Site(doubled(kernel, lambda t: t[8:]))
    for _ in range(4):
        same = torch.randn(16)
        torch.testing.assert_close(site(same, same), 2 * same[8:])
    assert kernel.launched == 4 and site._plan is not None
    a, b = torch.randn(16), torch.randn(16)
    torch.testing.assert_close(site(a, b), 2 * b[8:])  # the plan does not apply to two tensors
    torch.testing.assert_close(site(same, same), 2 * same[8:])


class Pair(NamedTuple):
    tensor: Any
    number: int


@pytest.mark.parametrize("kind", [lambda *pair: pair, Pair])
def test_tuples_and_descriptors_get_the_new_addresses(kind, monkeypatch):
    like = bytes(8) + b"a box".ljust(120)
    monkeypatch.setattr(private, "_encoded", lambda box, metadata: (like, *box.shape, 5, 1))
    seen = []
    kernel = Kernel(lambda *given: seen.append(given))

    def fn(x):
        out = torch.empty_like(x)
        box = types.SimpleNamespace(base=x, shape=[4, 5], block_shape=[2, 5])
        launch(kernel, (1,), (kind(x, 3), box, out, 0.5), {"F": 2}, 4)
        return out

    call = replay.replayed(fn)
    for x in draws(4):
        out = call(x)
    address, three, box, *sizes, to, half, two = seen[-1]
    assert (address, three, to, half, two) == (x.data_ptr(), 3, out.data_ptr(), 0.5, 2)
    assert (box.address, box.more, sizes) == (x.data_ptr(), like[8:], [4, 5, 5, 1])
    assert len(seen) == 4


@pytest.mark.parametrize("early", [False, True])
def test_a_kernel_is_launched_as_triton_does(early, driver, monkeypatch):
    monkeypatch.setattr(Compiled, "options", {"launch_pdl": early, "num_ctas": 2})
    call = operator(Kernel(double))
    for x in draws(3):
        call(x, [], "a")
    config = driver.configs[-1]
    assert (config.x, config.y, config.z, config.threads, config.shared) == (2, 1, 1, 128, 256)
    nothing = (0,) * 13
    wanted = {4: (2, 1, 1, *nothing), 5: (1, 0, 0, *nothing)}  # cluster size and scheduling
    assert driver.attributes == wanted | ({6: (1, 0, 0, *nothing)} if early else {})


@pytest.mark.parametrize(
    "name, value", [("global_scratch_size", 8), ("num_ctas", 16), ("instrumentation_mode", "gsan")]
)
def test_a_launch_of_which_triton_makes_more_is_not_replayed(name, value, monkeypatch):
    monkeypatch.setattr(Compiled, "options", {name: value})
    assert planned(operator(Kernel(double))) == 4 and [*replay._plans.values()] == [None]


@pytest.mark.parametrize("more", [[ctypes.c_int32], [ctypes.c_uint64], []])
def test_a_kernel_whose_parameters_the_driver_sees_otherwise_is_not_replayed(more, monkeypatch):
    usual = Compiled.types
    monkeypatch.setattr(Compiled, "types", lambda compiled: (usual(compiled) + more)[not more :])
    assert planned(operator(Kernel(double))) == 4 and [*replay._plans.values()] == [None]


def test_a_tensor_map_is_the_end_of_what_triton_makes(monkeypatch):
    nvidia = pytest.importorskip("triton.backends.nvidia.driver")
    made = type("Made", (bytes,), {"__slots__": ()})
    monkeypatch.setattr(nvidia, "make_tensordesc_arg", lambda box, metadata: [made, *box, metadata])
    found, *numbers = private._encoded((4, 5), "metadata")
    end = type(made).__basicsize__
    assert found == ctypes.string_at(id(made) + end - 128, 128)
    assert numbers == [4, 5, "metadata"]


class Elsewhere(Kernel):
    """A fake kernel with launches that bypass `CompiledKernel.run`."""

    def launch(self, compiled, grid, *args) -> None:
        compiled._run(*grid, 1, 1, 0, *(None,) * 5, *args)


class Reordered(Kernel):
    """A fake kernel with launches that pass the function at another position, directly before the arguments."""

    def launch(self, compiled, grid, *args) -> None:
        compiled.run(*grid, 1, 1, 0, *(None,) * 4, compiled.function, *args)


@pytest.mark.parametrize("kernel", [Elsewhere, Reordered])
def test_an_operator_whose_launches_are_not_seen_is_planned_anew(kernel):
    assert planned(operator(kernel(double))) == 4


NEVER = {
    "without a compiler": (launches, "available", lambda: None),
    "without a place to see launches from": (triton.compiler, "CompiledKernel", object),
    "with much scratch memory": (recording, "MOST_SCRATCH", 100),
}


@pytest.mark.parametrize("name", NEVER)
def test_nothing_is_replayed(name, monkeypatch):
    monkeypatch.setattr(*NEVER[name])
    assert planned(operator(Kernel(double))) == 4 and [*replay._plans.values()] == [None]


def test_a_launch_that_triton_makes_itself_is_part_of_a_plan():
    kernel, other = Kernel(double), Kernel(double)
    call = operator(kernel, lambda t: other[(1,)](t[8:], t[8:], 20, F=3, num_warps=4))
    assert planned(call, factor=12) == 2
    assert other.launched == 4


@pytest.mark.parametrize("made", [replay.replayed, replay.Site])
def test_without_memory_for_all_scratch_the_python_code_runs(made, monkeypatch):
    kernel, planned = Kernel(double), []

    def fn(x: Tensor) -> Tensor:
        planned.append(x)
        scratch, out = torch.empty_like(x), torch.empty_like(x)
        launch(kernel, (1,), (x, scratch, x.numel()), {"F": 2}, 4)
        launch(kernel, (1,), (scratch, out, x.numel()), {"F": 2}, 4)
        return out

    def full(*_):
        raise torch.OutOfMemoryError("no memory")

    call = made(fn)
    for x in draws():
        torch.testing.assert_close(call(x), 4 * x)
    assert len(planned) == 2
    (plan,) = replay._plans.values()
    monkeypatch.setattr(plan, "_empty", full)
    torch.testing.assert_close(call(x), 4 * x)
    assert len(planned) == 3


def test_a_failing_call_leaves_no_plan():
    def fn(x):
        raise ValueError("no")

    call = replay.replayed(fn)
    for x in draws(4):
        with pytest.raises(ValueError):
            call(x)
    assert launching._observer is None


def test_a_call_holds_no_tensor_when_it_has_ended():
    """Neither the recorded call nor a replay does, not even in a reference cycle that would be collected later."""
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
    assert planned(call) == 2
    monkeypatch.setattr(launching, "profiler_attached", lambda: True)
    assert planned(call, 1) == 1
