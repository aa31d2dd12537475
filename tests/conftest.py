"""Fixtures and defaults of all tests."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator

import pytest
import torch

# Before anything imports triton: without a GPU its kernels run in the interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Compiled graphs of another version of the operators must not be found: called without a session, they are not
# part of Inductor's cache key.
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="sparse_inductor-")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)

torch.set_num_threads(max(1, min(torch.get_num_threads(), 2)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    no_gpu = pytest.mark.skip(reason="no CUDA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(no_gpu)


@pytest.fixture(autouse=True)
def clean_state(request: pytest.FixtureRequest) -> Iterator[None]:
    """No session, an empty report and no compiled code before and after; no pattern raised
    unnoticed."""
    _reset()
    yield
    broken = dict(getattr(sys.modules.get("sparse_inductor.rewrite"), "broken", {}))
    _reset()
    if broken and not request.node.get_closest_marker("breaks_pattern"):
        pytest.fail(f"patterns raised and were switched off: {broken}")


def _reset() -> None:
    if session := sys.modules.get("sparse_inductor.session"):
        try:
            session.disable()
        except session.StrictError:
            pass
    if rewrite := sys.modules.get("sparse_inductor.rewrite"):
        rewrite.broken.clear()
    if records := sys.modules.get("sparse_inductor.records"):
        records.report().clear()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture
def nan_filled_memory() -> Iterator[None]:
    """`torch.empty` holds NaN, so that an output nobody wrote shows."""
    was_on, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = filled
