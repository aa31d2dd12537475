"""Fixtures and defaults of all tests."""

from __future__ import annotations

import atexit
import gc
import importlib
import logging
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator

import hypothesis
import pytest
import torch

# How long examples take says nothing here.
hypothesis.settings.register_profile(
    "tests", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("tests")

# Before anything imports triton: without a GPU its kernels run in the interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Compiled graphs of another version of the operators must not be found: called without a session, they are not
# part of Inductor's cache key.
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="sparse_inductor-")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)
# Most tests are about what is recognised; `test_policy.py` is about what the default makes of it.
os.environ.setdefault("SPARSE_INDUCTOR_POLICY", "always")
# Garbage is collected now and then, not after each compile, a tenth of whose time that would take.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")
# What the processor says it has is there: to compile a program that sees takes ten seconds for each new cache.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

if os.environ.get("TRITON_INTERPRET") == "1":
    import interpreter

    interpreter.prepare()

pytest_plugins = ["sparse_inductor.pytest_plugin"]

torch.set_num_threads(max(1, min(torch.get_num_threads(), 2)))

# What would take another tenth: pytest records the loggers that do not propagate, and for a logger with a handler torch
# writes every graph as JSON; Dynamo flushes the processor's caches to measure how long a frame's guards take.
if "TORCH_TRACE" not in os.environ:
    trace = logging.getLogger("torch.__trace")
    trace.propagate = True
    trace.handlers.clear()
guards = importlib.import_module("torch._dynamo.guards")
if hasattr(guards, "profile_guard_manager"):
    guards.profile_guard_manager = lambda *_: 0.0
# TORCHINDUCTOR_VEC_ISA_OK leaves the extensions of AVX512 to be tried.
importlib.import_module("torch._inductor.cpu_vec_isa").VecISA.check_build = lambda *_: True


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is there by now stays: collecting garbage need not look through it each time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # or what goes at exit is taken for leaked


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases: Counter[str] = Counter()
    for item in items:
        if any(item.iter_markers("heavy")) or any(item.iter_markers("gpu")):
            continue
        if sample := item.get_closest_marker("sample"):
            name = item.nodeid.partition("[")[0]
            cases[name] += 1
            if cases[name] > sample.args[0]:
                item.add_marker("heavy")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for marker, needed in (("gpu", 1), ("multigpu", 2)):
        too_few = pytest.mark.skip(reason=f"needs CUDA GPUs: {needed}, there are {gpus}")
        for item in items:
            if gpus < needed and item.get_closest_marker(marker):
                item.add_marker(too_few)


@pytest.fixture
def small_blocks_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Feed-forward blocks are packed from 1,025 rows on, as small as their weights are."""
    from sparse_inductor.kernels.relu_ffn import forward as relu_ffn

    monkeypatch.setattr(relu_ffn, "FEW", 1024)
    monkeypatch.setattr(relu_ffn, "FEW_GATES", 0)


@pytest.fixture
def nothing_recorded() -> Iterator[None]:
    """No call is replayed that was recorded before this test, nor afterwards what it recorded."""
    from sparse_inductor.kernels.common import replay

    replay.forget()
    yield
    replay.forget()


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of 16 documents, so that an index of a test's collection has several."""
    from sparse_inductor.index import segment

    monkeypatch.setattr(segment, "CAPACITY", 16)


@pytest.fixture
def toy() -> Iterator[None]:
    """A pattern of the tests' own."""
    from support import registered
    from toy import Toy

    with registered(Toy()):
        yield


@pytest.fixture
def toys(toy: None) -> Iterator[None]:
    """And another one."""
    from support import registered
    from toy import Toy

    with registered(Toy("other")):
        yield


@pytest.fixture(autouse=True)
def clean_state(clean_dynamo: None) -> None:
    """Every test begins and ends with nothing enabled and nothing compiled."""


@pytest.fixture(autouse=True)
def no_fallbacks() -> Iterator[None]:
    """A kernel that fails is not covered up by what computes its operator instead."""
    from sparse_inductor import layers

    yield
    found = layers.fallbacks()
    layers.forget()
    assert not found, "\n".join(map(str, found))
