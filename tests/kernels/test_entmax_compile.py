"""What lanes send each other is contracted with no product: see `_partial` in the kernels of entmax over rows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

NUMBERS = ("n", "A", "C", "scale", "sxa", "sxc", "sxn", "soa", "soc", "son")
ROOT = Path(__file__).resolve().parents[2]


def contracted(ptx: str) -> list[str]:
    """Multiply-adds whose addend another lane sent."""
    sent: set[str] = set()
    found = []
    for line in ptx.splitlines():
        words = re.findall(r"[\w.%]+", line)
        if not words or words[0].startswith("@"):
            continue
        if words[0].startswith("shfl.sync"):
            sent.add(words[1].split("|")[0])
        elif words[0].startswith("mov.b32") and words[2] in sent:
            sent.add(words[1])
        elif words[0] == "fma.rn.f32" and words[4] in sent:
            found.append(line)
        else:
            sent -= {words[1]} if len(words) > 1 else set()
    return found


def compile_all() -> None:
    """In a process of its own, where the interpreter is off."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sparse_inductor.kernels.entmax import rows as entmax

    kernel = entmax._forward_kernel
    shapes = [
        (4, 120, 0),
        (16, 120, 0),
        (64, 120, 0),
        (4, 8, 0),
        (8, 24, 0),
        (128, 4, 0),
        (64, 1, 0),
    ]
    shapes += [(3, 5, 0), (300, 4, 1), (300, 64, 1), (64, 256, 1), (64, 1000, 1)]
    sending = 0
    for rows, columns, dim in shapes:
        for alpha in (1.5, 1.25, 1.3, 2.5):
            x = torch.empty(rows, columns)
            plan = entmax._plan(x.shape, (x.stride(),) * 2, 4, False, alpha, dim, 64, 32768)
            assert plan is not None
            types = iter(["*fp32", "*fp32", *["i32"] * 3, "fp32", *["i32"] * 6])
            given = dict(zip(("x", "out", "scales", *NUMBERS), (0, 0, None, *plan.numbers)))
            constants = {**plan.constants, "scales": None}
            constants |= {n: 1 for n in NUMBERS if n != "A" and given[n] == 1}  # as at a launch
            signature, attrs = {}, {}
            for at, name in enumerate(kernel.arg_names):
                kind = next(types) if name in ("x", "out", *NUMBERS) else ""
                signature[name] = "constexpr" if name in constants else kind
                if name not in constants and name != "scale" and given[name] % 16 == 0:
                    attrs[(at,)] = [["tt.divisibility", 16]]
            places = {(kernel.arg_names.index(a),): v for a, v in constants.items()}
            source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=attrs)
            options = {"num_warps": plan.warps}
            ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm[
                "ptx"
            ]
            sending += "shfl.sync" in ptx
            assert not contracted(ptx), (rows, columns, dim, alpha, contracted(ptx)[:3])
    assert sending > len(shapes)


def test_contractions_are_found() -> None:
    sent = "shfl.sync.bfly.b32 \t%r106, %r104, 16, 31, -1;"
    assert contracted(f"{sent}\nfma.rn.f32 \t%r107, %r102, %r102, %r106;")
    assert not contracted(f"{sent}\nfma.rn.f32 \t%r107, %r106, %r102, %r103;")
    assert not contracted(f"{sent}\nadd.f32 \t%r106, %r1, %r2;\nfma.rn.f32 \t%r7, %r1, %r2, %r106;")


@pytest.mark.heavy
@pytest.mark.newest
def test_nothing_is_contracted_with_what_lanes_send() -> None:
    env = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, __file__], env=env, capture_output=True, text=True, timeout=500
    )
    assert not done.returncode, done.stdout + done.stderr


if __name__ == "__main__":
    compile_all()
