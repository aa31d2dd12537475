"""A hash of everything in this package that affects a rewritten graph, for the keys of Inductor's caches."""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import __version__
from .pattern import Pattern

# Tuned tables and kernel sources decide what runs as much as the Python files do.
SUFFIXES = frozenset({".py", ".json", ".cu", ".cpp", ".h"})


@functools.cache
def package_hash() -> str:
    """Hash of the package's files, including `patterns/`.

    Computed once, because this process runs the code that it imported, even if a file is edited later.
    """
    from . import patterns

    root = Path(__file__).parent
    folders = [root, *(Path(p) for p in patterns.__path__ if not Path(p).is_relative_to(root))]
    return _hash_files(file for folder in folders for file in _sources(folder))


def fingerprint(patterns: Iterable[Pattern]) -> str | None:
    """Hash of the package, the enabled patterns and the environment's switches.

    None if the source of a pattern cannot be found: outdated cache entries could then not be
    recognised, so Inductor must not cache.
    """
    parts = [__version__, package_hash()]
    for pattern in sorted(patterns, key=lambda p: p.name):
        parts.append(pattern.name)
        # The functions of a `Template` define it.
        for part in (type(pattern), *getattr(pattern, "functions", ())):
            source = _source_hash(part)
            if source is None:
                return None
            parts.append(source)
    parts += [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("SPARSE_INDUCTOR_")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@functools.cache
def _source_hash(kind: Any) -> str | None:
    module = getattr(kind, "__module__", None)
    if module is None:  # a functools.partial
        return None
    if module.split(".")[0] == __package__:
        return ""  # part of the package's own hash
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or not os.path.isfile(file):  # a notebook cell
        try:
            return hashlib.sha256(inspect.getsource(kind).encode()).hexdigest()
        except (OSError, TypeError):
            return None
    path = Path(file)
    # A pattern in a package may use its other modules; the folder of a script may hold unrelated files.
    in_package = bool(getattr(sys.modules[module], "__package__", ""))
    return _hash_files(sorted(path.parent.glob("*.py")) if in_package else [path])


def _sources(folder: Path) -> list[Path]:
    return sorted(f for f in folder.rglob("*") if f.suffix in SUFFIXES and f.is_file())


def _hash_files(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        # Hash the name without the folder: the same package installed elsewhere shares its cache entries.
        digest.update(file.name.encode() + b"\0")
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()
