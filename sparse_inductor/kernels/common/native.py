"""Libraries in C and C++, compiled once on the user's machine by the compilers that Triton (for C) and torch.compile on
a CPU (for C++) require."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

# By suffix: (environment variable that names the compiler, language standard, compilers to look for).
_COMPILERS = {
    ".c": ("CC", "gnu11", "gcc", "clang"),
    ".cpp": ("CXX", "c++17", "g++", "clang++"),
}


def compiled(source: Path, *flags: str, depends_on: str = "") -> ctypes.CDLL:
    """Compile a source file and load the library. depends_on: anything else that the compiled code depends on.

    Raises OSError or subprocess.SubprocessError if there is no compiler or no writable folder.
    """
    command, library = _library_of(source, flags, depends_on)
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / library.name
            whole = [*command, str(source), "-o", str(made)]
            subprocess.run(whole, check=True, capture_output=True, timeout=300)
            made.replace(library)
    return ctypes.CDLL(str(library))


def is_compiled(source: Path, *flags: str, depends_on: str = "") -> bool:
    """Whether the library exists on this machine."""
    try:
        return _library_of(source, flags, depends_on)[1].exists()
    except OSError:
        return False


def _library_of(source: Path, flags: Sequence[str], depends_on: str) -> tuple[list[str], Path]:
    """Return (the compiler's command without the files, path of the library)."""
    variable, standard, *names = _COMPILERS[source.suffix]
    compiler = os.environ.get(variable) or next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        raise FileNotFoundError(f"there is no compiler of {source.suffix} files: set {variable}")
    command = [compiler, f"-std={standard}", "-shared", "-fPIC", *flags]
    what = [*command, depends_on, source.read_text()]
    name = hashlib.sha256("\0".join(what).encode()).hexdigest()[:32]
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return command, Path(base) / "sparse_inductor" / f"{name}.so"
