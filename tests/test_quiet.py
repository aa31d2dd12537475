"""The package gives no warnings of its own, also if warnings are errors, and changes no global state."""

from __future__ import annotations

from processes import python

RUN = """
import logging, sys, threading, warnings
import torch, torch._inductor.compile_fx
from programs import LAYERS, draw
warnings.simplefilter("error")
def seen():
    return (
        list(warnings.filters), list(sys.meta_path), threading.enumerate(), list(sys.path_hooks),
        torch.backends.mha.get_fastpath_enabled(), torch.get_num_threads(), torch.is_grad_enabled(),
        torch.get_default_dtype(), logging.root.handlers[:], sys.getswitchinterval(),
        torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
    )
before = seen()
import sparse_inductor
from sparse_inductor.testing import compile_without_codegen
sparse_inductor.enable()
assert seen() == before, (before, seen())
for name, layer in LAYERS.items():
    compile_without_codegen(layer())(draw()).sum().backward()
    assert name in {r.pattern for r in sparse_inductor.report().rewrites}, str(sparse_inductor.report())
sparse_inductor.disable()
assert warnings.filters == before[0]
"""


def test_nothing_is_said_or_changed():
    done = python("-c", RUN)
    assert not done.stderr, done.stderr
