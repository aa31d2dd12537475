"""Helpers that compile kernels for a GPU that the machine need not have, in a process without the interpreter."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type

from processes import ROOT, TESTS, python


def compiled(
    kernel: Any,
    types: Iterable[str],
    constants: dict[str, Any],
    *,
    of: Callable[..., Any] = ASTSource,
    capability: int = 90,
    is_round: Callable[[str], bool] = lambda name: name.startswith("stride"),
    **options: Any,
) -> Any:
    """Compile a kernel for a compute capability and return the result of Triton.

    types: the types of the arguments that are not constants, in order. Addresses are declared as multiples of 16, as at
    a launch, and so are numbers for which `is_round(name)` is true, because vector loads change a kernel's resources.
    """
    given = iter(types)
    signature = {a: "constexpr" if a in constants else next(given) for a in kernel.arg_names}
    places = {(kernel.arg_names.index(a),): value for a, value in constants.items()}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, a in enumerate(kernel.arg_names)
        if signature[a] != "constexpr" and (signature[a].startswith("*") or is_round(a))
    }
    source = of(fn=kernel, signature=signature, constexprs=places, attrs=aligned)
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def compiled_job(job: Any) -> None:
    """Compile a job of `kernels.common.launch` for a Hopper GPU."""
    kernel, types, constants = job.kernel, [], {}
    given = dict(zip(kernel.arg_names, job.args)) | job.named
    for p in kernel.params:
        value = given.pop(p.name)
        one = value is not True and value == 1 and not p.do_not_specialize
        if p.is_constexpr or value is None or one:
            constants[p.name] = value
        else:
            types.append("i32" if isinstance(value, int) else mangle_type(value))
    compiled(kernel, types, constants, is_round=lambda name: False, **given)


def run_compiled(file: str, *arguments: Any, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a test file as a script that compiles kernels, with the interpreter off."""
    path = (ROOT, TESTS, Path(__file__).parent)
    without = ["TRITON_INTERPRET"]
    return python(file, *arguments, path=path, without=without, timeout=500, **variables)
