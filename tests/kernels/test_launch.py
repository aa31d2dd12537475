"""Launches: a compiled kernel is reused if and only if its code fits the new arguments."""

from __future__ import annotations

import functools
import re
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from processes import python
from sparse_inductor.compat import triton as triton_parts
from sparse_inductor.kernels.common import launch as module
from sparse_inductor.kernels.common.launch import launch


class Kernel:
    """A fake Triton kernel that counts compilations and records launches."""

    def __init__(self, compiles: bool = True) -> None:
        self.compiled, self.compiles = 0, compiles
        self.launched: list[tuple] = []

    def __getitem__(self, grid):
        def run(*args, **constants):
            self.compiled += 1
            return Compiled(self) if self.compiles else None

        return run


def with_parameters(**constant: bool) -> Kernel:
    kernel = Kernel()
    kernel.__name__ = "kernel"
    kernel.params = [SimpleNamespace(name=n, is_constexpr=c) for n, c in constant.items()]
    kernel.arg_names = list(constant)
    return kernel


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args: self.kernel.launched.append((grid, args))


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(module, "_compiled", {})
    monkeypatch.setattr(module, "_seen", {})


X = torch.zeros(64)
UNALIGNED = torch.zeros(65)[1:]
CONSTANTS = {"BLOCK": 16}


def test_the_second_launch_is_of_what_the_first_compiled():
    kernel = Kernel()
    for _ in range(3):
        launch(kernel, (7,), (X, None, 48, 0.5), CONSTANTS, 4)
    assert kernel.compiled == 1
    assert kernel.launched == [((7, 1, 1), (X.data_ptr(), None, 48, 0.5, 16))] * 2


@pytest.mark.parametrize(
    "other",
    [
        (X.half(), 48, 0.5, True),
        (UNALIGNED, 48, 0.5, True),
        (X, 49, 0.5, True),
        (X, 2**31, 0.5, True),
        (X, 1, 0.5, True),
        (X, 48.0, 0.5, True),
        (X, 48, None, True),
        (X, 48, 1, True),
        (X, 48, 0.5, False),
        (X, 48, 0.5, 1),
        ((X,), 48, 0.5, True),
    ],
)
def test_what_the_code_depends_on_is_compiled_for(other):
    kernel = Kernel()
    launch(kernel, (1,), (X, 48, 0.5, True), CONSTANTS, 4)
    launch(kernel, (1,), other, CONSTANTS, 4)
    assert (kernel.compiled, kernel.launched) == (2, [])


@pytest.mark.parametrize("other", [(X[32:], 48, 0.5), (X, 64, 0.5), (X, 2**30, 0.5), (X, 48, 1.5)])
def test_what_it_does_not_depend_on_is_not(other):
    kernel = Kernel()
    launch(kernel, (1,), (X, 48, 0.5), CONSTANTS, 4)
    launch(kernel, (1,), other, CONSTANTS, 4)
    assert kernel.compiled == 1
    assert kernel.launched[0][1][1:] == (*other[1:], 16)


@pytest.mark.parametrize("tensors", [(X, UNALIGNED), (UNALIGNED, X)])
def test_the_alignment_of_each_tensor_counts(tensors):
    kernel = Kernel()
    launch(kernel, (1,), (UNALIGNED, UNALIGNED), CONSTANTS, 4)
    launch(kernel, (1,), tensors, CONSTANTS, 4)
    assert kernel.compiled == 2


def test_constants_warps_and_options_are_compiled_for():
    kernel = Kernel()
    launch(kernel, (1,), (X,), CONSTANTS, 4)
    launch(kernel, (1,), (X,), {"BLOCK": 32}, 4)
    launch(kernel, (1,), (X,), CONSTANTS, 8)
    launch(kernel, (1,), (X,), CONSTANTS, 4, num_stages=2)
    launch(kernel, (1,), (X,), CONSTANTS, 4, num_stages=3)
    assert (kernel.compiled, kernel.launched) == (5, [])


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.mark.parametrize("kind", [lambda *pair: pair, Pair, lambda *pair: Pair(X, Pair(*pair))])
def test_tuples_count_by_what_is_in_them(kind):
    kernel = Kernel()
    for numbers in ((32, 16), (32, 17), (64, 16), (32, None), (32, 16.0)):
        launch(kernel, (1,), (X, kind(*numbers)), CONSTANTS, 4)
    assert (kernel.compiled, len(kernel.launched)) == (4, 1)


def test_the_interpreter_leaves_nothing_to_keep():
    kernel = Kernel(compiles=False)
    for _ in range(2):
        launch(kernel, (1,), (X,), CONSTANTS, 4)
    assert kernel.compiled == 2


