"""Lets sentence-transformers' sparse encoders not return logits that their own callers drop.

The modules of a `SparseEncoder` hand a dict from one to the next, and the logits stay in it: a compiled encoder returns
them, so they have to exist. Yet `SparseEncoder.encode` and `SpladeLoss` take the representation out of that dict and
let go of the rest. While one of them runs, and only then, `SparseEncoder.forward` leaves the logits out of what it
returns and of what it writes into its argument. Called by anybody else it does what it always did.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

PACKAGE = "sentence_transformers.sparse_encoder"
LOGITS, RESULT = "token_embeddings", "sentence_embedding"
# On a model while somebody runs who does not read its logits: a plain attribute, so that Dynamo guards on it.
FLAG = "_logits_are_unread"

Undo = Callable[[], None]


def drop_unread_logits() -> Undo:
    """Teach sentence-transformers, now or once it is imported; the result puts back what was there."""
    undo: list[Undo] = []
    if PACKAGE in sys.modules:
        _teach(sys.modules[PACKAGE], undo)
    else:
        later = _OnImport(lambda module: _teach(module, undo))
        sys.meta_path.insert(0, later)
        undo.append(lambda: sys.meta_path.remove(later) if later in sys.meta_path else None)

    def put_back() -> None:
        while undo:
            undo.pop()()

    return put_back


class _OnImport(importlib.abc.MetaPathFinder):
    """Calls back when the package has been imported; then it is out of the way."""

    def __init__(self, then: Callable[[Any], None]) -> None:
        self._then = then

    def find_spec(
        self, fullname: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != PACKAGE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                self._then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _teach(package: Any, undo: list[Undo]) -> None:
    """Wrap what is there of the three functions; another version may lack one."""
    encoder = getattr(package, "SparseEncoder", None)
    if encoder is None or not hasattr(encoder, "forward") or not hasattr(encoder, "encode"):
        return
    forward, encode = encoder.forward, encoder.encode

    @functools.wraps(forward)
    def without_logits(self: Any, input: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if not getattr(self, FLAG):
            return forward(self, input, *args, **kwargs)
        found = forward(self, dict(input), *args, **kwargs)
        kept = {name: value for name, value in found.items() if name != LOGITS}
        input.update(kept)
        return kept

    @functools.wraps(encode)
    def encode_unread(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _unread(self, without_logits):
            return encode(self, *args, **kwargs)

    _replace(encoder, FLAG, False, undo)
    _replace(encoder, "forward", without_logits, undo)
    _replace(encoder, "encode", encode_unread, undo)
    loss = getattr(getattr(package, "losses", None), "SpladeLoss", None)
    if loss is None:
        return
    compute = loss.forward

    @functools.wraps(compute)
    def compute_unread(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the logits do not leave this graph
            return compute(self, *args, **kwargs)
        with _unread(_inner(self.model), without_logits):
            return compute(self, *args, **kwargs)

    _replace(loss, "forward", compute_unread, undo)


def _replace(owner: Any, name: str, value: Any, undo: list[Undo]) -> None:
    was = vars(owner).get(name)
    setattr(owner, name, value)

    def put_back() -> None:
        if vars(owner).get(name) is not value:
            return  # somebody else has replaced it since
        delattr(owner, name) if was is None else setattr(owner, name, was)

    undo.append(put_back)


def _inner(model: Any) -> Any:
    """What `torch.compile` and data parallelism have been put around."""
    for name in ("_orig_mod", "module", "_orig_mod"):
        model = getattr(model, name, model)
    return model


_lock = threading.Lock()
_running: dict[int, int] = {}


@contextlib.contextmanager
def _unread(model: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Nobody reads the model's logits within, unless a subclass's `forward` or a hook might."""
    hooks = getattr(model, "_forward_hooks", None)
    if getattr(type(model), "forward", None) is not forward or hooks:
        yield
        return
    _count(model, 1)
    try:
        yield
    finally:
        _count(model, -1)


def _count(model: Any, change: int) -> None:
    with _lock:
        many = _running.pop(id(model), 0) + change
        if many:
            _running[id(model)] = many
        setattr(model, FLAG, many > 0)
