"""C++ that is compiled on the machine that runs it, once, by the compiler that torch.compile and Triton need."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

__all__ = ["compiled"]


def compiled(source: Path, *flags: str, depends_on: str = "") -> ctypes.CDLL:
    """The library of a source file; depends_on: what else its code depends on.

    Raises OSError or subprocess.SubprocessError where there is no compiler or no folder to write to.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise FileNotFoundError("there is no C++ compiler: set CXX")
    command = [compiler, "-std=c++17", "-shared", "-fPIC", *flags]
    what = [*command, depends_on, source.read_text()]
    name = hashlib.sha256("\0".join(what).encode()).hexdigest()[:32]
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    library = Path(base) / "sparse_inductor" / f"{name}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / library.name
            whole = [*command, str(source), "-o", str(made)]
            subprocess.run(whole, check=True, capture_output=True, timeout=300)
            made.replace(library)
    return ctypes.CDLL(str(library))
