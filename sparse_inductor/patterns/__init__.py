"""The pattern files. A wheel holds them here; in a checkout they live in the top-level `patterns/`
folder."""

from pathlib import Path

_root = Path(__file__).resolve().parents[2]
# The project file distinguishes a checkout from a site-packages folder, where `patterns` may belong to
# another package.
if (_root / "pyproject.toml").is_file() and (_root / "patterns").is_dir():
    __path__.append(str(_root / "patterns"))
