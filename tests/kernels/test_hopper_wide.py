"""Products of parts become one product, where that is the same, and are left as they are elsewhere."""

from __future__ import annotations

import logging

import pytest
import triton

from sparse_inductor.kernels import hopper_wide as wide

KIND = "k16.f32.bf16.bf16"


def product(columns, sums, first, second, how="%p1, 1, 1, 0, 0"):
    return (
        f"\twgmma.mma_async.sync.aligned.m64n{columns}{KIND} {{{sums}}}, {first}, {second}, {how};"
    )


def part(columns, sums, second, firsts=("%rd1", "%rd2"), **how):
    """A part's steps, as Triton writes them."""
    return [
        "\twgmma.fence.sync.aligned;",
        *(product(columns, sums, first, f"{second}{i}", **how) for i, first in enumerate(firsts)),
        "\twgmma.commit_group.sync.aligned;",
    ]


def kernel(*parts, pending=1):
    """Two steps, of which one is waited for."""
    step = [f"\t{wide.BEGIN.value} %r9", *(line for p in parts for line in p)]
    step.append(f"\t{wide.END.value} %r9")
    wait = f"\twgmma.wait_group.sync.aligned {pending * len(parts)};"
    return "\n".join(["first", *step, *step, wait, "\twgmma.wait_group.sync.aligned 0;", "last"])


WIDE, SMALL = part(128, "%r1,%r2", "%rd3"), part(16, "%r3", "%rd4")


def test_parts_become_one_product():
    both = [
        f"\t{wide.BEGIN.value} %r9",
        "\twgmma.fence.sync.aligned;",
        product(144, "%r1,%r2,%r3", "%rd1", "%rd30"),
        product(144, "%r1,%r2,%r3", "%rd2", "%rd31"),
        "\twgmma.commit_group.sync.aligned;",
        f"\t{wide.END.value} %r9",
    ]
    waits = ["\twgmma.wait_group.sync.aligned 1;", "\twgmma.wait_group.sync.aligned 0;"]
    made = [line for line in wide.widened(kernel(WIDE, SMALL)).split("\n") if line]
    assert made == ["first", *both, *both, *waits, "last"]


def test_three_parts_and_a_first_operand_in_registers():
    firsts = "{%a1,%a2}", "{%a3,%a4}"
    parts = [part(c, f"%r{c}", f"%rd{c}", firsts) for c in (128, 64, 16)]
    made = wide.widened(kernel(*parts, pending=2))
    assert made.count("m64n208") == 4 and made.count("wgmma.mma_async") == 4
    assert made.count("commit_group") == made.count("fence") == 2
    assert "wait_group.sync.aligned 2;" in made


def test_a_kernel_without_marks_is_as_it_was():
    code = "\n".join([*WIDE, *SMALL])
    assert wide.widened(code) is code


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (kernel(WIDE, part(16, "%r3", "%rd4", ("%rd1", "%rd5"))), "of the same rows"),
        (kernel(WIDE, part(16, "%r3", "%rd4", ("%rd2", "%rd1"))), "do not follow each other"),
        (kernel(WIDE, part(16, "%r3", "%rd4", how="%p2, 1, 1, 0, 0")), "in the same way"),
        (kernel(WIDE, [*SMALL[:1], product(16, "%r3", "%rd1", "%rd40"), SMALL[-1]]), "the same rows"),
        (kernel(WIDE, part(256, "%r3", "%rd4")), "384 columns"),
        (kernel(WIDE, ["\tmov.b32 %r3, 0;", *SMALL]), "mov.b32 %r3, 0;"),
        (kernel(WIDE, ["\tmov.b32 %r7, %r1;", *SMALL]), "mov.b32 %r7, %r1;"),
        (kernel(WIDE, [*SMALL, SMALL[-1]]), "3 times wgmma.commit_group"),
        (kernel(WIDE, SMALL).replace("aligned 2;", "aligned 3;"), "aligned 3;"),
        (kernel(WIDE, SMALL) + "\n" + "\n".join(SMALL), "beside them are not marked"),
        (kernel(WIDE, SMALL) + kernel(WIDE, SMALL, part(32, "%r5", "%rd5")), "different numbers"),
        (kernel(WIDE, SMALL) + f"\n{wide.BEGIN.value} %r9", "not in order"),
        (f"{wide.END.value} %r9\n" + kernel(WIDE, SMALL), "not in order"),
    ],
)  # fmt: skip
def test_what_is_not_the_same_is_left_with_the_reason(code, why, caplog):
    with caplog.at_level(logging.WARNING):
        assert wide.widened(code) == code
    assert why in caplog.text


def test_compiling_asks_triton_for_a_stage_and_whoever_asked_before(monkeypatch):
    knobs = triton.knobs.runtime
    seen = []

    def before(*given):
        seen.append(given)
        return None if given else ("key", "digest")

    monkeypatch.setattr(knobs, "add_stages_inspection_hook", before, raising=False)
    stages = {"ptx": lambda source, metadata: kernel(WIDE, SMALL) + source}
    with wide.completing():
        key, digest = knobs.add_stages_inspection_hook()
        assert key.startswith("key-") and digest.startswith("digest-")
        knobs.add_stages_inspection_hook("backend", stages, "options", "language", 90)
    assert knobs.add_stages_inspection_hook is before
    assert seen == [(), ("backend", stages, "options", "language", 90)]
    assert stages["ptx"]("rest", {}).count("m64n144") == 4


def test_stages_of_other_names_and_a_triton_that_cannot_be_asked_are_left_alone(monkeypatch):
    knobs = triton.knobs.runtime
    monkeypatch.setattr(knobs, "add_stages_inspection_hook", None, raising=False)
    stages = {"amdgcn": len}
    with wide.completing() as asked:
        knobs.add_stages_inspection_hook("backend", stages, "options", "language", 90)
    assert asked and stages == {"amdgcn": len}
    monkeypatch.delattr(type(knobs), "add_stages_inspection_hook", raising=False)
    monkeypatch.delattr(knobs, "add_stages_inspection_hook", raising=False)
    with wide.completing() as asked:
        assert not hasattr(knobs, "add_stages_inspection_hook")
    assert not asked and not hasattr(knobs, "add_stages_inspection_hook")


def test_an_error_while_compiling_leaves_no_hook():
    knobs = triton.knobs.runtime
    was = getattr(knobs, "add_stages_inspection_hook", None)
    with pytest.raises(ZeroDivisionError), wide.completing():
        _ = 1 / 0
    assert getattr(knobs, "add_stages_inspection_hook", None) is was
