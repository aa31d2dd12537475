"""The compiler contracts no product with a value from another lane into a multiply-add.

The reason is at `_partial` in the kernels of entmax over rows.
"""

from __future__ import annotations

import re

import pytest
from compiling import compiled, run_compiled

NUMBERS = ("n", "A", "C", "scale", "sxa", "sxc", "sxn", "soa", "soc", "son")


def contracted(ptx: str) -> list[str]:
    """Return the multiply-adds in the PTX of which the addend comes from a shuffle."""
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
    """Compile the kernels; this runs in a subprocess without the interpreter."""
    import torch

    from sparse_inductor.kernels.entmax import rows as entmax

    kernel = entmax._forward_kernel
    shapes = [(4, 120, 0), (16, 120, 0), (64, 120, 0), (4, 8, 0), (8, 24, 0), (128, 4, 0)]
    shapes += [(64, 1, 0), (3, 5, 0), (300, 4, 1), (300, 64, 1), (64, 256, 1), (64, 1000, 1)]
    sending = 0
    for rows, columns, dim in shapes:
        for alpha in (1.5, 1.25, 1.3, 2.5):
            x = torch.empty(rows, columns)
            plan = entmax._plan(x.shape, (x.stride(),) * 2, 4, False, alpha, dim, 64, 32768)
            assert plan is not None
            kinds = ["*fp32", "*fp32", *["i32"] * 3, "fp32", *["i32"] * 6]
            given = dict(zip(("x", "out", "scales", *NUMBERS), (0, 0, None, *plan.numbers)))
            constants = {**plan.constants, "scales": None}
            constants |= {n: 1 for n in NUMBERS if n != "A" and given[n] == 1}  # as at a launch
            types = dict(zip((a for a in kernel.arg_names if a in ("x", "out", *NUMBERS)), kinds))
            types = [kind for name, kind in types.items() if name not in constants]
            is_round = lambda name, given=given: name != "scale" and given[name] % 16 == 0
            found = compiled(kernel, types, constants, is_round=is_round, num_warps=plan.warps)
            ptx = found.asm["ptx"]
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
    run_compiled(__file__)


if __name__ == "__main__":
    compile_all()
