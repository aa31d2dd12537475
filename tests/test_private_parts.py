"""Only `sparse_inductor/compat` uses private parts of torch and Triton, and these uses are documented."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

import pytest

from sources import PACKAGE, ROOT, source_files

FILES = [path for path in source_files() if PACKAGE / "compat" not in path.parents]

LIBRARIES = ("torch", "triton", "functorch")
# These modules have no public name, but are documented for use outside of torch.
DOCUMENTED = ("torch.utils._pytree", "torch.utils._python_dispatch")
# Names of operators belong to ATen's schemas.
OPERATORS = "torch.ops."
# This method of named tuples is public.
PUBLIC = {"_asdict", "_replace"}


def is_private(name: str) -> bool:
    parts = name.split(".")
    return any(part.startswith("_") and not part.startswith("__") for part in parts)


def own_names(trees: list[ast.Module]) -> set[str]:
    """Return the names that the package itself defines: functions, classes, variables, assigned attributes."""
    names: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def dotted(node: ast.AST) -> str | None:
    """Return an attribute chain as `a.b.c`, or None if it does not begin with a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def private_parts(tree: ast.Module, own: set[str]) -> Iterator[tuple[int, str]]:
    """Yield lines and names of private parts: imports, attributes of imported names, and attributes that the package
    does not define."""
    imported: dict[str, str] = {}

    def reaches(name: str) -> bool:
        if name.split(".")[0] not in LIBRARIES or name.startswith((*DOCUMENTED, OPERATORS)):
            return False
        return is_private(name)

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for a in node.names:
                imported[a.asname or a.name.split(".")[0]] = (
                    a.name if a.asname else a.name.split(".")[0]
                )
                if reaches(a.name):
                    yield node.lineno, a.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for a in node.names:
                name = imported[a.asname or a.name] = f"{node.module}.{a.name}"
                if reaches(name):
                    yield node.lineno, name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            attribute, chain = node.attr, dotted(node) or ""
        elif isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "hasattr"):
            given = node.args[1] if len(node.args) > 1 else None
            if not isinstance(given, ast.Constant) or not isinstance(given.value, str):
                continue
            attribute, chain = given.value, ""
        else:
            continue
        root, _, rest = chain.partition(".")
        name = f"{imported.get(root, '')}.{rest}"
        known = attribute in own or attribute in PUBLIC or name.startswith((*DOCUMENTED, OPERATORS))
        if reaches(name) or (is_private(attribute) and not known):
            yield node.lineno, chain or attribute


TREES = {path: ast.parse(path.read_text()) for path in FILES}
OWN = own_names(list(TREES.values()))


def test_private_parts_are_reached_into_in_one_folder():
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path, tree in TREES.items()
        for line, name in private_parts(tree, OWN)
    ]
    assert len(FILES) > 150 and not found


@pytest.mark.parametrize(
    "program",
    [
        "import torch._dynamo",
        "from torch._inductor import config",
        "from torch import _C",
        "def f():\n    from torch._C import _x as y",
        "import torch\ntorch._ops.OpOverload",
        "from torch import fx as g\ng._symbolic_trace",
        "import triton\ntriton.runtime._x.y",
        "def f(op): return op._schema",
        "def f(t): return t.untyped_storage()._cdata",
        "def f(kernel): return getattr(kernel, '_init_handles', None)",
    ],
)
def test_every_way_to_reach_is_seen(program):
    assert list(private_parts(ast.parse(program), OWN))


@pytest.mark.parametrize(
    "program",
    [
        "import torch.utils._pytree as pytree\npytree._register",
        "from torch.utils._python_dispatch import TorchDispatchMode",
        "import torch\ntorch.ops.aten._to_copy",
        "import torch\ntorch.Tensor.__add__",
        "def f(self): self._mine = 1\ndef g(other): return other._mine",
    ],
)
def test_what_is_no_private_part(program):
    tree = ast.parse(program)
    assert not list(private_parts(tree, own_names([tree])))


def public_names(path: pathlib.Path) -> list[str]:
    tree = ast.parse(path.read_text())
    found = [
        node.name
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
    ]
    constants = [t for node in tree.body if isinstance(node, ast.Assign) for t in node.targets]
    return found + [t.id for t in constants if isinstance(t, ast.Name) and t.id[0].isupper()]


def test_every_place_is_documented():
    text = (ROOT / "docs" / "compatibility.md").read_text()
    rows = [row for row in text.splitlines() if row.startswith("| `compat/")]
    for path in (PACKAGE / "compat").glob("[!_]*.py"):
        here = " ".join(row for row in rows if f"`compat/{path.name}`" in row)
        assert here, path.name
        missing = [name for name in public_names(path) if f"`{name}`" not in here]
        assert not missing or missing == ["LaunchSeen"], (path.name, missing)
