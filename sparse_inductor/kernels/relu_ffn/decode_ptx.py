"""A token's down projection as PTX, for NVIDIA GPUs: what Triton's blocks have no words for. Which neurons are active a
warp sees by a vote, so that between reading the hidden activations and sending for the weights lies no list that is
made by all warps together. `relu_ffn.decode` uses these strings.
"""

from __future__ import annotations

import functools

# Outputs a block, and slots of a warp: a lane for each output in each. Either of two words has half of the slots.
OUTPUTS = 4
SLOTS = 32 // OUTPUTS
# Neurons that are neighbours in a row of the weights: 16 bytes of it.
GROUP = 8


@functools.cache
def down(kind: str, warps: int) -> str:
    """Weigh OUTPUTS rows of the weights by a token's hidden activations, where those are not zero.

    $0 where in shared memory the sums of each warp are, fp32 [warps, OUTPUTS]; $1 the hidden activations, of which
    there are $2 groups; $3 the first row, rows of $4 bytes of which $5 is the last; $6 groups a word, 32 at most. kind:
    "bf16" or "f16".

    A warp takes two words of groups, then those two that are behind all warps' words. A lane looks whether a group has
    an activation, and a bit of the word says so. Then slot s of a word takes the s-th of its groups that have one, a
    lane of it for each row, until none is left. A warp adds in the same order each time.
    """
    slots = SLOTS // 2
    look = "".join(
        f"""
    {"add.u32 g, first, lane;" if w == 0 else "add.u32 g, g, $6;"}
    setp.lt.and.u32 p, g, $2, here;
    mad.wide.u32 at, g, 16, $1;
    {"".join(f"mov.b32 {x}{i}, 0;" for i in range(4))}
    @p ld.global.v4.b32 {{{", ".join(f"{x}{i}" for i in range(4))}}}, [at];"""
        for w, x in enumerate("vw")
    )
    vote = "".join(
        f"""
    or.b32 t, {x}0, {x}1;
    or.b32 t, t, {x}2;
    or.b32 t, t, {x}3;
    and.b32 t, t, {0x7FFF7FFF};
    setp.ne.u32 p, t, 0;
    vote.sync.ballot.b32 rest{w}, p, -1;"""
        for w, x in enumerate("vw")
    )
    without_lowest = "sub.u32 t, m, 1; {} and.b32 m, m, t;"
    ahead = "".join(without_lowest.format(f"@behind{i}") for i in range(slots - 1))
    left = "".join(
        f"shfl.sync.idx.b32 rest{w}, m, {(w + 1) * slots * OUTPUTS - 1}, 31, -1;" for w in range(2)
    )
    # What is not active counts for nothing, whatever its weight is.
    add = "".join(
        f"""
    set.neu.u32.{kind}x2 t, v{i}, zero;
    and.b32 w{i}, w{i}, t;"""
        + "".join(
            f"""
    {shift}
    cvt.u16.u32 half, v{i};
    cvt.f32.{kind} x, half;
    cvt.u16.u32 half, w{i};
    cvt.f32.{kind} y, half;
    @some fma.rn.f32 sum{j}, x, y, sum{j};"""
            for j, shift in enumerate(("", f"shr.u32 v{i}, v{i}, 16; shr.u32 w{i}, w{i}, 16;"))
        )
        for i in range(4)
    )
    return f"""{{
    .reg .pred p, some, here, second, {", ".join(f"behind{i}" for i in range(slots - 1))};
    .reg .b16 half;
    .reg .b32 t, m, zero, rest0, rest1, v<4>, w<4>;
    .reg .f32 x, y, sum0, sum1;
    .reg .u32 lane, warp, slot, own, g, a, first;
    .reg .u64 row, at;
    .shared .align 16 .b8 ffn_sums[{4 * OUTPUTS * warps}];
    mov.u32 lane, %laneid;
    mov.u32 warp, %tid.x;
    shr.u32 warp, warp, 5;
    mul.lo.u32 first, warp, 2;
    mul.lo.u32 first, first, $6;
    setp.lt.u32 here, lane, $6;
    and.b32 t, lane, {OUTPUTS - 1};
    min.u32 t, t, $5;
    mul.wide.u32 row, t, $4;
    add.u64 row, row, $3;
    shr.u32 slot, lane, {OUTPUTS.bit_length() - 1};
    setp.ge.u32 second, slot, {slots};
    and.b32 slot, slot, {slots - 1};
    {"".join(f"setp.gt.u32 behind{i}, slot, {i};" for i in range(slots - 1))}
    selp.u32 own, $6, 0, second;
    mov.b32 zero, 0;
    mov.f32 sum0, 0f00000000;
    mov.f32 sum1, 0f00000000;
WORDS:
    {look}
    {vote}
TAKE:
    selp.b32 m, rest1, rest0, second;
    {ahead}
    setp.ne.u32 some, m, 0;
    neg.s32 t, m;
    and.b32 t, t, m;
    bfind.u32 g, t;
    add.u32 g, g, own;
    add.u32 g, g, first;
    mad.wide.u32 at, g, 16, row;
    @some ld.global.v4.b32 {{w0, w1, w2, w3}}, [at];
    mad.wide.u32 at, g, 16, $1;
    @some ld.global.v4.b32 {{v0, v1, v2, v3}}, [at];
    {without_lowest.format("")}
    {left}
    {add}
    or.b32 t, rest0, rest1;
    setp.ne.u32 p, t, 0;
    @p bra TAKE;
    mad.lo.u32 first, $6, {2 * warps}, first;
    setp.lt.u32 p, first, $2;
    @p bra WORDS;
    add.f32 sum0, sum0, sum1;
    {_across("sum0")}
    mov.u32 a, ffn_sums;
    mad.lo.u32 a, warp, {4 * OUTPUTS}, a;
    mad.lo.u32 a, lane, 4, a;
    setp.lt.u32 p, lane, {OUTPUTS};
    @p st.shared.f32 [a], sum0;
    bar.sync 0;
    mov.u32 $0, ffn_sums;
    }}"""


@functools.cache
def total(warps: int) -> str:
    """$0 the sum of output $2, fp32, of what `down` has left at $1: numbers of which a lane adds every 32nd, so that
    `warps` * OUTPUTS is a multiple of 32."""
    more = "".join(
        f"ld.shared.f32 x, [a+{4 * i}]; add.f32 sum, sum, x;"
        for i in range(32, warps * OUTPUTS, 32)
    )
    return f"""{{
    .reg .b32 t;
    .reg .f32 x, sum;
    .reg .u32 a;
    mov.u32 a, %laneid;
    mad.lo.u32 a, a, 4, $1;
    ld.shared.f32 sum, [a];
    {more}
    {_across("sum")}
    mov.b32 t, sum;
    shfl.sync.idx.b32 t, t, $2, 31, -1;
    mov.b32 $0, t;
    }}"""


def _across(sums: str) -> str:
    """Adds what lanes have in `sums` that differ in their slots alone."""
    return "".join(
        f"mov.b32 t, {sums}; shfl.sync.bfly.b32 t, t, {OUTPUTS << i}, 31, -1; mov.b32 x, t; add.f32 {sums}, {sums}, x;"
        for i in range(SLOTS.bit_length() - 1)
    )
