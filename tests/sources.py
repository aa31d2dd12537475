"""The package's files, for tests that read them."""

from __future__ import annotations

import pathlib

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "sparse_inductor"


def source_files() -> list[pathlib.Path]:
    return [*sorted(PACKAGE.rglob("*.py")), *sorted((ROOT / "patterns").glob("*.py"))]
