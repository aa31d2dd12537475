"""Dot products of tokens with a table's rows in shared memory as PTX, and the lists that they go by, for NVIDIA GPUs:
what Triton's blocks have no words for. A block's warps go their own ways through the lists, a thread reads rows whose
places only it knows, and threads take places in a list one by one. `relu_ffn_resident` uses these strings and says what
the lists are.
"""

from __future__ import annotations

import functools

import torch

__all__ = [
    "ARRANGE_WARPS",
    "FEATURES",
    "GROUP",
    "LEFT",
    "MOST_PARTS",
    "PART_ROWS",
    "arrange",
    "dots",
    "element",
    "scan",
]

# Features of a table's row that a block holds: two lines of shared memory.
FEATURES = 128
# Tokens a group: their lower and upper halves are the 16 rows of the first operand of `mma.m16n8k16`.
GROUP = 8
# Low bits of a head, for the number of octets, and of a record, for the row.
LEFT = 8
PART_ROWS = 12
# Parts at most: a lane looks after each.
MOST_PARTS = 32
# Entries of a group that has so few that to read its tokens takes longer than to gather for them.
FEWEST = 9 * GROUP
# Warps of a block that arranges a group.
ARRANGE_WARPS = 4


def element(t: torch.Tensor) -> str:
    """PTX's name for the type of a 16-bit tensor."""
    return "bf16" if t.dtype == torch.bfloat16 else "f16"


@functools.cache
def dots(kind: str, slices: int, shares: int) -> str:
    """Multiply groups of tokens by rows of a part of the table.

    $1 the tokens from the slice's first feature on, rows of $2 bytes of which $3 is the last; $4 the heads of the
    part's $5 groups; $6 the records; $7 the slice's first partial sum; $8 groups a run; $9 the share's first run. The
    table is in shared memory from `global_smem` on, a row 256 bytes. kind: "bf16" or "f16".

    A warp takes a run of groups (32 at most), then the next that no warp has taken. Eight lanes read a row of the
    table, 16 bytes of either line each, so that four rows are one instruction without a conflict of banks; a row's
    halves are columns 2 i and 2 i + 1 of the second operand. Lane (token, i) has the sum for the lower half in the
    first register of the product, and for the upper one in the last; the rest is of no use.
    """
    tokens = "".join(
        f"ld.global.v4.b32 {{x{4 * i}, x{4 * i + 1}, x{4 * i + 2}, x{4 * i + 3}}}, [at+{64 * i}];"
        for i in range(4)
    )
    product = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    multiply = ""
    for s in range(4):  # 32 features at a time
        i = s // 2 * 8 + s % 2 * 2
        for row, total in (("a", "u"), ("b", "v")):
            held = f"{{{', '.join(f'{total}{j}' for j in range(4))}}}"
            token = f"{{x{i}, x{i + 4}, x{i + 1}, x{i + 5}}}"
            multiply += f"{product} {held}, {token}, {{{row}{2 * s}, {row}{2 * s + 1}}}, {held};"
    octet = 32 * slices  # bytes of an octet's partial sums
    row_bits = (1 << PART_ROWS) - 1
    return f"""{{
    .reg .pred p;
    .reg .b32 x<16>, a<8>, b<8>;
    .reg .f32 u<4>, v<4>;
    .reg .u32 lane, q, row, base, run, first, n, i, head, left, o, t, w, own, ea, eb;
    .reg .u64 xs, at, ws, owns, sums;
    .shared .align 4 .u32 taken;
    mov.u32 lane, %laneid;
    and.b32 q, lane, 3;
    shr.u32 row, lane, 2;
    mad.wide.u32 xs, q, 16, $1;
    and.b32 t, lane, 7;
    mov.u32 base, global_smem;
    mad.lo.u32 base, t, 16, base;
    mov.u32 t, %tid.x;
    setp.eq.u32 p, t, 0;
    mov.u32 t, 0;
    @p st.shared.u32 [taken], t;
    bar.sync 0;
RUN:
    setp.eq.u32 p, lane, 0;
    mov.u32 t, 1;
    mov.u32 run, 0;
    @p atom.shared.add.u32 run, [taken], t;
    shfl.sync.idx.b32 run, run, 0, 31, -1;
    mad.lo.u32 run, run, {shares}, $9;
    mul.lo.u32 first, run, $8;
    setp.ge.u32 p, first, $5;
    @p bra DONE;
    sub.u32 n, $5, first;
    min.u32 n, n, $8;
    add.u32 t, first, lane;
    mad.wide.u32 at, t, 4, $4;
    setp.lt.u32 p, lane, n;
    mov.u32 head, 0;
    @p ld.global.u32 head, [at];
    mov.u32 i, 0;
GROUP:
    shfl.sync.idx.b32 o, head, i, 31, -1;
    and.b32 left, o, {(1 << LEFT) - 1};
    shr.u32 o, o, {LEFT};
    add.u32 t, first, i;
    add.u32 i, i, 1;
    setp.eq.u32 p, left, 0;
    @p bra NEXT;
    mad.lo.u32 t, t, {GROUP}, row;
    min.u32 t, t, $3;
    mul.wide.u32 at, t, $2;
    add.u64 at, at, xs;
    {tokens}
    mad.wide.u32 at, o, 16, $6;
    shr.u32 t, lane, 3;
    mad.wide.u32 ws, t, 4, at;
    mad.wide.u32 owns, q, 4, at;
    ld.global.u32 w, [ws];
    ld.global.u32 own, [owns];
    mul.wide.u32 sums, o, {octet};
    add.u64 sums, sums, $7;
    mad.wide.u32 sums, q, 4, sums;
OCTET:
    and.b32 ea, w, {row_bits};
    bfe.u32 eb, w, 16, {PART_ROWS};
    mad.lo.u32 ea, ea, {2 * FEATURES}, base;
    mad.lo.u32 eb, eb, {2 * FEATURES}, base;
    ld.shared.v4.b32 {{a0, a1, a2, a3}}, [ea];
    ld.shared.v4.b32 {{b0, b1, b2, b3}}, [eb];
    ld.shared.v4.b32 {{a4, a5, a6, a7}}, [ea+128];
    ld.shared.v4.b32 {{b4, b5, b6, b7}}, [eb+128];
    add.u64 ws, ws, 16;
    ld.global.u32 w, [ws];
    {"".join(f"mov.f32 {total}{j}, 0f00000000;" for total in "uv" for j in range(4))}
    {multiply}
    add.f32 u0, u0, u3;
    add.f32 v0, v0, v3;
    bfe.u32 t, own, {PART_ROWS}, 3;
    setp.eq.u32 p, t, row;
    @p st.global.f32 [sums], u0;
    bfe.u32 t, own, {16 + PART_ROWS}, 3;
    setp.eq.u32 p, t, row;
    @p st.global.f32 [sums+16], v0;
    add.u64 owns, owns, 16;
    ld.global.u32 own, [owns];
    add.u64 sums, sums, {octet};
    sub.u32 left, left, 1;
    setp.ne.u32 p, left, 0;
    @p bra OCTET;
NEXT:
    setp.lt.u32 p, i, n;
    @p bra GROUP;
    bra RUN;
DONE:
    mov.u32 $0, 0;
    }}"""


