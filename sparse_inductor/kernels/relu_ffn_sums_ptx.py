"""Weighted sums of a table's rows in shared memory as PTX, and the schedule that they go by, for NVIDIA GPUs: what
Triton's blocks have no words for. `relu_ffn_sums` uses these strings and says what the schedule is.
"""

from __future__ import annotations

__all__ = [
    "BLOCK",
    "CHUNK",
    "FEATURES",
    "GROUP",
    "SLOTS",
    "SPAN",
    "WINDOWS",
    "rank",
    "schedule",
    "sums",
]

# Features of a table's row that a block holds: a quarter of a line of shared memory.
FEATURES = 16
# Tokens a group, and tokens that are ranked together.
GROUP = 8
BLOCK = 8192
# Slots of a window, in which each token of a group has up to SPAN entries; and slots of a chunk of the records.
SLOTS = 64
SPAN = 48
CHUNK = 16
# Windows of a block that schedules them.
WINDOWS = 4
# Rows of a table that differ modulo this lie in different banks.
CLASSES = 8


def _scan(register: str) -> str:
    """Sums over the lanes up to each."""
    return "".join(
        f"shfl.sync.up.b32 t|p, {register}, {d}, 0, -1; @p add.u32 {register}, {register}, t;"
        for d in (1, 2, 4, 8, 16)
    )


