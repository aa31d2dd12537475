"""The command line: `sparse-inductor COMMAND`, or `python -m sparse_inductor COMMAND`.

The exit status is 0 on success, 1 if a check failed (doctor, verify) or there was nothing to check (verify), and 2 if
the arguments are wrong or the target cannot be loaded or run.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import __version__

# Only the commands import torch, so that --help and a mistyped command respond at once.


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    given = sys.argv[1:] if argv is None else list(argv)
    options, rest = _parser().parse_known_args(given)
    if rest and options.command != "demo":
        _parser().parse_args(given)  # reports the unknown arguments
    options.rest = given[1:]
    return options.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sparse-inductor", description="Show and check what sparse_inductor rewrites."
    )
    parser.add_argument("--version", action="version", version=f"sparse_inductor {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[Any], int], about: str, add_help: bool = True
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=about, description=about, add_help=add_help)
        added.set_defaults(run=run)
        return added

    def as_json(added: argparse.ArgumentParser) -> None:
        added.add_argument("--json", action="store_true", help="print JSON instead")

    def on_target(added: argparse.ArgumentParser) -> None:
        added.add_argument(
            "target",
            metavar="package.module:name",
            help="a function without arguments, or one that returns `model, *arguments` or `model, {name: argument}`",
        )
        as_json(added)

    about = "train and encode with a SPLADE model, unrewritten and rewritten"
    command("demo", _demo, about, add_help=False)  # it parses its own options

    doctor = command("doctor", _doctor, "say what this machine can do, and what to change on it")
    doctor.add_argument(
        "--quick", action="store_true", help="leave out the run of every operator (a second each)"
    )

    as_json(doctor)

    as_json(command("patterns", _patterns, "list the patterns"))

    explained = command(
        "explain", _explain, "show what would be rewritten in a function, and why not more"
    )
    on_target(explained)
    explained.add_argument("--html", metavar="FILE", type=Path, help="also write a page to FILE")
    explained.add_argument(
        "--verify",
        action="store_true",
        help="run every rewrite beside the operations that it replaces",
    )
    about = (
        "run every rewrite beside the operations that it replaces; the exit status is 1 if one differs, or if nothing "
        "was rewritten"
    )
    verified = command("verify", _verify, about)
    on_target(verified)
    for added, default in ((explained, "auto"), (verified, "always")):
        added.add_argument(
            "--policy",
            choices=("auto", "always", "never"),
            help="which recognised blocks are rewritten: SPARSE_INDUCTOR_POLICY where it is set, else "
            f'"{default}"',
        )

    index = command("index", _index, "say what a saved SparseIndex holds")
    index.add_argument("file", metavar="FILE", type=Path)
    as_json(index)
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

    findings = doctor.diagnose(operators=not options.quick)
    if not options.json:
        return doctor.show(findings)
    print(json.dumps([dataclasses.asdict(f) for f in findings], indent=2))
    return doctor.status(findings)


def _patterns(options: argparse.Namespace) -> int:
    from .pattern import registered
    from .reporting.console import print_table

    heads = ("pattern", "operator", "rewrites")
    rows = [(p.name, p.op, p.summary) for p in registered().values()]
    if options.json:
        print(json.dumps([dict(zip(heads, row)) for row in rows], indent=2))
    else:
        print_table(heads, rows)
    return 0


def _explained(options: argparse.Namespace, verify: bool, policy: str | None) -> Any:
    """Print and return the explanation of the target; None, and one line on stderr, if it cannot be loaded or run."""
    doing = "load"
    try:
        fn, args, kwargs = load(options.target)
        doing = "run"
        from .explanation.explain import explained

        explanation = explained(fn, args, kwargs, verify=verify, policy=policy)
    except Exception as error:  # the target may raise anything
        said = str(error).strip().partition("\n")[0]
        print(f"cannot {doing} {options.target}: {type(error).__name__}: {said}", file=sys.stderr)
        return None
    if options.json:
        print(explanation.report.to_json())
    else:
        explanation.show()
    return explanation


def _verify(options: argparse.Namespace) -> int:
    policy = None if os.environ.get("SPARSE_INDUCTOR_POLICY") else "always"
    explanation = _explained(options, True, options.policy or policy)
    if explanation is None:
        return 2
    checks = explanation.report.checks
    if not checks:
        print("nothing was rewritten, so nothing was checked", file=sys.stderr)
    return int(not checks or any(check.verdict != "agrees" for check in checks))


def _index(options: argparse.Namespace) -> int:
    from .index import SparseIndex
    from .reporting.console import print_table

    try:
        index = SparseIndex.load(options.file)
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else None
        print(f"cannot load {options.file}: {said or error}", file=sys.stderr)
        return 2
    facts: dict[str, Any] = {
        "documents": len(index),
        "not deleted": index.num_live,
        "terms": index.num_terms,
        "postings": index.num_postings,
        "weights": index.weights,
        "bytes": sum(index.nbytes.values()),
    }
    if options.json:
        print(json.dumps(facts, indent=2))
    else:
        print_table(
            ("", ""),
            [
                (name, f"{value:,}" if isinstance(value, int) else value)
                for name, value in facts.items()
            ],
        )
    return 0


def _explain(options: argparse.Namespace) -> int:
    if options.html is not None and not options.html.parent.is_dir():
        print(f"--html: there is no folder {options.html.parent}", file=sys.stderr)
        return 2
    explanation = _explained(options, options.verify, options.policy)
    if explanation is None:
        return 2
    if options.html is not None:
        try:
            options.html.write_text(explanation.to_html(options.target), encoding="utf-8")
        except OSError as error:
            print(f"--html: cannot write {options.html}: {error.strerror}", file=sys.stderr)
            return 2
        print(f"written: {options.html}", file=sys.stderr)
    return 0


def load(target: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the function, arguments and keyword arguments that `package.module:name` names.

    A callable other than a module is called as a factory. It returns the function or module to compile, alone or
    followed by its arguments: `(function, *arguments)`, `(function, (arguments))` or
    `(function, {keyword: argument})`. If it returns anything else, the callable itself is the function to compile.
    Raises ValueError, ImportError or AttributeError if there is no such object.
    """
    module_name, separator, name = target.partition(":")
    if not separator or not name:
        raise ValueError("write it as package.module:name")
    if module_name.endswith(".py"):
        meant = os.path.normpath(module_name).removesuffix(".py").replace("/", ".")
        raise ValueError(f"did you mean {meant}:{name}?")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    named: Any = importlib.import_module(module_name)
    for part in name.split("."):
        if not hasattr(named, part):
            own = (n for n, v in vars(named).items() if callable(v) and not n.startswith("_"))
            what = ", ".join(sorted(own)[:8]) or "no function"
            raise AttributeError(f"there is no {part!r} in it; it has {what}")
        named = getattr(named, part)
    from torch import nn

    made = named if isinstance(named, nn.Module) or not callable(named) else named()
    fn, *args = made if isinstance(made, tuple) and made else (made,)
    if not callable(fn):
        fn, args = named, []
    if not callable(fn):
        raise ValueError(f"{name} is {type(named).__name__}, not a function")
    if len(args) == 1 and isinstance(args[0], Mapping):
        return fn, (), dict(args[0])
    if len(args) == 1 and isinstance(args[0], (tuple, list)):
        args = [*args[0]]
    return fn, tuple(args), {}


if __name__ == "__main__":
    sys.exit(main())
