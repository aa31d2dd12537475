"""Weighted sums of a table's rows in shared memory as PTX, and the lists that they go by, for NVIDIA GPUs: what
Triton's blocks have no words for. `relu_ffn_sums` uses these strings and says what the lists are.
"""

from __future__ import annotations

import functools

from .relu_ffn_ptx import scan

__all__ = [
    "BLOCK",
    "EXTRA",
    "FEATURES",
    "GROUP",
    "SHARES",
    "TURN",
    "TURNS",
    "WARPS",
    "arrange",
    "sums",
]

# Features of a table's row that a block holds: a quarter of a line of shared memory.
FEATURES = 16
# Tokens a group; tokens that are ranked together; warps that do it, and how often it is done, by blocks that then take
# a share of the groups each.
GROUP = 8
BLOCK = 512
WARPS = 8
SHARES = 4
GROUPS = BLOCK // GROUP
# Lines of a table's halves of rows that are in different banks: of rows that differ modulo this.
CLASSES = 8
# Places a turn, and turns a group on average for which there is room.
TURN = 16
TURNS = 6
# Places of a window besides the entries of its longest row: with none 1.5 lines are read for one, with these 1.4.
EXTRA = 3
# Entries of a row that are given places at a time, and places of such a window.
SPAN = 92
WINDOW = 96
# Of how many of a token's entries in a window the first place may be taken.
LISTED = 32
# Set in a token of whose sums a part is there already.
POOLED = 1 << 30


def _write_out() -> str:
    """A lane's place i, if it is `here`; w0 to w7 say what its tokens have there: where the row is, and which entry."""
    return f"""
    shr.u32 a, i, {TURN.bit_length() - 1};
    mad.wide.u32 at, a, {4 * GROUP * TURN}, list;
    bfe.u32 q, i, 2, 2;
    and.b32 v, i, 3;
    mul.lo.u32 t, v, 128;
    mad.lo.u32 t, q, 2, t;
    mad.lo.u32 v, v, 2, 8;
    """ + "".join(
        f"""
    add.u32 a, q, {u};
    and.b32 a, a, 3;
    mad.lo.u32 b, a, 32, t;
    cvt.u64.u32 to, b;
    add.u64 to, to, at;
    mad.lo.u32 b, a, 16, v;
    cvt.u64.u32 value, b;
    add.u64 value, value, at;"""
        + "".join(
            f"""
    cvt.u16.u32 half, w{2 * u + j};
    @here st.global.b16 [value+{64 * (2 * u + j)}], half;
    shr.u32 b, w{2 * u + j}, 16;
    cvt.u16.u32 half, b;
    @here st.global.b16 [to+{16 * j}], half;"""
            for j in range(2)
        )
        for u in range(4)
    )


