"""Programs: a program is a list of steps from which its source text is printed."""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import linecache
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import vocabulary

__all__ = ["Input", "Program", "Step", "make_values"]

STAGES = ("graph", "aot", "codegen")
"""How far a program is compiled. "graph": Dynamo's rewritten graph is run as it is, with eager's autograd. "aot":
AOTAutograd and Inductor's passes follow, and ATen runs the result. "codegen": Inductor's generated code runs."""

_DOCUMENTED = {
    re.compile(r"\b(\w+) \* \(\1 > ([\d.]+)\)"): r"above_minus_infinity(\1) * (\1 > \2)",
    re.compile(
        r"\b(\w+) \+ \1\.abs\(\)"
    ): r"2.0 * torch.maximum(\1, torch.zeros((), dtype=\1.dtype))",
    re.compile(r"\((\w+) > 0\)\."): r"((\1 > 0) | \1.isnan()).",
    re.compile(r"\bentmax_bisect\((?=\w+, alpha)"): "softmax_at_one(",
    re.compile(r"\bentmax_bisect\((\w+), 2\.0"): r"sparsemax(\1",
}

Size = int | str
"""A number, or the name of one in `Program.sizes`."""


@dataclasses.dataclass(frozen=True)
class Input:
    """A tensor that the program is called with; `values` is a key of `VALUES`."""

    name: str
    shape: tuple[Size, ...]
    values: str = "normal"
    dtype: torch.dtype = torch.float32
    grad: bool = False


@dataclasses.dataclass(frozen=True)
class Step:
    """One assignment, or a statement run for what it writes.

    instead: the name that replaces the result in a smaller program without this step. within: the expression of a
    context manager around it. part: the region that it belongs to, such as "checkpoint 1"; the adjacent steps of a
    region are printed as one function, which the function of `vocabulary` with that name calls. hazard: the kind of
    hazard that this step is.
    """

    text: str
    instead: str | None = None
    within: str | None = None
    part: str | None = None
    hazard: str | None = None

    @functools.cached_property
    def stores(self) -> tuple[str, ...]:
        return _names(self.text, ast.Store)

    @functools.cached_property
    def loads(self) -> tuple[str, ...]:
        return _names(self.text, ast.Load)

    def renamed(self, old: str, new: str) -> Step:
        tree = ast.parse(self.text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id == old:
                node.id = new
        return dataclasses.replace(
            self, text=ast.unparse(tree), instead=new if self.instead == old else self.instead
        )


@dataclasses.dataclass(frozen=True)
class Program:
    """A random program, its inputs, and how it is compiled and called.

    sizes: one mapping of names to numbers for each call of the compiled program. exact: all arithmetic is exact, so
    results have to be equal. stage: how far it is compiled, one of `STAGES`. module: its weights are parameters of a
    module. families: the patterns whose blocks it has.
    """

    seed: int
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    returns: tuple[str, ...]
    sizes: tuple[Mapping[str, int], ...] = ({},)
    training: bool = False
    dynamic: bool | None = None
    autocast: bool = False
    exact: bool = False
    stage: str = STAGES[0]
    module: bool = False
    families: tuple[str, ...] = ()

    @property
    def hazards(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(s.hazard for s in self.steps if s.hazard))

    def documented(self) -> Program:
        """Return the program with the documented deviations of a rewrite.

        x * (x > t) is 0 at -inf, x + |x| is 2 max(x, 0), NaNs count, a tensor alpha of 1 gives softmax, and for an
        alpha of 2 values that are not finite get the gradient of sparsemax.
        """
        steps = self.steps
        for spelled, meant in _DOCUMENTED.items():
            texts = [spelled.sub(meant, s.text) for s in steps]
            steps = tuple(dataclasses.replace(s, text=text) for s, text in zip(steps, texts))
        return self if steps == self.steps else dataclasses.replace(self, steps=steps)

    def source(self, name: str = "program") -> str:
        """Return the source text of the function."""
        lines = [f"def {name}({', '.join(i.name for i in self.inputs)}):"]
        later = [
            {n for s in self.steps[at + 1 :] for n in s.loads} for at in range(len(self.steps))
        ]
        known = {i.name for i in self.inputs}
        at = 0
        for part, steps in itertools.groupby(self.steps, key=lambda s: s.part):
            group = list(steps)
            at += len(group)
            stored = list(dict.fromkeys(n for s in group for n in s.stores))
            if part is None:
                lines += _body(group, 1)
            else:
                kind, number = part.split()
                read, made = [], set()
                for s in group:
                    read += [n for n in s.loads if n in known and n not in made]
                    made |= set(s.stores)
                arguments = list(dict.fromkeys(read))
                wanted = later[at - 1] | set(self.returns)
                results = [n for n in stored if n in wanted] or stored[-1:]
                lines.append(f"    def {kind}_{number}({', '.join(arguments)}):")
                lines += _body(group, 2)
                lines.append(f"        return {', '.join(results) or 'None'}")
                call = f"{kind}({kind}_{number}, {', '.join(arguments)})"
                lines.append(f"    {', '.join(results) + ' = ' if results else ''}{call}")
            known |= set(stored)
        lines.append(f"    return {', '.join(self.returns)}{',' if len(self.returns) == 1 else ''}")
        return "\n".join(lines) + "\n"

    def text(self) -> str:
        """Return the text of a test: the seed, the arguments of the program, and the function."""
        fields = [f"seed={self.seed}"]
        fields += [f"sizes={tuple(dict(s) for s in self.sizes)}"] if self.sizes != ({},) else []
        fields += [f"stage={self.stage!r}"] if self.stage != STAGES[0] else []
        for field in ("training", "dynamic", "autocast", "exact", "module"):
            if (value := getattr(self, field)) not in (False, None):
                fields.append(f"{field}={value}")
        lines = ["@kept(", f"    {', '.join(fields)},"]
        for i in self.inputs:
            what = [repr(i.shape), repr(i.values)]
            what += [f"dtype={i.dtype}"] if i.dtype != torch.float32 else []
            what += ["grad=True"] if i.grad else []
            lines.append(f"    {i.name}=tensor({', '.join(what)}),")
        return "\n".join([*lines, ")", self.source(f"program_{self.seed}")])

    def function(self, branching: bool = True) -> Callable[..., Any]:
        """Compile the text and return the function. Its source is available to Dynamo and tracebacks.

        branching: whether to branch by `torch.cond`, which does not work under a dispatch mode.
        """
        text = self.source()
        if not branching:
            text = text.replace("torch.cond(", "either(").replace(" branch(", " directly(")
        file = f"<fuzz {self.seed} {next(_numbers)}>"
        linecache.cache[file] = (len(text), None, text.splitlines(True), file)
        names = dict(vars(vocabulary))
        exec(compile(text, file, "exec"), names)
        return names["program"]

    @property
    def weights(self) -> list[int]:
        """The indices of the arguments that are parameters of the module."""
        named = [
            at
            for at, i in enumerate(self.inputs)
            if i.name.startswith("w") and i.dtype.is_floating_point
        ]
        return named if self.module else []

    def arguments(self, call: int = 0) -> list[Tensor]:
        """Make the arguments of the `call`-th call."""
        generator = torch.Generator().manual_seed(self.seed * 7 + call)
        return [make_values(i, self.sizes[call], generator) for i in self.inputs]


_numbers = itertools.count()


def _body(steps: Iterable[Step], depth: int) -> list[str]:
    lines = []
    for within, group in itertools.groupby(steps, key=lambda s: s.within):
        inner = depth
        if within is not None:
            lines.append(f"{'    ' * depth}with {within}:")
            inner += 1
        lines += [f"{'    ' * inner}{line}" for s in group for line in s.text.splitlines()]
    return lines


@functools.lru_cache(maxsize=65536)
def _names(text: str, kind: type) -> tuple[str, ...]:
    tree = list(ast.walk(ast.parse(text)))
    found = [n.id for n in tree if isinstance(n, ast.Name) and type(n.ctx) is kind]
    if kind is ast.Load:  # x += y reads x
        found += [
            n.target.id
            for n in tree
            if isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name)
        ]
    return tuple(dict.fromkeys(found))