def test_many_shapes_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(module, "_MOST_SEEN", 10)
    kernel = Kernel()
    for n in range(100):
        launch(kernel, (1,), (X, 32 * n + 32), CONSTANTS, 4)
    assert kernel.compiled == 1
    assert len(module._seen) <= 10


def test_a_decorated_kernel_is_written_as_any_and_launched_with_its_constants_in_order():
    kernel = with_parameters(x=False, n=False, BLOCK=True, FLAG=True)
    decorated = module._Relaunched(kernel)
    for _ in range(2):
        decorated[(3,)](X, 48, FLAG=True, BLOCK=16, num_warps=2, num_stages=1)
        decorated[(3,)](X, 48, 16, FLAG=True, num_warps=2, num_stages=1)
    assert kernel.compiled == 1
    assert kernel.launched == [((3, 1, 1), (X.data_ptr(), 48, 16, True))] * 3
    with pytest.raises(KeyError, match="BLOCK"):
        decorated[(3,)](X, 48, FLAG=True)


def test_constants_of_a_decorated_kernel_come_last():
    with pytest.raises(TypeError, match="last"):
        module._Relaunched(with_parameters(x=False, D=True, n=False))


def test_constants_are_not_taken_for_arguments():
    """Otherwise another width would be launched with the code for the first one."""
    kernel = with_parameters(x=False, D=True, n=False, BLOCK=True)
    with pytest.raises(TypeError, match="'D'"):
        launch(kernel, (1,), (X, 768, 48), CONSTANTS, 4)
    kernel.params.pop(1)
    launch(kernel, (1,), (X, 48), CONSTANTS, 4)
    assert kernel.compiled == 1


def test_what_is_decorated_is_launched_and_no_kernel_calls_it():
    """Triton compiles calls of undecorated kernels only, and the interpreter would not detect other calls."""
    sources = {p: p.read_text() for p in Path(module.__file__).parents[1].rglob("*.py")}
    everything = "\n".join(sources.values())
    decorated = [
        (path, name)
        for path, text in sources.items()
        for name in re.findall(r"^@relaunched\n@triton\.jit.*\ndef (\w+)\(", text, re.M)
    ]
    assert len(decorated) == everything.count("@relaunched\n")
    for file, name in decorated:
        assert re.search(rf"\b{name}\[", everything), (file, name)
        assert not re.search(rf"(?<!def )\b{name}\(", everything), (file, name)
        parameters = re.search(rf"def {name}\((.*?)\):", file.read_text(), re.S)[1]
        constant = [
            "constexpr" in p for p in re.sub(r"#.*", "", parameters).split(",") if p.strip()
        ]
        assert constant == sorted(constant), (file, name)


def test_each_thread_gets_the_launcher_that_it_loads(monkeypatch):
    """Triton 3.6 gives all launchers the same module name, and Python keeps one module per name."""
    from triton.runtime import build

    kept = types.ModuleType("launcher")

    def usual(name, path):
        kept.launch = path
        time.sleep(0.001)
        return kept

    monkeypatch.setattr(build, "_load_module_from_path", usual)
    triton_parts._keep_modules_apart.__wrapped__()
    paths = [f"{n}.so" for n in range(16)]
    with ThreadPoolExecutor(4) as pool:
        modules = list(pool.map(build._load_module_from_path, ["launcher"] * 16, paths))
    assert [m.launch for m in modules] == paths


class Job(NamedTuple):
    """A fake compilation job; `compiled` is the function that compiles."""

    key: str
    kernel: Any
    compiled: Callable[[], Any]


def results(jobs: list[Job]) -> list[Any]:
    module.begin(jobs)
    return [module._under_way.pop(job.key).result() for job in jobs]


def test_the_compiler_is_hashed_before_threads_compile(monkeypatch):
    """In a thread beside one that traces a graph, hashing takes ten times as long: it waits for the GIL after each
    read."""
    hashed = []
    monkeypatch.setattr(
        "torch.utils._triton.triton_hash_with_backend", lambda: hashed.append(threading.get_ident())
    )
    triton_parts.hash_compiler.cache_clear()
    results([])
    assert hashed == []
    results([Job(name, name, lambda: None) for name in "ab"])
    triton_parts.hash_compiler.cache_clear()
    assert hashed == [threading.get_ident()]


def test_kernels_with_long_passes_are_compiled_first(monkeypatch):
    monkeypatch.setattr(module, "_compiled_first", set())
    order: list[str] = []
    module.compiled_first(module._Relaunched(slow := with_parameters(x=False)))
    jobs = [Job(name, name, functools.partial(order.append, name)) for name in "abcd"]
    results([*jobs[:2], jobs[2]._replace(kernel=slow), jobs[3]])
    assert order == ["c", "a", "b", "d"]


