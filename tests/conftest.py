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

# The duration of an example says nothing about the code: kernels run in an interpreter.
hypothesis.settings.register_profile(
    "tests", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("tests")

# Without a GPU, Triton's kernels run in its interpreter. This is set before anything imports triton.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Inductor must not find graphs that were compiled with another version of the operators: the code of operators that
# are called without a session is not part of its cache key.
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="sparse_inductor-")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)
# Most tests are about recognition; `test_policy.py` tests the default policy.
os.environ.setdefault("SPARSE_INDUCTOR_POLICY", "always")
# Dynamo would collect garbage after each compilation, which takes a tenth of the compilation's time.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")
# Trust the vector extensions that the processor reports: a test compilation takes ten seconds for each new cache.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

if os.environ.get("TRITON_INTERPRET") == "1":
    import interpreter

    interpreter.prepare()

pytest_plugins = ["sparse_inductor.pytest_plugin"]

torch.set_num_threads(max(1, min(torch.get_num_threads(), 2)))

# These two would take another tenth of the time. pytest attaches handlers to loggers that do not propagate, and torch
# writes every graph as JSON if its trace logger has a handler. Dynamo flushes the processor's caches to measure the
# time of a frame's guards.
if "TORCH_TRACE" not in os.environ:
    trace = logging.getLogger("torch.__trace")
    trace.propagate = True
    trace.handlers.clear()
guards = importlib.import_module("torch._dynamo.guards")
if hasattr(guards, "profile_guard_manager"):
    guards.profile_guard_manager = lambda *_: 0.0
# Despite TORCHINDUCTOR_VEC_ISA_OK, torch test-compiles the extensions of AVX512.
importlib.import_module("torch._inductor.cpu_vec_isa").VecISA.check_build = lambda *_: True


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exempt the objects that exist after collection from garbage collection, because they live until the end."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # otherwise objects that are freed at exit are reported as leaked


@pytest.hookimpl(tryfirst=True)  # before pytest evaluates -m
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
    """Feed-forward blocks are packed from 1,025 rows on, however small their weights are."""
    from sparse_inductor.kernels.relu_ffn import forward as relu_ffn

    monkeypatch.setattr(relu_ffn, "FEW", 1024)
    monkeypatch.setattr(relu_ffn, "FEW_GATES", 0)


@pytest.fixture
def nothing_recorded() -> Iterator[None]:
    """Recorded calls are dropped before and after the test, so that none is replayed in another test."""
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
    """Registers a pattern that exists only for tests."""
    from support import registered
    from toy import Toy

    with registered(Toy()):
        yield


@pytest.fixture
def toys(toy: None) -> Iterator[None]:
    """Registers the pattern of `toy` and a second one, named "other"."""
    from support import registered
    from toy import Toy

    with registered(Toy("other")):
        yield


@pytest.fixture(autouse=True)
def clean_state(clean_dynamo: None) -> None:
    """Every test begins and ends with nothing enabled and nothing compiled."""


@pytest.fixture(autouse=True)
def no_fallbacks() -> Iterator[None]:
    """Fails a test in which a kernel failed and its operator fell back to another implementation."""
    from sparse_inductor import layers

    yield
    found = layers.fallbacks()
    layers.forget()
    assert not found, "\n".join(map(str, found))
