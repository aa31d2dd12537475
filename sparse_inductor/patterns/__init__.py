"""The pattern files. A wheel holds them here; in a checkout they live in the top-level `patterns/`
folder."""

from pathlib import Path

_root = Path(__file__).resolve().parents[2]
# The project file tells a checkout from a site-packages folder in which somebody else's `patterns`
# may lie.
if (_root / "pyproject.toml").is_file() and (_root / "patterns").is_dir():
    __path__.append(str(_root / "patterns"))
