"""pytest plugin: markers, fixtures and one option for tests of patterns and operators.

Installed with the package (entry-point group `pytest11`); from a source tree, use `-p sparse_inductor.pytest_plugin`.
It does not affect tests that do not use it, and imports torch only for those that do.

Markers
    needs_gpu           skipped where there is no CUDA GPU
    breaks_pattern      the test makes a pattern raise, which fails any other test that uses `clean_dynamo`

Fixtures
    clean_dynamo        no session, an empty report, no compiled code and no switched-off pattern, before and after
    nan_filled_memory   `torch.empty` holds NaN, which makes unwritten outputs visible
    triton_device       the device to run kernels on, once in Triton's interpreter and once on a GPU; the variant that
                        this process cannot run is skipped, with the reason

Option
    --triton-interpret  run Triton kernels in the interpreter (a process uses either the interpreter or the GPU)
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

INTERPRET = "TRITON_INTERPRET"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sparse_inductor")
    group.addoption(
        "--triton-interpret",
        action="store_true",
        help="run Triton kernels in the interpreter, on the CPU",
    )


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    # Triton reads the variable when it is imported, which a conftest may do.
    if getattr(early_config.known_args_namespace, "triton_interpret", False):
        os.environ[INTERPRET] = "1"


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("triton_interpret"):
        os.environ[INTERPRET] = "1"
    config.addinivalue_line("markers", "needs_gpu: skipped where there is no CUDA GPU")
    config.addinivalue_line(
        "markers",
        "breaks_pattern: a pattern is made to raise, which fails any other test that uses clean_dynamo",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("needs_gpu") and (reason := _no_gpu()):
        pytest.skip(reason)


@pytest.fixture
def clean_dynamo(request: pytest.FixtureRequest) -> Iterator[None]:
    """No session, an empty report and no compiled code, before and after; fails if a pattern has raised."""
    _reset()
    yield
    raised = list(getattr(sys.modules.get("sparse_inductor.rewrite"), "failures", ()))
    _reset()
    if raised and not request.node.get_closest_marker("breaks_pattern"):
        pytest.fail(f"patterns raised: {raised}")


def _reset() -> None:
    # Only imported modules can hold state.
    if session := sys.modules.get("sparse_inductor.session"):
        with contextlib.suppress(session.StrictError):  # irrelevant, the test has ended
            session.disable()
    if rewrite := sys.modules.get("sparse_inductor.rewrite"):
        rewrite.failures.clear()
    if records := sys.modules.get("sparse_inductor.reporting.records"):
        records.report().clear()
    if "torch._dynamo" in sys.modules:
        from sparse_inductor import compat

        compat.reset_dynamo()


@pytest.fixture
def nan_filled_memory() -> Iterator[None]:
    """Fill `torch.empty` with NaN (integers: their largest value), which makes unwritten outputs visible."""
    import torch

    deterministic = torch.utils.deterministic
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        deterministic.fill_uninitialized_memory,
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        deterministic.fill_uninitialized_memory = before[2]


@pytest.fixture(params=["interpreter", "gpu"])
def triton_device(request: pytest.FixtureRequest) -> Any:
    """Yield the `torch.device` for kernels in the interpreter, then the one for kernels on a GPU."""
    import torch

    interprets = os.environ.get(INTERPRET) == "1"
    if request.param == "interpreter":
        if not interprets:
            pytest.skip(f"Triton's interpreter is off: --triton-interpret or {INTERPRET}=1")
        return torch.device("cpu")
    if interprets:
        pytest.skip("Triton's interpreter is on, so kernels do not run on a GPU")
    if reason := _no_gpu():
        pytest.skip(reason)
    return torch.device("cuda")


def _no_gpu() -> str:
    import torch

    return "" if torch.cuda.is_available() else "no CUDA GPU"
