"""The command line: `python -m sparse_inductor demo | doctor | patterns | explain`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# torch is imported by the commands: --help and a mistyped command answer at once.


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    given = sys.argv[1:] if argv is None else list(argv)
    options, rest = _parser().parse_known_args(given)
    if rest and options.command != "demo":
        _parser().parse_args(given)  # says what it does not know
    options.rest = given[1:]
    return options.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sparse_inductor", description="What sparse_inductor knows and does."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[Any], int], about: str, add_help: bool = True
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=about, description=about, add_help=add_help)
        added.set_defaults(run=run)
        return added

    about = "train and encode with a SPLADE model, unrewritten and rewritten"
    command("demo", _demo, about, add_help=False)  # its options are its own

    doctor = command("doctor", _doctor, "what this machine can do, and what to change on it")
    doctor.add_argument(
        "--quick", action="store_true", help="leave out the run of every operator (a second each)"
    )

    command("patterns", _patterns, "list the patterns")

    explained = command(
        "explain", _explain, "show what would be rewritten in a function, and why not more"
    )
    explained.add_argument(
        "target",
        metavar="package.module:name",
        help="a function without arguments, or a factory of a function or (function, arguments)",
    )
    explained.add_argument("--html", metavar="FILE", type=Path, help="also write a page to FILE")
    explained.add_argument("--json", action="store_true", help="print the report as JSON instead")
    explained.add_argument(
        "--verify", action="store_true", help="run every rewrite beside the operations it replaces"
    )
    return parser


def _demo(options: argparse.Namespace) -> int:
    try:
        from benchmarks.demo.__main__ import main as demo
    except ModuleNotFoundError:
        print(
            "the demo is in the source tree, not in the installed package: run it in a clone, "
            "`make demo` or `python -m sparse_inductor demo`",
            file=sys.stderr,
        )
        return 2
    return demo(options.rest) or 0


def _doctor(options: argparse.Namespace) -> int:
    from . import doctor

    return doctor.show(doctor.diagnose(operators=not options.quick))


def _patterns(options: argparse.Namespace) -> int:
    from .console import print_table
    from .pattern import registered

    rows = [(p.name, p.op, p.summary) for p in registered().values()]
    print_table(("pattern", "operator", "rewrites"), rows)
    return 0


def _explain(options: argparse.Namespace) -> int:
    try:
        fn, args = load(options.target)
    except (ImportError, AttributeError, ValueError) as error:
        print(f"cannot load {options.target}: {error}", file=sys.stderr)
        return 2
    from .explanation import explain

    explanation = explain(fn, *args, verify=options.verify)
    if options.json:
        print(explanation.report.to_json())
    else:
        explanation.show()
    if options.html is not None:
        options.html.write_text(explanation.to_html(options.target), encoding="utf-8")
        print(f"written: {options.html}", file=sys.stderr)
    return 0


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
    from torch import nn

    if isinstance(named, nn.Module):
        return named, ()
    made = named()
    if isinstance(made, tuple) and len(made) == 2 and callable(made[0]):
        return made[0], tuple(made[1])
    return (made, ()) if callable(made) else (named, ())


if __name__ == "__main__":
    sys.exit(main())
