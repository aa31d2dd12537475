"""Threads for work that one ATen call does serially, and for a process that was forked.

A forked child has none of its parent's threads, so it has to create executors again. In the thread that called fork,
OpenMP assumes that the thread still has its team, and a parallel loop of ATen waits forever. A new thread gets a new
team.
"""

from __future__ import annotations

import contextvars
import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_forked = False


def in_a_forked_child(work: Callable[[], None]) -> Callable[[], None]:
    """Make each process that is forked from this one run `work`, where the system supports forking."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=work)
    return work


@in_a_forked_child
def _in_child() -> None:
    global _forked
    _forked = True
    _pool.cache_clear()


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="sparse_index")


def workers() -> ThreadPoolExecutor:
    """Return an executor with as many threads as torch uses."""
    return _pool(torch.get_num_threads())


def apart(work: Callable[..., T]) -> Callable[..., T]:
    """Make `work` run in a new thread if it is called in the main thread of a forked process.

    Grad and inference mode are those of the caller.
    """

    @functools.wraps(work)
    def run(*args: Any, **kwargs: Any) -> T:
        if torch.compiler.is_compiling() or not _forked:
            return work(*args, **kwargs)
        if threading.current_thread() is not threading.main_thread():
            return work(*args, **kwargs)
        inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

        def in_thread() -> T:
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                return work(*args, **kwargs)

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(contextvars.copy_context().run, in_thread).result()

    return run