# --- Values -----------------------------------------------------------------------------------------


def make_values(of: Input, sizes: Mapping[str, int], generator: torch.Generator) -> Tensor:
    shape = tuple(sizes[s] if isinstance(s, str) else s for s in of.shape)
    value = VALUES[of.values.split(":")[0]](shape, generator, *of.values.split(":")[1:])
    value = (
        value if not of.dtype.is_floating_point and value.dtype == of.dtype else value.to(of.dtype)
    )
    return value.requires_grad_(of.grad)


Make = Callable[..., Tensor]


def _normal(shape: Sequence[int], g: torch.Generator, scale: str = "1") -> Tensor:
    return torch.randn(shape, generator=g) * float(scale)


def _weight(shape: Sequence[int], g: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=g) / max(1, shape[-1]) ** 0.5


def _integers(shape: Sequence[int], g: torch.Generator) -> Tensor:
    return torch.randint(-2, 3, shape, generator=g).float()


def _spoiled(value: float) -> Make:
    def make(shape: Sequence[int], g: torch.Generator) -> Tensor:
        x = torch.randn(shape, generator=g)
        if x.numel():
            x.view(-1)[int(torch.randint(x.numel(), (), generator=g))] = value
        return x

    return make


def _repeated(shape: Sequence[int], g: torch.Generator) -> Tensor:
    """Make rows of which the first and the last are equal."""
    x = torch.randn(shape, generator=g)
    if x.dim() > 1 and x.shape[-2] > 1:
        x[..., -1, :] = x[..., 0, :]
    return x


def _mask(shape: Sequence[int], g: torch.Generator, kind: str = "padding") -> Tensor:
    m = torch.ones(shape)
    if kind in ("random", "one"):
        m = (torch.rand(shape, generator=g) < 0.7).float()
        if kind == "one" and m.numel():  # keep at least one element of each row and column
            m[..., 0] = m[:, 0] = 1
        return m
    if kind == "weights":
        return torch.rand(shape, generator=g)
    if kind == "signed":
        return torch.randn(shape, generator=g)
    if m.numel():
        m[-1, m.shape[-1] // 2 :] = 0
        if kind == "empty":
            m[0] = 0
    return m


def _sparse(shape: Sequence[int], g: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=g) * (torch.rand(shape, generator=g) < 0.6)


VALUES: dict[str, Make] = {
    "normal": _normal,
    "weight": _weight,
    "integers": _integers,
    "zeros": lambda shape, g: torch.zeros(shape),
    "nan": _spoiled(float("nan")),
    "infinite": _spoiled(float("inf")),
    "huge": _spoiled(1e30),
    "repeated": _repeated,
    "mask": _mask,
    "sparse": _sparse,
    "ids": lambda shape, g, n: torch.randint(0, int(n), shape, generator=g),
    "sorted": lambda shape, g, n: torch.randint(0, int(n), shape, generator=g).sort()[0],
    "alpha": lambda shape, g: 1.1 + 0.8 * torch.rand(shape, generator=g),
}