def rank(cap: int, least: int, warps: int) -> str:
    """A block puts BLOCK tokens in order, those with the most entries first, and counts their groups' windows.

    $1 the block; $2 the counts of $3 rows; $4 whether rows are packed at all; $5 the order, int32 [blocks, BLOCK], -1
    for what is not packed; $6 the blocks' flags, int32; $7 how many further windows are taken, and behind it how many
    blocks are ranked; $8 the heads, int32 [groups, 4]; $9 the further windows' groups; $10 how many groups there are.
    The flag is 1 where a token has `least` entries on average; where it is 0, there is nothing to sum.

    Tokens with as many entries are in order: a warp looks at its part of them twice, the second time one after another.
    """
    threads, own = 32 * warps, BLOCK // warps
    bins = -(-(cap + 2) // 32) * 32
    each = bins * warps // 32  # what a lane adds up
    groups = BLOCK // GROUP
    at_once = 8
    heavy = cap + 1
    # The bin of the token m, `heavy` of what is not packed.
    load = f"""
    setp.lt.u32 p, m, $3;
    mad.wide.u32 at, m, 4, $2;
    mov.u32 b, {heavy};
    @p ld.global.u32 b, [at];"""
    bin = f"""
    setp.le.u32 p, b, {cap};
    sub.u32 b, {cap}, b;
    @!p mov.u32 b, {heavy};
    mad.lo.u32 t, b, {4 * warps}, mine;"""
    count = "".join(f"{load} mov.u32 b{j}, b; add.u32 m, m, 32;" for j in range(at_once))
    count += "".join(
        f"""
    mov.u32 b, b{j};
    setp.le.u32 p, b, {cap};
    @p add.u32 entries, entries, b;
    @p add.u32 rows, rows, 1;
    {bin}
    red.shared.add.u32 [t], one;"""
        for j in range(at_once)
    )
    return f"""{{
    .reg .pred p, q;
    .reg .u32 tid, lane, warp, m, t, b, mine, one, entries, rows, sum, base, first, i, g, c, n, same, before;
    .reg .u32 all, totals, {", ".join(f"b{j}" for j in range(at_once))};
    .reg .u64 at;
    .shared .align 4 .b8 ffn_bins[{4 * bins * warps}];
    .shared .align 4 .b8 ffn_totals[{4 * warps + 8}];
    mov.u32 tid, %tid.x;
    mov.u32 lane, %laneid;
    shr.u32 warp, tid, 5;
    mov.u32 all, ffn_bins;
    mov.u32 totals, ffn_totals;
    mad.lo.u32 mine, warp, 4, all;
    mov.u32 one, 1;
    mov.u32 entries, 0;
    mov.u32 rows, 0;
    mov.u32 i, 0;
    mov.u32 c, 0;
CLEAR:
    add.u32 t, i, tid;
    setp.lt.u32 p, t, {bins * warps};
    mad.lo.u32 b, t, 4, all;
    @p st.shared.u32 [b], c;
    setp.lt.u32 p, t, {warps + 2};
    mad.lo.u32 b, t, 4, totals;
    @p st.shared.u32 [b], c;
    add.u32 i, i, {threads};
    setp.lt.u32 p, i, {bins * warps};
    @p bra CLEAR;
    bar.sync 0;
    mad.lo.u32 base, $1, {BLOCK}, lane;
    mad.lo.u32 base, warp, {own}, base;
    mov.u32 i, 0;
COUNT:
    add.u32 m, base, i;
    {count}
    add.u32 i, i, {32 * at_once};
    setp.lt.u32 p, i, {own};
    @p bra COUNT;
    redux.sync.add.u32 entries, entries, -1;
    redux.sync.add.u32 rows, rows, -1;
    setp.eq.u32 p, lane, 0;
    @p red.shared.add.u32 [totals+{4 * warps}], entries;
    @p red.shared.add.u32 [totals+{4 * warps + 4}], rows;
    bar.sync 0;
    ld.shared.u32 entries, [totals+{4 * warps}];
    ld.shared.u32 rows, [totals+{4 * warps + 4}];
    mul.lo.u32 rows, rows, {least};
    setp.ge.u32 q, entries, rows;
    setp.ne.and.u32 q, entries, 0, q;
    setp.ne.and.u32 q, $4, 0, q;
    mov.u32 t, 0;
    @q mov.u32 t, 1;
    mad.wide.u32 at, $1, 4, $6;
    setp.eq.u32 p, tid, 0;
    @p st.global.u32 [at], t;
    @q bra SOME;
    mov.u32 t, -1;
    mov.u32 i, 0;
NONE:
    mad.lo.u32 m, $1, {BLOCK}, i;
    add.u32 m, m, tid;
    mad.wide.u32 at, m, 4, $5;
    st.global.u32 [at], t;
    mad.lo.u32 m, $1, {groups}, i;
    add.u32 m, m, tid;
    mad.wide.u32 at, m, 16, $8;
    add.u32 b, i, tid;
    setp.lt.u32 p, b, {groups};
    @p st.global.u32 [at], c;
    @p st.global.u32 [at+4], c;
    add.u32 i, i, {threads};
    setp.lt.u32 p, i, {BLOCK};
    @p bra NONE;
    bra RANKED;
SOME:
    add.u64 at, $7, 4;
    @p red.global.add.u32 [at], one;
    setp.ne.u32 p, warp, 0;
    @p bra BEGUN;
    mad.lo.u32 first, lane, {4 * each}, all;
    mov.u32 sum, 0;
    mov.u32 i, 0;
ADD:
    mad.lo.u32 b, i, 4, first;
    ld.shared.u32 t, [b];
    add.u32 sum, sum, t;
    add.u32 i, i, 1;
    setp.lt.u32 p, i, {each};
    @p bra ADD;
    mov.u32 c, sum;
    {_scan("sum")}
    sub.u32 sum, sum, c;
    mov.u32 i, 0;
BEGIN:
    mad.lo.u32 b, i, 4, first;
    ld.shared.u32 t, [b];
    st.shared.u32 [b], sum;
    add.u32 sum, sum, t;
    add.u32 i, i, 1;
    setp.lt.u32 p, i, {each};
    @p bra BEGIN;
BEGUN:
    bar.sync 0;
    mov.u32 before, %lanemask_lt;
    mov.u32 i, 0;
PLACE:
    add.u32 m, base, i;
    {load}
    {bin}
    match.any.sync.b32 same, b, -1;
    ld.shared.u32 n, [t];
    and.b32 c, same, before;
    popc.b32 c, c;
    add.u32 g, n, c;
    setp.eq.u32 p, c, 0;
    popc.b32 c, same;
    add.u32 c, c, n;
    bar.warp.sync -1;
    @p st.shared.u32 [t], c;
    setp.eq.u32 p, b, {heavy};
    @p mov.u32 m, -1;
    mad.lo.u32 t, $1, {BLOCK}, g;
    mad.wide.u32 at, t, 4, $5;
    st.global.u32 [at], m;
    and.b32 t, g, {GROUP - 1};
    setp.eq.u32 p, t, 0;
    shr.u32 t, g, {GROUP.bit_length() - 1};
    mad.lo.u32 t, $1, {groups}, t;
    mad.wide.u32 at, t, 16, $8;
    @p st.global.u32 [at+4], b;
    bar.warp.sync -1;
    add.u32 i, i, 32;
    setp.lt.u32 p, i, {own};
    @p bra PLACE;
    bar.sync 0;
    mov.u32 sum, 0;
    mov.u32 i, 0;
WINDOWS:
    mad.lo.u32 t, tid, {groups // threads}, i;
    mad.lo.u32 t, $1, {groups}, t;
    mad.wide.u32 at, t, 16, $8;
    ld.global.u32 b, [at+4];
    sub.u32 n, {cap + SPAN - 1}, b;
    div.u32 n, n, {SPAN};
    max.u32 n, n, 1;
    sub.u32 n, n, 1;
    setp.eq.u32 p, b, {heavy};
    @p mov.u32 n, 0;
    st.global.u32 [at+4], n;
    add.u32 sum, sum, n;
    add.u32 i, i, 1;
    setp.lt.u32 p, i, {groups // threads};
    @p bra WINDOWS;
    mov.u32 c, sum;
    {_scan("sum")}
    sub.u32 first, sum, c;
    mad.lo.u32 t, warp, 4, totals;
    setp.eq.u32 p, lane, 31;
    @p st.shared.u32 [t], sum;
    bar.sync 0;
    setp.ne.u32 p, warp, 0;
    @p bra SUMMED;
    mad.lo.u32 i, lane, 4, totals;
    mov.u32 sum, 0;
    setp.lt.u32 q, lane, {warps};
    @q ld.shared.u32 sum, [i];
    mov.u32 c, sum;
    {_scan("sum")}
    shfl.sync.idx.b32 m, sum, 31, 31, -1;
    sub.u32 sum, sum, c;
    setp.eq.u32 p, lane, 0;
    mov.u32 t, 0;
    @p atom.global.relaxed.gpu.add.u32 t, [$7], m;
    shfl.sync.idx.b32 t, t, 0, 31, -1;
    add.u32 sum, sum, t;
    @q st.shared.u32 [i], sum;
SUMMED:
    bar.sync 0;
    mad.lo.u32 t, warp, 4, totals;
    ld.shared.u32 base, [t];
    add.u32 base, base, first;
    mov.u32 i, 0;
HEADS:
    mad.lo.u32 g, tid, {groups // threads}, i;
    mad.lo.u32 g, $1, {groups}, g;
    mad.wide.u32 at, g, 16, $8;
    ld.global.u32 n, [at+4];
    add.u32 t, base, $10;
    st.global.u32 [at+8], t;
    mad.wide.u32 at, base, 4, $9;
    mov.u32 c, 0;
OWN:
    setp.lt.u32 p, c, n;
    @p st.global.u32 [at], g;
    add.u64 at, at, 4;
    add.u32 c, c, 1;
    setp.lt.u32 p, c, {cap // SPAN};
    @p bra OWN;
    add.u32 base, base, n;
    add.u32 i, i, 1;
    setp.lt.u32 p, i, {groups // threads};
    @p bra HEADS;
RANKED:
    mov.u32 $0, 0;
    }}"""


def schedule(cap: int) -> str:
    """A warp gives the entries of WINDOWS windows their slots, a thread those of a token.

    $1 the first of them; $2 how many windows there are besides the $10 groups' first ones; $3 the groups of those; $4
    the heads; $5 the order; $6 the counts and $7 the indices, int16, `cap` a row; $8 the records; $9 the steps of the
    windows that are not a group's first; $11 the flags.

    Slot by slot, each token asks for an entry of a class: in the n-th slot token t for one of class (t + n) % 8, or of
    the next after it that it has. Of tokens that ask for the same class the first gets it, and the others ask once more
    for what is left. So entries in a slot are of different classes; but those for which there is no such slot (many
    neurons of one class) take any slot in which their token has none. Where a token has no entry it reads what another
    one does, for nothing: the value is 0.
    """
    record = 32 * SLOTS
    chunk = record * CHUNK // SLOTS
    half = CHUNK // 2

    def ask(name: str) -> str:
        """p: whether the token asks for a class, and that is `cl`; q: whether it gets it."""
        return f"""
    setp.ne.u32 p, {name}, 0;
    mul.lo.u32 x, {name}, 0x101;
    shr.u32 x, x, turn;
    neg.s32 y, x;
    and.b32 x, x, y;
    bfind.u32 x, x;
    add.u32 cl, x, turn;
    and.b32 cl, cl, 7;
    add.u32 x, cl, window_8;
    @!p add.u32 x, lane, 64;
    match.any.sync.b32 x, x, -1;
    and.b32 x, x, before;
    setp.eq.and.u32 q, x, 0, p;"""

    take = """
    shl.b32 t, cl, 3;
    shr.u64 f, ptr, t;
    cvt.u32.u64 x, f;
    and.b32 x, x, 255;
    mad.lo.u32 a, x, 128, lists;
    @got ld.shared.u32 e, [a];
    shr.u64 f, end, t;
    cvt.u32.u64 y, f;
    and.b32 y, y, 255;
    add.u32 x, x, 1;
    mov.u64 f, 1;
    shl.b64 f, f, t;
    @got add.u64 ptr, ptr, f;
    setp.eq.and.u32 p, x, y, got;
    mov.u32 x, 1;
    shl.b32 x, x, cl;
    not.b32 x, x;
    @p and.b32 have, have, x;"""

    def slot(j: int) -> str:
        """Slot j of eight, from `n` on."""
        step, plane = divmod(j, 2)
        return f"""
    add.u32 turn, tok, {j};
    and.b32 turn, turn, 7;
    {ask("have")}
    mov.u32 x, 0;
    shl.b32 y, one, cl;
    shl.b32 y, y, window_8;
    @q mov.u32 x, y;
    and.pred got, q, q;
    mov.u32 was, cl;
    redux.sync.or.b32 x, x, -1;
    shr.u32 x, x, window_8;
    not.b32 x, x;
    and.b32 rest, have, x;
    @got mov.u32 rest, 0;
    {ask("rest")}
    @!q mov.u32 cl, was;
    or.pred got, got, q;
    {take}
    vote.sync.ballot.b32 x, got, -1;
    shr.u32 x, x, window_8;
    and.b32 x, x, 255;
    setp.ne.u32 p, x, 0;
    neg.s32 y, x;
    and.b32 y, x, y;
    bfind.u32 y, y;
    @!p mov.u32 y, 0;
    add.u32 y, y, window_8;
    shfl.sync.idx.b32 y, e, y, 31, -1;
    @got mov.u32 y, e;
    cvt.u16.u32 half, y;
    @p st.shared.u16 [row{step}+{128 * plane}], half;
    shr.u32 y, e, 16;
    cvt.u16.u32 half, y;
    @got st.shared.u16 [value{step}+{2 * plane}], half;
    add.u32 t, n, {j + 1};
    @p mov.u32 used, t;"""

    # The entries of a token, eight at a time.
    batch = 8
    load = "".join(
        f"""
    add.u32 t, k, {j};
    setp.lt.u32 p, t, c;
    mov.u16 h{j}, 0;
    @p ld.global.u16 h{j}, [at+{2 * j}];"""
        for j in range(batch)
    )
    count = "".join(
        f"""
    add.u32 t, k, {j};
    setp.lt.u32 p, t, c;
    cvt.u32.u16 x, h{j};
    and.b32 x, x, {CLASSES - 1};
    shl.b32 x, x, 3;
    shl.b64 f, unit, x;
    @p add.u64 end, end, f;"""
        for j in range(batch)
    )
    # Under the entry's number, its row's place in shared memory in units of half a row.
    sort = "".join(
        f"""
    add.u32 t, k, {j};
    setp.lt.u32 p, t, c;
    cvt.u32.u16 y, h{j};
    and.b32 x, y, {CLASSES - 1};
    shl.b32 x, x, 3;
    shr.u64 f, ptr, x;
    cvt.u32.u64 a, f;
    and.b32 a, a, 255;
    mad.lo.u32 a, a, 128, lists;
    shl.b64 f, unit, x;
    @p add.u64 ptr, ptr, f;
    bfe.u32 x, y, 2, 1;
    mad.lo.u32 x, y, 2, x;
    add.u32 t, t, k0;
    mad.lo.u32 x, t, 65536, x;
    @p st.shared.u32 [a], x;"""
        for j in range(batch)
    )

    def pass_over(name: str, work: str) -> str:
        return f"""
    mov.u32 k, 0;
    mov.u64 at, indices;
{name}:
    {load}
    {work}
    add.u64 at, at, {2 * batch};
    add.u32 k, k, {batch};
    setp.lt.u32 p, k, limit;
    @p bra {name};"""

    places = "".join(
        f"""
    add.u32 t, pair, {s};
    and.b32 t, t, 3;
    mad.lo.u32 x, t, 2, odd;
    mad.lo.u32 row{s}, x, 16, images;
    add.u32 row{s}, row{s}, {2 * s};
    mad.lo.u32 x, tok, 4, t;
    mad.lo.u32 value{s}, x, 8, images;
    add.u32 value{s}, value{s}, 256;"""
        for s in range(4)
    )
    forward = "".join(
        f"add.u32 row{s}, row{s}, {{0}}; add.u32 value{s}, value{s}, {{1}};" for s in range(4)
    )
    # The second four steps of a chunk; then the next chunk.
    second, following = forward.format(8, 4), forward.format(chunk - 8, chunk - 4)
    spare = ""
    for j in range(half):
        step, plane = divmod(j, 2)
        spare += f"""
    ld.shared.u16 half, [value{step}+{2 * plane}];
    cvt.u32.u16 x, half;
    setp.eq.u32 got, x, 0xffff;
    setp.ne.and.u32 got, have, 0, got;
    neg.s32 y, have;
    and.b32 y, have, y;
    bfind.u32 cl, y;
    @!got mov.u32 cl, 0;
    {take}
    cvt.u16.u32 half, e;
    @got st.shared.u16 [row{step}+{128 * plane}], half;
    shr.u32 y, e, 16;
    cvt.u16.u32 half, y;
    @got st.shared.u16 [value{step}+{2 * plane}], half;"""
    return f"""{{
    .reg .pred p, q, got, mine, further;
    .reg .b16 half, {", ".join(f"h{j}" for j in range(batch))};
    .reg .b32 x, y, e;
    .reg .u32 lane, tok, pair, odd, window_8, w, g, k0, k, n, c, limit, used, a, t, j, m, total, one, before;
    .reg .u32 lists, images, turn, cl, was, have, rest, {
        ", ".join(f"row{s}, value{s}" for s in range(4))
    };
    .reg .u64 at, to, indices, f, unit, ptr, end;
    .shared .align 16 .b8 ffn_image[{WINDOWS * record}];
    .shared .align 16 .b8 ffn_lists[{32 * 4 * SPAN}];
    mov.u32 lane, %laneid;
    mov.u32 before, %lanemask_lt;
    mov.u32 one, 1;
    mov.u64 unit, 1;
    and.b32 tok, lane, 7;
    shr.u32 pair, tok, 1;
    and.b32 odd, tok, 1;
    and.b32 window_8, lane, 24;
    shr.u32 t, lane, 3;
    add.u32 w, $1, t;
    ld.global.u32 total, [$2];
    add.u32 total, total, $10;
    setp.ge.u32 p, $1, total;
    @p bra DONE;
    setp.lt.u32 mine, w, total;
    mov.u32 g, w;
    sub.u32 j, w, $10;
    setp.ge.and.u32 further, w, $10, mine;
    mad.wide.u32 at, j, 4, $3;
    @further ld.global.u32 g, [at];
    shr.u32 t, g, {(BLOCK // GROUP).bit_length() - 1};
    mad.wide.u32 at, t, 4, $11;
    mov.u32 t, 0;
    @mine ld.global.u32 t, [at];
    setp.ne.and.u32 mine, t, 0, mine;
    mov.u32 k0, 0;
    mad.wide.u32 at, g, 16, $4;
    @further ld.global.u32 k0, [at+8];
    @further sub.u32 k0, w, k0;
    @further add.u32 k0, k0, 1;
    mul.lo.u32 k0, k0, {SPAN};
    mad.lo.u32 t, g, {GROUP}, tok;
    mad.wide.u32 at, t, 4, $5;
    mov.u32 m, -1;
    @mine ld.global.u32 m, [at];
    setp.ge.s32 p, m, 0;
    mov.u32 c, 0;
    mad.wide.u32 at, m, 4, $6;
    @p ld.global.u32 c, [at];
    sub.u32 c, c, k0;
    @!p mov.u32 c, 0;
    max.s32 c, c, 0;
    min.u32 c, c, {SPAN};
    mad.lo.u32 t, m, {cap}, k0;
    mad.wide.u32 indices, t, 2, $7;
    mov.u32 images, ffn_image;
    mad.lo.u32 a, lane, 16, images;
    setp.lt.u32 p, lane, 16;
    selp.b32 x, 0, -1, p;
    {
        "".join(
            f"st.shared.v4.b32 [a+{512 * j}], {{x, x, x, x}};"
            for j in range(WINDOWS * record // 512)
        )
    }
    shr.u32 t, lane, 3;
    mad.lo.u32 images, t, {record}, images;
    {places}
    mov.u32 lists, ffn_lists;
    mad.lo.u32 lists, lane, 4, lists;
    redux.sync.max.u32 limit, c, -1;
    mov.u32 used, 0;
    mov.u32 e, 0;
    setp.eq.u32 p, limit, 0;
    @p bra PLACED;
    mov.u64 end, 0;
    {pass_over("COUNT", count)}
    mov.u32 have, 0;
    {
        "".join(
            f"shr.u64 f, end, {8 * c}; cvt.u32.u64 x, f; and.b32 x, x, 255; setp.ne.u32 p, x, 0;"
            f" @p or.b32 have, have, {1 << c};"
            for c in range(CLASSES)
        )
    }
    mul.lo.u64 end, end, 0x0101010101010101;
    shl.b64 ptr, end, 8;
    {pass_over("SORT", sort)}
    shl.b64 ptr, end, 8;
    bar.warp.sync -1;
    mov.u32 n, 0;
SLOTS:
    {"".join(map(slot, range(half)))}
    add.u32 n, n, {half};
    and.b32 t, n, {half};
    setp.eq.u32 p, t, 0;
    @p bra FOLLOWING;
    {second}
    bra ON;
FOLLOWING:
    {following}
ON:
    setp.ne.u32 p, have, 0;
    vote.sync.any.pred p, p, -1;
    setp.lt.and.u32 q, n, {SLOTS}, p;
    @q bra SLOTS;
    @!p bra PLACED;
    {places}
    mov.u32 n, 0;
SPARE:
    {spare}
    add.u32 n, n, {half};
    and.b32 t, n, {half};
    setp.eq.u32 p, t, 0;
    @p bra SPARE_FOLLOWING;
    {second}
    bra SPARE_ON;
SPARE_FOLLOWING:
    {following}
SPARE_ON:
    setp.lt.u32 p, n, {SLOTS};
    @p bra SPARE;
PLACED:
    bar.warp.sync -1;
    add.u32 used, used, 1;
    shr.u32 used, used, 1;
    mad.wide.u32 at, g, 16, $4;
    mad.wide.u32 to, j, 4, $9;
    @further mov.u64 at, to;
    setp.eq.and.u32 p, tok, 0, mine;
    @p st.global.u32 [at], used;
    add.u32 used, used, 7;
    shr.u32 used, used, 3;
    @!mine mov.u32 used, 0;
    mov.u32 images, ffn_image;
    mad.lo.u32 images, lane, 16, images;
    mov.u32 m, 0;
WINDOW:
    shl.b32 t, m, 3;
    shfl.sync.idx.b32 n, used, t, 31, -1;
    mad.lo.u32 a, m, {record}, images;
    add.u32 t, $1, m;
    mad.wide.u32 to, t, {record}, $8;
    mad.wide.u32 to, lane, 16, to;
    add.u32 m, m, 1;
CHUNK:
    setp.eq.u32 p, n, 0;
    @p bra WRITTEN;
    ld.shared.v4.b32 {{x, y, e, t}}, [a];
    st.global.v4.b32 [to], {{x, y, e, t}};
    add.u32 a, a, {chunk};
    add.u64 to, to, {chunk};
    sub.u32 n, n, 1;
    bra CHUNK;
WRITTEN:
    setp.lt.u32 p, m, {WINDOWS};
    @p bra WINDOW;
DONE:
    mov.u32 $0, 0;
    }}"""


def sums(kind: str, shares: int, has_bias: bool) -> str:
    """Sum the rows of a slice of the table for all groups of tokens.

    $1 the slice's first feature of the result, whose rows have $2 bytes; $3 the order; $4 the heads; $5 the steps of
    windows that are not a group's first; $6 the records; $7 how many groups; $8 the share; $9 the slice's biases. The
    table is in shared memory from `global_smem` on, a row 32 bytes, its halves changed about where bit 2 of its number
    is set. kind: "bf16" or "f16".

    A step is two slots: rows of the second operand are its 16 entries, of which token n has one of each slot, so that
    a lane knows where its part of the values belongs, and features are rows of the product. A warp takes group by
    group, and asks for a chunk, and for the next group's head, while it is at the chunk before.
    """
    product = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    from_bias = ""
    if has_bias:
        from_bias = f"""
    mad.wide.u32 at, tok, 2, $9;
    ld.global.b16 half, [at];
    cvt.f32.{kind} bias0, half;
    ld.global.b16 half, [at+16];
    cvt.f32.{kind} bias1, half;"""
    take = f"""
    setp.eq.u32 p, lane, 0;
    mov.u32 group, 0;
    @p atom.shared.add.u32 group, [ffn_taken], one;
    shfl.sync.idx.b32 group, group, 0, 31, -1;
    mad.lo.u32 group, group, {shares}, $8;"""
    # The halves of a word as a lane's part of the second operand, where the step is one of its own.
    select = "".join(
        f"""
    shr.u32 t, tok, 1;
    add.u32 t, t, {s};
    and.b32 t, t, 3;
    setp.eq.u32 stored, t, q;
    selp.b32 low{s}, 0x4410, 0x1044, p;
    selp.b32 high{s}, 0x4432, 0x3244, p;
    selp.b32 low{s}, low{s}, 0x4444, stored;
    selp.b32 high{s}, high{s}, 0x4444, stored;"""
        for s in range(4)
    )

    def turn(now: str, then: str) -> str:
        """From a chunk in registers {now}i to one in {then}i; a group may begin and end in either of two."""
        chunk = f"""
    ld.global.v4.b32 {{{then}0, {then}1, {then}2, {then}3}}, [ia];
    add.u64 at, ia, values;
    ld.global.v2.b32 {{{then}4, {then}5}}, [at];"""
        steps = ""
        for s in range(8):
            word = f"{now}{s // 2}"
            if s % 2 == 0:
                steps += f"xor.b32 {word}, {word}, across; and.b32 t, {word}, 0xffff;"
            else:
                steps += f"shr.u32 t, {word}, 16;"
            value = f"{now}{4 + s // 4}"
            steps += f"""
    mad.lo.u32 a, t, 16, own;
    ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{a0, a1, a2, a3}}, [a];
    prmt.b32 b0, {value}, 0, low{s % 4};
    prmt.b32 b1, {value}, 0, high{s % 4};
    {product} {{d0, d1, d2, d3}}, {{a0, a1, a2, a3}}, {{b0, b1}}, {{d0, d1, d2, d3}};"""
            if s in (1, 3, 5):
                steps += f"setp.le.u32 p, left, {s + 1}; @p bra NEXT{now};"
        at, name = now.upper(), then.upper()
        return f"""
GROUP{at}:
    setp.ge.u32 p, group, $7;
    @p bra DONE;
    mov.u32 m, m_then;
    mov.u32 left, left_then;
    mov.u32 more, more_then;
    mov.u32 next, next_then;
    {take}
    mov.f32 d0, bias0;
    mov.f32 d1, bias0;
    mov.f32 d2, bias1;
    mov.f32 d3, bias1;
STEPS{at}:
    setp.gt.u32 p, left, 8;
    @p bra SAME{at};
    setp.ne.u32 p, more, 0;
    @p bra FURTHER{at};
    min.u32 t, group, last;
    mad.wide.u32 at, t, {4 * GROUP}, $3;
    mad.wide.u32 at, tok, 4, at;
    ld.global.u32 m_then, [at];
    mad.wide.u32 at, t, 16, $4;
    ld.global.v4.b32 {{left_then, more_then, next_then, e}}, [at];
    mad.wide.u32 ia, t, {32 * SLOTS}, rows;
    {chunk}
    setp.ne.u32 p, left, 0;
    @p bra MULTIPLY{at};
    bra SUMMED{at};
FURTHER{at}:
    sub.u32 t, next, $7;
    mad.wide.u32 at, t, 4, $5;
    ld.global.u32 left_then, [at];
    mad.wide.u32 ia, next, {32 * SLOTS}, rows;
    {chunk}
    bra MULTIPLY{at};
SAME{at}:
    add.u64 ia, ia, 512;
    {chunk}
MULTIPLY{at}:
    {steps.replace(f"NEXT{now}", f"NEXT{at}")}
    setp.le.u32 p, left, 8;
    @p bra NEXT{at};
    sub.u32 left, left, 8;
    bra STEPS{name};
NEXT{at}:
    setp.eq.u32 p, more, 0;
    @p bra SUMMED{at};
    sub.u32 more, more, 1;
    add.u32 next, next, 1;
    mov.u32 left, left_then;
    bra STEPS{name};
SUMMED{at}:
    cvt.rn.{kind}x2.f32 a0, d1, d0;
    cvt.rn.{kind}x2.f32 a1, d3, d2;
    movmatrix.sync.aligned.m8n8.trans.b16 a0, a0;
    movmatrix.sync.aligned.m8n8.trans.b16 a1, a1;
    setp.ge.s32 stored, m, 0;
    mad.wide.u32 at, m, $2, out;
    @stored st.global.b32 [at], a0;
    @stored st.global.b32 [at+16], a1;
    bra GROUP{name};"""

    return f"""{{
    .reg .pred p, stored;
    .reg .b16 half;
    .reg .b32 a0, a1, a2, a3, b0, b1, e, x<6>, y<6>, low<4>, high<4>;
    .reg .f32 d<4>, bias<2>;
    .reg .u32 lane, q, tok, own, group, last, m, more, next, left, t, a, across, one;
    .reg .u32 m_then, more_then, next_then, left_then;
    .reg .u64 at, ia, out, rows, values;
    .shared .align 4 .u32 ffn_taken;
    mov.u32 lane, %laneid;
    and.b32 q, lane, 3;
    shr.u32 tok, lane, 2;
    mov.u32 one, 1;
    sub.u32 last, $7, 1;
    mad.wide.u32 out, q, 4, $1;
    and.b32 t, tok, 1;
    setp.eq.u32 p, t, 0;
    {select}
    and.b32 t, lane, 7;
    mad.wide.u32 rows, t, 16, $6;
    shr.u32 t, lane, 4;
    mad.wide.u32 rows, t, 128, rows;
    mad.wide.u32 values, lane, 8, $6;
    sub.u64 values, values, rows;
    add.u64 values, values, 256;
    mov.f32 bias0, 0f00000000;
    mov.f32 bias1, 0f00000000;
    {from_bias}
    mov.u32 own, global_smem;
    bfe.u32 t, lane, 3, 1;
    mul.lo.u32 across, t, 0x00010001;
    mov.u32 t, %tid.x;
    setp.eq.u32 p, t, 0;
    mov.u32 t, 0;
    @p st.shared.u32 [ffn_taken], t;
    bar.sync 0;
    {take}
    mov.u32 left, 0;
    mov.u32 more, 0;
    mov.u32 m, -1;
    mov.f32 d0, bias0;
    mov.f32 d1, bias0;
    mov.f32 d2, bias1;
    mov.f32 d3, bias1;
    bra STEPSY;
{turn("x", "y")}
{turn("y", "x")}
DONE:
    mov.u32 $0, 0;
    }}"""
