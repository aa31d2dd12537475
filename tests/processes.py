"""Helpers to run Python in subprocesses, and functions in threads."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent


def python(
    *arguments: Any,
    cwd: Path = ROOT,
    path: Iterable[Path] = (ROOT, TESTS),
    without: Iterable[str] = (),
    check: bool = True,
    timeout: float = 300,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run Python with `path` as PYTHONPATH, with the environment `variables` set and those in `without` removed.

    With `check`, raise if it fails.
    """
    env = {name: value for name, value in os.environ.items() if name not in {*without}}
    env |= {"PYTHONPATH": os.pathsep.join(map(str, path)), **variables}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    assert not check or done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done


@contextlib.contextmanager
def threads(*works: Callable[[], Any]) -> Iterator[None]:
    """Run each function in a thread, beside the block; the threads are joined at its end."""
    running = [threading.Thread(target=work) for work in works]
    for thread in running:
        thread.start()
    try:
        yield
    finally:
        for thread in running:
            thread.join()