def scan(register: str, lanes: int = 32) -> str:
    """Sums over the lanes up to each, of the first `lanes` at least; t and p are written over."""
    return "".join(
        f"shfl.sync.up.b32 t|p, {register}, {d}, 0, -1; @p add.u32 {register}, {register}, t;"
        for d in (1, 2, 4, 8, 16)
        if d < lanes
    )


@functools.cache
def arrange(parts: int, cap: int) -> str:
    """A block makes the octets of a group: counts the entries of each part, takes so many octets, and fills them. A
    group of fewer than FEWEST entries is left alone.

    $1 the group, of $8; $2 the counts of $9 rows; $3 their indices, int16, `cap` a row; $4 how many octets are taken,
    and how many groups are left alone; $5 the heads; $6 the records; $7 the places; $10 the groups left alone. Rows of
    more than `cap` entries have none here.
    """
    ends = range(GROUP - 1)
    # The row of the entry e of the group, and its place in it.
    choose = "".join(
        f"setp.ge.u32 p, e, end{j}; @p add.u32 r, r, 1; @p mov.u32 begin, end{j};" for j in ends
    )
    locate = f"""
    mov.u32 r, 0;
    mov.u32 begin, 0;
    {choose}
    mad.lo.u32 t, $1, {GROUP}, r;
    sub.u32 i, e, begin;
    mad.lo.u32 place, t, {cap}, i;
    mad.wide.u32 at, place, 2, $3;
    setp.lt.u32 there, e, total;
    mov.b16 half, 0;
    @there ld.global.b16 half, [at];
    cvt.u32.u16 n, half;
    rem.u32 t, n, {parts};
    shl.b32 own, t, 2;
    add.u32 own, own, filled;"""
    # The record of place t.
    record_at = """
    bfe.u32 i, t, 0, 2;
    shl.b32 i, i, 1;
    bfe.u32 e, t, 2, 1;
    or.b32 i, i, e;
    and.b32 n, t, -8;
    or.b32 n, n, i;
    mad.wide.u32 at, n, 2, $6;"""

    empty = f"""
    setp.lt.u32 mine, t, last;
    mad.wide.u32 at, t, 4, $7;
    @mine st.global.u32 [at], none;
    {record_at}
    @mine st.global.b16 [at], half;
    add.u32 t, t, 1;"""
    return f"""{{
    .reg .pred p, there, mine, first_warp;
    .reg .b16 half;
    .reg .u32 lane, m, c, sum, total, e, base, r, begin, i, n, t, place, own, filled, last, first, one, none;
    .reg .u32 {", ".join(f"end{j}" for j in ends)};
    .reg .u64 at;
    .shared .align 4 .b8 relu_ffn_filled[{4 * MOST_PARTS}];
    mov.u32 lane, %laneid;
    mov.u32 filled, relu_ffn_filled;
    mov.u32 one, 1;
    mov.u32 none, -1;
    mad.lo.u32 m, $1, {GROUP}, lane;
    setp.lt.u32 p, m, $9;
    setp.lt.and.u32 p, lane, {GROUP}, p;
    mad.wide.u32 at, m, 4, $2;
    mov.u32 c, 0;
    @p ld.global.u32 c, [at];
    setp.gt.u32 p, c, {cap};
    @p mov.u32 c, 0;
    mov.u32 sum, c;
    {scan("sum", GROUP)}
    {"".join(f"shfl.sync.idx.b32 end{j}, sum, {j}, 31, -1;" for j in ends)}
    shfl.sync.idx.b32 total, sum, {GROUP - 1}, 31, -1;
    mov.u32 t, %tid.x;
    sub.u32 base, t, lane;
    setp.eq.u32 first_warp, base, 0;
    mad.lo.u32 n, lane, $8, $1;
    mad.wide.u32 at, n, 4, $5;
    setp.lt.and.u32 mine, lane, {parts}, first_warp;
    setp.ge.u32 p, total, {FEWEST};
    @p bra SOME;
    mov.u32 t, 0;
    @mine st.global.u32 [at], t;
    setp.eq.and.u32 p, lane, 0, first_warp;
    add.u64 at, $4, 4;
    @p atom.global.relaxed.gpu.add.u32 t, [at], one;
    mov.u32 n, $1;
    mad.wide.u32 at, t, 4, $10;
    @p st.global.u32 [at], n;
    bra FILLED;
SOME:
    mad.lo.u32 own, lane, 4, filled;
    mov.u32 t, 0;
    @first_warp st.shared.u32 [own], t;
    bar.sync 0;
COUNT:
    setp.ge.u32 p, base, total;
    @p bra COUNTED;
    add.u32 e, base, lane;
    {locate}
    @there red.shared.add.u32 [own], one;
    add.u32 base, base, {32 * ARRANGE_WARPS};
    bra COUNT;
COUNTED:
    bar.sync 0;
    @!first_warp bra TAKEN;
    mad.lo.u32 own, lane, 4, filled;
    ld.shared.u32 c, [own];
    add.u32 m, c, 7;
    shr.u32 m, m, 3;
    mov.u32 sum, m;
    {scan("sum")}
    shfl.sync.idx.b32 last, sum, 31, 31, -1;
    sub.u32 sum, sum, m;
    setp.eq.u32 p, lane, 0;
    mov.u32 first, 0;
    @p atom.global.relaxed.gpu.add.u32 first, [$4], last;
    shfl.sync.idx.b32 first, first, 0, 31, -1;
    add.u32 first, first, sum;
    shl.b32 t, first, {LEFT};
    or.b32 t, t, m;
    mad.lo.u32 n, lane, $8, $1;
    mad.wide.u32 at, n, 4, $5;
    @mine st.global.u32 [at], t;
    shl.b32 first, first, 3;
    st.shared.u32 [own], first;
    add.u32 t, first, c;
    mad.lo.u32 last, m, 8, first;
    mov.b16 half, 0;
    {empty * 7}
TAKEN:
    bar.sync 0;
    mov.u32 t, %tid.x;
    sub.u32 base, t, lane;
FILL:
    setp.ge.u32 p, base, total;
    @p bra FILLED;
    add.u32 e, base, lane;
    {locate}
    mov.u32 t, 0;
    @there atom.shared.add.u32 t, [own], one;
    mad.wide.u32 at, t, 4, $7;
    @there st.global.u32 [at], place;
    div.u32 n, n, {parts};
    shl.b32 r, r, {PART_ROWS};
    or.b32 n, n, r;
    cvt.u16.u32 half, n;
    {record_at}
    @there st.global.b16 [at], half;
    add.u32 base, base, {32 * ARRANGE_WARPS};
    bra FILL;
FILLED:
    mov.u32 $0, 0;
    }}"""