@pytest.fixture
def building(monkeypatch):
    """Replaces Triton's generation of IR by a function that records the number of threads in it.

    Yields the list of these numbers.
    """
    from triton.compiler import code_generator

    inside: list[int] = []
    numbers: list[int] = []

    def build():
        inside.append(1)
        time.sleep(0.01)
        numbers.append(len(inside))
        inside.pop()

    monkeypatch.setattr(code_generator, "ast_to_ttir", build)
    triton_parts._end_turns_with_ir.cache_clear()
    yield numbers
    triton_parts._end_turns_with_ir.cache_clear()


def test_threads_build_one_ir_at_a_time_and_go_through_passes_together(building):
    from triton.compiler import code_generator

    passes = threading.Barrier(4, timeout=60)
    turn = threading.Lock()

    def compiles(_n):
        with triton_parts.alone_until_ir(turn):
            code_generator.ast_to_ttir()
            passes.wait()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(compiles, range(4)))
    assert building == [1, 1, 1, 1]
    code_generator.ast_to_ttir()  # without a turn, as for a kernel that is not compiled ahead
    assert not turn.locked()


def test_a_turn_ends_where_no_ir_is_built(building):
    """This happens if the kernel is found on disk or fails earlier."""
    turn = threading.Lock()
    with triton_parts.alone_until_ir(turn):
        assert turn.locked()
    with pytest.raises(ValueError), triton_parts.alone_until_ir(turn):
        raise ValueError
    assert not turn.locked()


def test_nobody_waits_for_a_turn_that_would_not_end(monkeypatch):
    from triton.compiler import code_generator

    monkeypatch.delattr(code_generator, "ast_to_ttir")
    triton_parts._end_turns_with_ir.cache_clear()
    turn = threading.Lock()
    with triton_parts.alone_until_ir(turn):
        assert not turn.locked()
    triton_parts._end_turns_with_ir.cache_clear()


KEYS = """
import importlib, pkgutil
from triton import JITFunction
import sparse_inductor.kernels as package
from sparse_inductor.compat.triton import settle_cache_key
from sparse_inductor.kernels.common.launch import _Relaunched

functions = {}
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    for name, value in vars(importlib.import_module(module.name)).items():
        value = value.kernel if isinstance(value, _Relaunched) else value
        if isinstance(value, JITFunction):
            functions[value.__module__, name] = value

def keys(names):
    for function in functions.values():
        function.hash, function.used_global_vals = None, {}
    for name in names:
        settle_cache_key(functions[name])
    return {name: function.cache_key for name, function in functions.items()}

assert len(functions) > 200
assert keys(functions) == keys(reversed(functions))
"""


def test_a_kernel_has_one_cache_key_whatever_was_compiled_before():
    """In Triton 3.6 it depended on earlier compilations, so that a new process missed the cache of another one."""
    python("-c", KEYS, without=["TRITON_INTERPRET"])


def test_who_needs_a_kernel_waits_for_what_compiles_it(monkeypatch):
    """Neither a first launch nor a second request in the background compiles it again in the meantime."""
    monkeypatch.setattr(module, "_under_way", {})
    done: list[str] = []

    class Slow(Kernel):
        def warmup(self, *args, grid, **named):
            time.sleep(0.05)
            done.append("compiled")

    kernel = Slow()
    key = module._general(kernel, (X, 48), CONSTANTS, 4, {}, -1)
    job = module.Job(key, kernel, (1,), [], {}, -1)
    module.begin([job])
    module.begin([job])
    launch(kernel, (1,), (X, 48), CONSTANTS, 4)
    assert done == ["compiled"] and kernel.compiled == 1
    job.keep()
    assert key in module._compiled


def test_what_fails_in_the_background_fails_where_it_is_launched(monkeypatch):
    monkeypatch.setattr(module, "_under_way", {})

    class Broken(Kernel):
        def warmup(self, *args, grid, **named):
            raise RuntimeError("no such instruction")

    job = module.Job("key", Broken(), (1,), [], {}, -1)
    module.begin([job])
    with pytest.raises(RuntimeError, match="no such instruction"):
        job.keep()


def test_every_kernel_goes_through_launch():
    """Otherwise it would run when a call with fake tensors only collects the launches to compile their kernels."""
    sources = [p.read_text() for p in Path(module.__file__).parents[1].rglob("*.py")]
    everything = "\n".join(sources)
    for text in sources:
        plain = re.findall(r"(?<!@relaunched\n)@(?:triton|gluon)\.jit.*\ndef (\w+)\(", text)
        for name in plain:
            assert not re.search(rf"\b{name}\[", text if name.startswith("_") else everything), name
