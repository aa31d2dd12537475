"""What Inductor's caches must know of this package: a hash of all that shapes a rewritten graph."""

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
    """Hash of the package's files, `patterns/` among them.

    Computed once: what this process runs is what it imported, even if a file is edited afterwards.
    """
    from . import patterns

    root = Path(__file__).parent
    folders = [root, *(Path(p) for p in patterns.__path__ if not Path(p).is_relative_to(root))]
    return _hash_files(file for folder in folders for file in _sources(folder))


def fingerprint(patterns: Iterable[Pattern]) -> str | None:
    """Hash of the package, the enabled patterns and the environment's switches.

    None when the source of a pattern cannot be found: then nothing would tell an old cache entry
    from a new one, and Inductor must not cache.
    """
    parts = [__version__, package_hash()]
    for pattern in sorted(patterns, key=lambda p: p.name):
        parts.append(pattern.name)
        # A pattern that is made of functions (`Template`) is what they are.
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
    # A package's pattern leans on the modules beside it; a lone script's folder may hold anything.
    in_package = bool(getattr(sys.modules[module], "__package__", ""))
    return _hash_files(sorted(path.parent.glob("*.py")) if in_package else [path])


def _sources(folder: Path) -> list[Path]:
    return sorted(f for f in folder.rglob("*") if f.suffix in SUFFIXES and f.is_file())


def _hash_files(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        # The name counts, not the folder: the same package installed elsewhere shares its cache
        # entries.
        digest.update(file.name.encode() + b"\0")
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()