@functools.cache
def arrange(cap: int, least: int, pool_rows: int = 0) -> str:
    """A block of eight warps ranks BLOCK tokens, those with the most entries first, and gives a share of their entries
    places.

    $1 the block; $2 the counts of $3 rows; $4 whether it is to be done at all; $5 the indices, int16, `cap` a row, a
    multiple of 4; $6 the tokens, int32 [groups, GROUP]; $7 the heads, int32 [groups, 2]; $8 the lists, int16; $9 the
    blocks' flags, int32; $10 how many blocks are flagged; $11 the share; $12 the sizes of pools, of `pool_rows` rows
    each, a power of two, unless that is 0. The flag is 1 where a token has `least` entries on average and all have
    room; where it is 0, heads are 0 and tokens -1.

    A warp takes four lanes for each token of a group. The r-th entry of its token's class k has place
    8 r + (k - token) % 8. What is past the end is listed, by token, and then a lane for each token looks for a
    place where the token has none yet and, if there is such a place, no token has one of this class (but for those that
    come there in the same step). Where too many are listed, the i-th entry has place i. Rows of more than SPAN entries
    are given places a window after another.
    """
    words = WINDOW // 32
    last = 0xFFFF
    # A lane's next listed entry, the first place that will do, by words of 32 places.
    search = "".join(
        f"ld.shared.b32 t, [a+{4 * j}]; not.b32 t, t; and.b32 could{j}, free{j}, t;"
        for j in range(words)
    )
    some = "mov.b32 t, could0;" + "".join(f"or.b32 t, t, could{j};" for j in range(1, words))
    take = (
        "".join(f"selp.b32 could{j}, free{j}, could{j}, p;" for j in range(words))
        + f"mov.b32 t, could{words - 1}; mov.u32 v, {words - 1};"
    )
    for j in reversed(range(words - 1)):
        take += f"setp.ne.u32 p, could{j}, 0; @p mov.b32 t, could{j}; @p mov.u32 v, {j};"
    taken = "".join(
        f"setp.eq.and.u32 p, v, {j}, here; @p xor.b32 free{j}, free{j}, low;" for j in range(words)
    )
    # Of each word, places that the group has and the token has not.
    free = "".join(
        f"""
    ld.shared.b32 free{j}, [a+{4 * j}];
    not.b32 free{j}, free{j};
    max.s32 t, most, {32 * j};
    sub.u32 t, t, {32 * j};
    min.u32 t, t, 32;
    bmsk.clamp.b32 t, 0, t;
    and.b32 free{j}, free{j}, t;"""
        for j in range(words)
    )
    no_class = "".join(
        f"ld.shared.b32 t, [a+{4 * words * k}]; shr.u32 t, t, lane; and.b32 t, t, 1; setp.eq.u32 p, t, 0;"
        f"@p mov.u32 k, {k};"
        for k in reversed(range(CLASSES))
    )
    pooled = ""
    if pool_rows:
        pooled = f"""
    shr.u32 t, m, {pool_rows.bit_length() - 1};
    mad.wide.u32 at, t, 4, $12;
    mov.u32 t, 0;
    @p ld.global.u32 t, [at];
    setp.ne.u32 here, t, 0;
    @here or.b32 m, m, {POOLED};"""
    each = range(BLOCK // (32 * WARPS))
    keys = "".join(
        f"""
    add.u32 b, tid, {32 * WARPS * s};
    mad.lo.u32 m, $1, {BLOCK}, b;
    setp.lt.u32 p, m, $3;
    mad.wide.u32 at, m, 4, $2;
    mov.u32 c, {cap + 1};
    @p ld.global.u32 c, [at];
    setp.le.u32 here, c, {cap};
    @here add.u32 entries, entries, c;
    @here add.u32 rows, rows, 1;
    add.u32 key{s}, c, 1;
    @!here mov.u32 key{s}, 0;
    sub.u32 t, {last}, b;
    mad.lo.u32 key{s}, key{s}, 65536, t;
    mov.u32 a, ffn_keys;
    mad.lo.u32 a, b, 4, a;
    st.shared.u32 [a], key{s};"""
        for s in each
    )
    clear_ranks = "".join(f"mov.u32 rank{s}, 0;" for s in each)
    rank = "".join(
        f"ld.shared.v4.u32 {{w0, w1, w2, w3}}, [a+{16 * j}];"
        + "".join(
            f"setp.gt.u32 p, w{i}, key{s}; @p add.u32 rank{s}, rank{s}, 1;"
            for i in range(4)
            for s in each
        )
        for j in range(4)
    )
    store_ranked = "".join(
        f"mad.lo.u32 a, rank{s}, 4, ranked; st.shared.u32 [a], key{s};" for s in each
    )
    # A lane has a group of each 32: its places, and where they begin.
    parts = range(GROUPS // 32)
    room = "".join(
        f"""
    add.u32 t, lane, {32 * s};
    mad.lo.u32 a, t, {4 * GROUP}, ranked;
    ld.shared.u32 t, [a];
    shr.u32 t, t, 16;
    max.u32 t, t, 1;
    sub.u32 t, t, 1;
    div.u32 v, t, {SPAN};
    mul.lo.u32 a, v, {SPAN};
    sub.u32 t, t, a;
    add.u32 a, t, {EXTRA + 3};
    and.b32 a, a, -4;
    setp.eq.u32 p, t, 0;
    @p mov.u32 a, 0;
    mad.lo.u32 places{s}, v, {WINDOW}, a;
    add.u32 v, places{s}, {TURN - 1};
    shr.u32 v, v, {TURN.bit_length() - 1};
    mov.u32 first{s}, v;
    {scan(f"first{s}")}
    sub.u32 v, first{s}, v;
    shfl.sync.idx.b32 t, first{s}, 31, 31, -1;
    add.u32 first{s}, v, all;
    mad.lo.u32 first{s}, $1, {GROUPS * TURNS}, first{s};
    add.u32 all, all, t;"""
        for s in parts
    )
    heads = "".join(
        f"""
    @!some mov.u32 first{s}, 0;
    @!some mov.u32 places{s}, 0;
    mad.lo.u32 t, $1, {GROUPS}, lane;
    add.u32 t, t, {32 * s};
    mad.wide.u32 at, t, 8, $7;
    setp.eq.u32 p, warp, 0;
    setp.eq.and.u32 p, $11, 0, p;
    @p st.global.v2.u32 [at], {{first{s}, places{s}}};"""
        for s in parts
    ) + "".join(
        f"""
    add.u32 b, tid, {32 * WARPS * s};
    mad.lo.u32 a, b, 4, ranked;
    ld.shared.u32 key, [a];
    and.b32 t, key, 65535;
    sub.u32 t, {last}, t;
    mad.lo.u32 m, $1, {BLOCK}, t;
    setp.ge.and.u32 p, key, 65536, some;
    {pooled}
    @!p mov.u32 m, -1;
    mad.lo.u32 t, $1, {BLOCK}, b;
    mad.wide.u32 at, t, 4, $6;
    setp.eq.u32 p, $11, 0;
    @p st.global.u32 [at], m;"""
        for s in each
    )
    of_group = "and.b32 a, group, 31; shr.u32 b, group, 5;" + "".join(
        f"""
    shfl.sync.idx.b32 t, places{s}, a, 31, -1;
    shfl.sync.idx.b32 v, first{s}, a, 31, -1;
    setp.eq.u32 p, b, {s};
    @p mov.u32 places, t;
    @p mov.u32 g, v;"""
        for s in parts
    )
    as_it_is = "".join(
        f"""
    shfl.sync.idx.b32 n, c, {4 * t}, 31, -1;
    shfl.sync.idx.b32 a, start, {4 * t}, 31, -1;
    add.u32 a, a, i;
    mad.wide.u32 at, a, 2, $5;
    setp.lt.u32 p, i, n;
    mov.b16 half, 0;
    @p ld.global.b16 half, [at];
    cvt.u32.u16 own, half;
    bfe.u32 a, own, 2, 1;
    mad.lo.u32 own, own, 2, a;
    add.u32 a, i, done;
    selp.u32 a, a, {last}, p;
    mad.lo.u32 w{t}, own, 65536, a;"""
        for t in range(GROUP)
    )
    return f"""{{
    .reg .pred p, some, here, over, good;
    .reg .b16 half;
    .reg .b32 n0, n1, low, same, before, vote, {", ".join(f"w{t}" for t in range(GROUP))};
    .reg .b32 {", ".join(f"free{j}, could{j}" for j in range(words))};
    .reg .u32 tid, lane, warp, m, c, t, a, b, v, q, i, j, g, n, k, r, key, own, one, entries, rows, part, token, start;
    .reg .u32 rest, done, {", ".join(f"places{s}, first{s}" for s in parts)};
    .reg .u32 {", ".join(f"key{s}, rank{s}" for s in each)};
    .reg .u32 totals, ranked, counts, listed, slots, classes, filled, places, all, most, place, e, group;
    .reg .u64 at, to, value, list, row;
    .shared .align 16 .b8 ffn_keys[{4 * BLOCK}];
    .shared .align 16 .b8 ffn_ranked[{4 * BLOCK}];
    .shared .align 4 .b8 ffn_totals[8];
    .shared .align 16 .b8 ffn_slots[{4 * GROUP * WINDOW * WARPS}];
    .shared .align 4 .b8 ffn_counts[{4 * GROUP * CLASSES * WARPS}];
    .shared .align 4 .b8 ffn_listed[{4 * GROUP * LISTED * WARPS}];
    .shared .align 4 .b8 ffn_classes[{4 * CLASSES * words * WARPS}];
    .shared .align 4 .b8 ffn_filled[{4 * GROUP * words * WARPS}];
    mov.u32 tid, %tid.x;
    mov.u32 lane, %laneid;
    mov.u32 before, %lanemask_lt;
    shr.u32 warp, tid, 5;
    mov.u32 one, 1;
    mov.u32 totals, ffn_totals;
    mov.u32 ranked, ffn_ranked;
    mov.u32 t, 0;
    setp.lt.u32 p, tid, 2;
    mad.lo.u32 a, tid, 4, totals;
    @p st.shared.u32 [a], t;
    mov.u32 entries, 0;
    mov.u32 rows, 0;
    {keys}
    bar.sync 0;
    redux.sync.add.u32 entries, entries, -1;
    redux.sync.add.u32 rows, rows, -1;
    setp.eq.u32 p, lane, 0;
    @p red.shared.add.u32 [totals], entries;
    @p red.shared.add.u32 [totals+4], rows;
    mov.u32 a, ffn_keys;
    {clear_ranks}
    mov.u32 i, 0;
RANK:
    {rank}
    add.u32 a, a, 64;
    add.u32 i, i, 16;
    setp.lt.u32 p, i, {BLOCK};
    @p bra RANK;
    {store_ranked}
    bar.sync 0;
    mov.u32 all, 0;
    {room}
    ld.shared.u32 entries, [totals];
    ld.shared.u32 rows, [totals+4];
    mul.lo.u32 rows, rows, {least};
    setp.ge.u32 some, entries, rows;
    setp.ne.and.u32 some, entries, 0, some;
    setp.le.and.u32 some, all, {GROUPS * TURNS}, some;
    setp.ne.and.u32 some, $4, 0, some;
    selp.u32 t, 1, 0, some;
    mad.wide.u32 at, $1, 4, $9;
    setp.eq.u32 p, tid, 0;
    setp.eq.and.u32 p, $11, 0, p;
    @p st.global.u32 [at], t;
    setp.ne.and.u32 p, t, 0, p;
    @p red.global.add.u32 [$10], one;
    {heads}
    @!some bra DONE;
    mov.u32 slots, ffn_slots;
    mad.lo.u32 slots, warp, {4 * GROUP * WINDOW}, slots;
    mov.u32 counts, ffn_counts;
    mad.lo.u32 counts, warp, {4 * GROUP * CLASSES}, counts;
    mov.u32 listed, ffn_listed;
    mad.lo.u32 listed, warp, {4 * GROUP * LISTED}, listed;
    mov.u32 classes, ffn_classes;
    mad.lo.u32 classes, warp, {4 * CLASSES * words}, classes;
    mov.u32 filled, ffn_filled;
    mad.lo.u32 filled, warp, {4 * GROUP * words}, filled;
    shr.u32 token, lane, 2;
    and.b32 part, lane, 3;
    mad.lo.u32 group, warp, {SHARES}, $11;
GROUP:
    {of_group}
    setp.eq.u32 p, places, 0;
    @p bra DONE;
    mad.wide.u32 list, g, {4 * GROUP * TURN}, $8;
    mad.lo.u32 a, group, {GROUP}, token;
    mad.lo.u32 a, a, 4, ranked;
    ld.shared.u32 key, [a];
    shr.u32 rest, key, 16;
    max.u32 rest, rest, 1;
    sub.u32 rest, rest, 1;
    and.b32 t, key, 65535;
    sub.u32 t, {last}, t;
    mad.lo.u32 m, $1, {BLOCK}, t;
    setp.eq.u32 p, rest, 0;
    @p mov.u32 m, 0;
    mul.lo.u32 start, m, {cap};
    mov.u32 done, 0;
WINDOW:
    mad.wide.u32 row, start, 2, $5;
    min.u32 most, places, {WINDOW};
    sub.u32 places, places, most;
    add.u32 all, most, {TURN - 1};
    and.b32 all, all, {-TURN};
    min.u32 c, rest, {SPAN};
    sub.u32 rest, rest, c;
    mov.u32 t, 0;
    mad.lo.u32 a, lane, 4, counts;
    st.shared.u32 [a], t;
    st.shared.u32 [a+128], t;
    setp.lt.u32 p, lane, {GROUP * words};
    mad.lo.u32 a, lane, 4, classes;
    @p st.shared.u32 [a], t;
    mad.lo.u32 a, lane, 4, filled;
    @p st.shared.u32 [a], t;
    mov.u32 t, -1;
    mov.u32 i, lane;
CLEAR:
    setp.lt.u32 p, i, {WINDOW};
    mad.lo.u32 a, i, {4 * GROUP}, slots;
    @p st.shared.v4.u32 [a], {{t, t, t, t}};
    @p st.shared.v4.u32 [a+16], {{t, t, t, t}};
    add.u32 i, i, 32;
    sub.u32 v, i, lane;
    setp.lt.u32 p, v, all;
    @p bra CLEAR;
    bar.warp.sync -1;
    mov.u32 n, 0;
    mul.lo.u32 i, part, 4;
ENTRIES:
    setp.lt.u32 p, i, c;
    mad.wide.u32 at, i, 2, row;
    mov.u32 n0, 0;
    mov.u32 n1, 0;
    @p ld.global.v2.u32 {{n0, n1}}, [at];
    mov.u32 e, i;
ENTRY:
    setp.lt.u32 here, e, c;
    and.b32 own, n0, 65535;
    shf.r.wrap.b32 n0, n0, n1, 16;
    shr.u32 n1, n1, 16;
    and.b32 k, own, {CLASSES - 1};
    bfe.u32 t, own, 2, 1;
    mad.lo.u32 own, own, 2, t;
    mad.lo.u32 own, own, 65536, e;
    add.u32 own, own, done;
    mad.lo.u32 key, token, {CLASSES}, k;
    mad.lo.u32 b, key, 4, counts;
    @!here mov.u32 key, {GROUP * CLASSES};
    match.any.sync.b32 same, key, -1;
    mov.u32 r, 0;
    @here ld.shared.u32 r, [b];
    and.b32 t, same, before;
    setp.eq.and.u32 p, t, 0, here;
    popc.b32 t, t;
    popc.b32 v, same;
    add.u32 v, v, r;
    add.u32 r, r, t;
    bar.warp.sync -1;
    @p st.shared.u32 [b], v;
    sub.u32 t, k, token;
    and.b32 t, t, {CLASSES - 1};
    mad.lo.u32 place, r, {CLASSES}, t;
    setp.ge.and.u32 over, place, most, here;
    setp.lt.and.u32 good, place, most, here;
    mad.lo.u32 a, place, {GROUP}, token;
    mad.lo.u32 a, a, 4, slots;
    @good st.shared.u32 [a], own;
    and.b32 t, place, 31;
    shl.b32 low, one, t;
    shr.u32 t, place, 5;
    mad.lo.u32 a, k, {words}, t;
    mad.lo.u32 a, a, 4, classes;
    @good red.shared.or.b32 [a], low;
    mad.lo.u32 a, token, {words}, t;
    mad.lo.u32 a, a, 4, filled;
    @good red.shared.or.b32 [a], low;
    vote.sync.ballot.b32 vote, over, -1;
    and.b32 t, vote, before;
    mul.lo.u32 v, token, 4;
    shr.u32 t, t, v;
    popc.b32 t, t;
    add.u32 t, t, n;
    setp.lt.and.u32 over, t, {LISTED}, over;
    mad.lo.u32 a, token, {LISTED}, t;
    mad.lo.u32 a, a, 4, listed;
    @over st.shared.u32 [a], own;
    shr.u32 t, vote, v;
    and.b32 t, t, 15;
    popc.b32 t, t;
    add.u32 n, n, t;
    bar.warp.sync -1;
    add.u32 e, e, 1;
    sub.u32 t, e, i;
    setp.lt.u32 p, t, 4;
    @p bra ENTRY;
    add.u32 i, i, {TURN};
    mad.lo.u32 t, part, -4, i;
    setp.lt.u32 p, t, most;
    @p bra ENTRIES;
    redux.sync.max.u32 r, n, -1;
    setp.gt.u32 p, r, {LISTED};
    @p bra AS_IT_IS;
    and.b32 g, lane, {GROUP - 1};
    mul.lo.u32 t, g, 4;
    shfl.sync.idx.b32 n, n, t, 31, -1;
    mad.lo.u32 a, g, {4 * words}, filled;
    {free}
    mov.u32 i, 0;
OVER:
    setp.ge.u32 p, i, r;
    @p bra FILL;
    setp.lt.u32 here, i, n;
    mad.lo.u32 a, g, {LISTED}, i;
    mad.lo.u32 a, a, 4, listed;
    mov.u32 own, 0;
    @here ld.shared.u32 own, [a];
    bfe.u32 k, own, 17, 3;
    mad.lo.u32 a, k, {4 * words}, classes;
    {search}
    {some}
    setp.eq.u32 p, t, 0;
    {take}
    brev.b32 t, t;
    bfind.u32 t, t;
    sub.u32 t, 31, t;
    mad.lo.u32 place, v, 32, t;
    shl.b32 low, one, t;
    {taken}
    mad.lo.u32 a, v, 4, a;
    bar.warp.sync -1;
    @here red.shared.or.b32 [a], low;
    mad.lo.u32 a, place, {GROUP}, g;
    mad.lo.u32 a, a, 4, slots;
    @here st.shared.u32 [a], own;
    bar.warp.sync -1;
    add.u32 i, i, 1;
    bra OVER;
AS_IT_IS:
    mov.u32 i, lane;
PLACE:
    {as_it_is}
    setp.lt.u32 p, i, all;
    mad.lo.u32 a, i, {4 * GROUP}, slots;
    @p st.shared.v4.u32 [a], {{w0, w1, w2, w3}};
    @p st.shared.v4.u32 [a+16], {{w4, w5, w6, w7}};
    add.u32 i, i, 32;
    sub.u32 t, i, lane;
    setp.lt.u32 p, t, all;
    @p bra PLACE;
FILL:
    bar.warp.sync -1;
    mov.u32 i, lane;
FILLING:
    setp.lt.u32 p, i, {WINDOW};
    mad.lo.u32 a, i, {4 * GROUP}, slots;
    @p ld.shared.v4.u32 {{w0, w1, w2, w3}}, [a];
    @p ld.shared.v4.u32 {{w4, w5, w6, w7}}, [a+16];
    sub.u32 t, i, lane;
    shr.u32 t, t, 5;
    mad.lo.u32 a, t, 4, classes;
    mov.u32 k, 0;
    {no_class}
    bfe.u32 t, k, 2, 1;
    mad.lo.u32 t, k, 2, t;
    mad.lo.u32 own, t, 65536, {last};
    {"".join(f"setp.eq.u32 p, w{t}, -1; @p mov.u32 w{t}, own;" for t in range(GROUP))}
    setp.lt.u32 here, i, all;
    {_write_out()}
    add.u32 i, i, 32;
    sub.u32 t, i, lane;
    setp.lt.u32 p, t, all;
    @p bra FILLING;
    bar.warp.sync -1;
    add.u64 list, list, {4 * GROUP * WINDOW};
    add.u32 start, start, {SPAN};
    add.u32 done, done, {SPAN};
    setp.ne.u32 p, places, 0;
    @p bra WINDOW;
    add.u32 group, group, {SHARES * WARPS};
    setp.lt.u32 p, group, {GROUPS};
    @p bra GROUP;
DONE:
    mov.u32 $0, 0;
    }}"""


@functools.cache
def sums(kind: str, shares: int, has_bias: bool, pools: bool = False) -> str:
    """Sum the rows of a slice of the table for all groups of tokens.

    $1 the slice's first feature of the result, whose rows have $2 bytes; $3 the tokens, $4 the heads and $5 the lists;
    $6 how many groups; $7 the share; $8 the slice's biases. The table is in shared memory from `global_smem` on, a row
    32 bytes, its halves changed about where bit 2 of its number is set. kind: "bf16" or "f16". pools: sums of tokens
    that are POOLED are added to what is there.

    A step is two places of all tokens: columns of the first operand are those 16, of which token n, a row of it, has
    one of each place, so that a lane knows where its part of the values belongs; rows 8 to 15 are empty. The two steps
    of quarter q of a turn take places 4 q to 4 q + 3; in them token n has column 2 ((n / 2 + q) % 4) + n % 2 of eight,
    so that in one quarter a lane has a token's values. Of a turn a lane has 16 bytes of the list: four rows of the
    table, of each quarter the one that it is to address, then the values. A warp takes group by group, and asks for
    what it needs next while it multiplies.
    """
    product = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    quarters = range(4)
    bytes_a_turn = 4 * GROUP * TURN
    to_halves = ""
    if has_bias:
        to_halves = "".join(
            f"""
    ld.global.b16 half, [at+{16 * h + 2 * i}];
    cvt.f32.{kind} bias{2 * h + i}, half;"""
            for h in range(2)
            for i in range(2)
        )
    from_bias = "".join(
        f"mov.f32 {d}{i}, bias{2 * h + i}; mov.f32 {d}{2 + i}, 0f00000000;"
        for h, d in enumerate("de")
        for i in range(2)
    )
    from_pools = ""
    if pools:
        # As it is written below, the other way round.
        from_pools = f"""
    setp.ge.s32 stored, m, 0;
    bfe.u32 t, m, {POOLED.bit_length() - 1}, 1;
    setp.ne.and.u32 p, t, 0, stored;
    @stored and.b32 m, m, {POOLED - 1};
    mad.wide.u32 at, m, $2, out;
    mov.b32 b0, 0;
    mov.b32 b1, 0;
    @p ld.global.v2.b32 {{b0, b1}}, [at];
    selp.b32 b2, b0, b1, odd;
    shfl.sync.bfly.b32 b2, b2, 1, 31, -1;
    selp.b32 b0, b2, b0, odd;
    selp.b32 b1, b1, b2, odd;""" + "".join(
            f"""
    cvt.u16.u32 half, b{h};
    cvt.f32.{kind} part, half;
    add.f32 {d}0, {d}0, part;
    shr.u32 b{h}, b{h}, 16;
    cvt.u16.u32 half, b{h};
    cvt.f32.{kind} part, half;
    add.f32 {d}1, {d}1, part;"""
            for h, d in enumerate("de")
        )
    # The group after the next; and what the next one is.
    take = f"""
    setp.eq.u32 p, lane, 0;
    mov.u32 group, 0;
    @p atom.shared.add.u32 group, [ffn_taken], one;
    shfl.sync.idx.b32 group, group, 0, 31, -1;
    mad.lo.u32 group, group, {shares}, $7;"""
    ahead = f"""
    min.u32 t, group, last;
    mad.wide.u32 at, t, 8, $4;
    ld.global.v2.u32 {{first_then, left_then}}, [at];
    mad.lo.u32 t, t, {GROUP}, tok;
    mad.wide.u32 at, t, 4, $3;
    ld.global.u32 m_then, [at];"""
    select = "".join(
        f"""
    setp.eq.u32 own_turn, turn, {q};
    selp.b32 low{q}, 0x4410, 0x1044, p;
    selp.b32 high{q}, 0x4432, 0x3244, p;
    selp.b32 low{q}, low{q}, 0x4444, own_turn;
    selp.b32 high{q}, high{q}, 0x4444, own_turn;"""
        for q in quarters
    )

    def quarter(now: str, q: int) -> str:
        """Two steps: the first halves of their rows, the second halves, and a product with each."""
        word = f"{now}{q // 2}"
        row = f"and.b32 t, {word}, 0xffff;" if q % 2 == 0 else f"shr.u32 t, {word}, 16;"
        text = f"""
    {row}
    mad.lo.u32 a, t, 16, own;
    ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{b0, b1, b2, b3}}, [a];
    xor.b32 t, t, 1;
    mad.lo.u32 a, t, 16, own;
    ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{b4, b5, b6, b7}}, [a];"""
        for s in range(2):
            text += f"""
    prmt.b32 a0, {now}{2 + s}, 0, low{q};
    prmt.b32 a2, {now}{2 + s}, 0, high{q};"""
            for half, d in enumerate("de"):
                rows = f"b{4 * half + 2 * s}, b{4 * half + 2 * s + 1}"
                result = ", ".join(f"{d}{i}" for i in range(4))
                text += f"""
    {product} {{{result}}}, {{a0, none, a2, none}}, {{{rows}}}, {{{result}}};"""
        return text

    def turn(now: str, then: str) -> str:
        """From a turn in registers {now}i to the next in those {then}i; a group may begin and end in either of two."""
        whole = "".join(quarter(now, q) for q in quarters)
        part = "".join(
            f"setp.le.u32 p, left, {4 * q}; @p bra SUMMED@; {quarter(now, q)}" for q in range(3)
        )
        text = f"""
GROUP@:
    setp.ge.u32 p, now, $6;
    @p bra DONE;
    mov.u32 m, m_then;
    mov.u32 left, left_then;
    {from_bias}
    {from_pools}
    {ahead}
    mov.u32 now, group;
    {take}
STEPS@:
    add.u64 list, list, {bytes_a_turn};
    setp.gt.u32 p, left, {TURN};
    @p bra SAME@;
    mad.wide.u32 list, first_then, {bytes_a_turn}, own_list;
SAME@:
    ld.global.v4.b32 {{{then}0, {then}1, {then}2, {then}3}}, [list];
    setp.lt.u32 p, left, {TURN};
    @p bra PART@;
    {whole}
    setp.eq.u32 p, left, {TURN};
    @p bra SUMMED@;
    sub.u32 left, left, {TURN};
    bra STEPS#;
PART@:
    {part}
SUMMED@:
    cvt.rn.{kind}x2.f32 b0, d1, d0;
    cvt.rn.{kind}x2.f32 b1, e1, e0;
    selp.b32 b2, b0, b1, odd;
    shfl.sync.bfly.b32 b2, b2, 1, 31, -1;
    selp.b32 b0, b2, b0, odd;
    selp.b32 b1, b1, b2, odd;
    setp.ge.s32 stored, m, 0;
    mad.wide.u32 at, m, $2, out;
    @stored st.global.v2.b32 [at], {{b0, b1}};
    bra GROUP#;"""
        return (
            text.replace("@;", f"{now.upper()};")
            .replace("@:", f"{now.upper()}:")
            .replace("#;", f"{then.upper()};")
        )

    return f"""{{
    .reg .pred p, stored, own_turn, odd;
    .reg .b16 half;
    .reg .b32 a0, a2, none, b<8>, x<4>, y<4>, low<4>, high<4>;
    .reg .f32 d<4>, e<4>, bias<4>, part;
    .reg .u32 lane, q, tok, turn, own, group, now, last, m, left, t, a, one, m_then, first_then, left_then;
    .reg .u64 at, out, list, own_list;
    .shared .align 4 .u32 ffn_taken;
    mov.u32 lane, %laneid;
    and.b32 q, lane, 3;
    shr.u32 tok, lane, 2;
    mov.u32 one, 1;
    sub.u32 last, $6, 1;
    and.b32 t, q, 1;
    setp.ne.u32 odd, t, 0;
    and.b32 a, q, 2;
    mad.lo.u32 a, t, 4, a;
    mad.wide.u32 out, a, 4, $1;
    shr.u32 t, tok, 1;
    sub.u32 turn, q, t;
    and.b32 turn, turn, 3;
    and.b32 t, tok, 1;
    setp.eq.u32 p, t, 0;
    {select}
    mov.f32 bias0, 0f00000000;
    mov.f32 bias1, 0f00000000;
    mov.f32 bias2, 0f00000000;
    mov.f32 bias3, 0f00000000;
    mov.b32 none, 0;
    mad.wide.u32 at, q, 4, $8;
    {to_halves}
    mov.u32 own, global_smem;
    mad.wide.u32 own_list, lane, 16, $5;
    mov.u64 list, own_list;
    mov.u32 t, %tid.x;
    setp.eq.u32 p, t, 0;
    mov.u32 t, 0;
    @p st.shared.u32 [ffn_taken], t;
    bar.sync 0;
    {take}
    {ahead}
    mov.u32 now, group;
    {take}
    mov.u32 left, 0;
    mov.u32 m, -1;
    {from_bias}
    bra STEPSY;
{turn("x", "y")}
{turn("y", "x")}
DONE:
    mov.u32 $0, 0;
    }}"""
