"""The command line: `python -m sparse_inductor patterns`, `python -m sparse_inductor explain mod:fn`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from .explanation import explain
from .pattern import registered


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m sparse_inductor", description="What sparse_inductor knows and does."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("patterns", help="list the patterns")
    explained = commands.add_parser(
        "explain", help="show what would be rewritten in a function, and why not more"
    )
    explained.add_argument(
        "target",
        metavar="package.module:name",
        help="a function without arguments, or a factory of a function or (function, arguments)",
    )
    options = parser.parse_args(argv)
    if options.command == "patterns":
        print(patterns_table())
        return 0
    try:
        fn, args = load(options.target)
    except (ImportError, AttributeError, ValueError) as error:
        print(f"cannot load {options.target}: {error}", file=sys.stderr)
        return 2
    print(explain(fn, *args))
    return 0


def patterns_table() -> str:
    """Name, operator and summary of each pattern."""
    rows = [
        ("pattern", "operator", "rewrites"),
        *((p.name, p.op, p.summary) for p in registered().values()),
    ]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"{name:<{first}}  {op:<{second}}  {summary}" for name, op, summary in rows)


def load(target: str) -> tuple[Any, tuple[Any, ...]]:
    """The function and arguments that `package.module:name` names.

    A factory is called; it returns the function or module to compile, alone or with its arguments
    as `(function, arguments)`. Anything else that it returns means that it is the function itself.
    Raises ValueError, ImportError or AttributeError when there is no such thing.
    """
    module_name, separator, name = target.partition(":")
    if not separator or not name:
        raise ValueError("write it as package.module:name")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    named: Any = importlib.import_module(module_name)
    for part in name.split("."):
        named = getattr(named, part)
    if isinstance(named, tuple) and len(named) == 2 and callable(named[0]):
        return named[0], tuple(named[1])
    if not callable(named):
        raise ValueError(f"{name} is {type(named).__name__}, not a function")
    if isinstance(named, torch.nn.Module):
        return named, ()
    made = named()
    if isinstance(made, tuple) and len(made) == 2 and callable(made[0]):
        return made[0], tuple(made[1])
    return (made, ()) if callable(made) else (named, ())


if __name__ == "__main__":
    sys.exit(main())
