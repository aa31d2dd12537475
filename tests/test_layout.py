"""The imports between the package's folders and top-level modules have no cycles."""

from __future__ import annotations

import ast
import graphlib
import pathlib
from collections.abc import Iterator

from sources import PACKAGE, ROOT, source_files

# The subfolders or modules of these folders count separately.
DIVIDED = ("match", "kernels", "policy")


def modules() -> dict[str, pathlib.Path]:
    found = {}
    for file in source_files():
        parts = [*file.relative_to(ROOT).with_suffix("").parts]
        if parts[0] == "patterns":
            parts.insert(0, PACKAGE.name)
        found[".".join(parts).removesuffix(".__init__")] = file
    return found


def folder(module: str) -> str:
    parts = module.split(".")[1:]
    return ".".join(parts[: 2 if parts[:1] and parts[0] in DIVIDED else 1])


def imported(module: str, file: pathlib.Path) -> Iterator[str]:
    """Yield the package's modules that are imported when this one is.

    Imports within functions and for type checking do not count.
    """
    for node in ast.parse(file.read_text()).body:
        if not isinstance(node, ast.ImportFrom):
            continue
        target = node.module or ""
        if node.level:
            parts = module.split(".")
            up = node.level - (file.name == "__init__.py")
            target = ".".join(filter(None, [*parts[: len(parts) - up], target]))
        if target.split(".")[0] == PACKAGE.name:
            yield from (f"{target}.{alias.name}" for alias in node.names)


def order() -> dict[str, set[str]]:
    known = modules()
    found: dict[str, set[str]] = {}
    for module, file in known.items():
        here = found.setdefault(folder(module), set())
        for name in imported(module, file):
            target = name if name in known else name.rpartition(".")[0]
            here |= {folder(target)} - {folder(module)}
    return found


def test_imports_go_one_way():
    found = order()
    assert "graph" in found["match.chains"] and "kernels.common" in found["kernels.relu_ffn"]
    graphlib.TopologicalSorter(found).prepare()


def test_what_is_below_does_not_know_what_is_above():
    found = order()
    for name in graphlib.TopologicalSorter(found).static_order():
        found[name] |= {beyond for target in found[name] for beyond in found[target]}
    above = ("graph", "match", "pattern", "patterns", "reporting")
    recognition = {name for name in found if name.split(".")[0] in above}
    for name, targets in found.items():
        if name.startswith(("kernels", "ops", "index", "epilogue", "compat")):
            assert not targets & recognition, name
        if name.startswith("kernels"):
            assert "ops" not in targets, name
        if name.startswith("graph"):
            assert not any(t.startswith(("match", "patterns")) for t in targets), name
