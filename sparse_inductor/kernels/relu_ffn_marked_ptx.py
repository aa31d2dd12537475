"""Packing from marks as PTX, for NVIDIA GPUs: counts are bit planes, places are scans of a warp, and what a warp lists
stays in shared memory, none of which Triton's blocks have words for. `relu_ffn_marked` uses this string.
"""

from __future__ import annotations

import functools
import math

from .relu_ffn_packing import DENSE, LINE, LISTED, ONE_BLOCK, ONE_HEAVY, ONE_ROW, POOLED, TALLIES

__all__ = ["LISTED_AT_ONCE", "WARPS", "pack"]

# Words of marks of a tile of 256 neurons, one lane's.
TILE = 8
# Warps of a block: with pools, and without.
WARPS = {True: 32, False: 8}
# Entries that a warp lists at a time: twice its lanes.
LISTED_AT_ONCE = 64
# Bit planes of how many of 128 rows have a neuron active, and a neuron of so many rows pays in a pool.
PLANES = 8
LEAST = 3


def _add(total: str, carry: str, a: str, b: str, c: str) -> str:
    """Add three bits in each of 32 places."""
    return f"""
    lop3.b32 sum, {a}, {b}, {c}, 0x96;
    lop3.b32 {carry}, {a}, {b}, {c}, 0xE8;
    mov.b32 {total}, sum;"""


def _add_eight() -> str:
    """Add words r0 to r7 to the planes."""
    done = (
        _add("r0", "r1", "r0", "r1", "r2")
        + _add("r3", "r4", "r3", "r4", "r5")
        + _add("r6", "r7", "r6", "r7", "p0")
        + _add("p0", "r0", "r0", "r3", "r6")
        + _add("r1", "r4", "r1", "r4", "r7")
        + _add("p1", "r0", "r0", "r1", "p1")
        + _add("p2", "r0", "r0", "r4", "p2")
    )
    for i in range(3, PLANES):
        done += f"""
    and.b32 sum, p{i}, r0;
    xor.b32 p{i}, p{i}, r0;
    mov.b32 r0, sum;"""
    return done


def _neuron(base: str) -> str:
    """n: the neuron of the lowest mark, `low`, of a word whose first is `base`."""
    return f"""
    bfind.u32 n, low;
    shr.u32 t, n, 1;
    and.b32 n, n, 1;
    mad.lo.u32 n, t, 8, n;
    add.u32 n, n, {base};"""


def _first(t: int) -> int:
    """The first neuron of word t of a tile."""
    return t % 2 * 128 + t // 2 * 2


def _words(to: str, at: str, when: str) -> str:
    """A lane's words of a tile from `at` on, or zeros."""
    return "".join(f"mov.b32 {to}{t}, 0;" for t in range(TILE)) + "".join(
        f"""
    @{when} ld.global.v4.b32 {{{", ".join(f"{to}{t}" for t in range(h, h + 4))}}}, [{at}+{4 * h}];"""
        for h in range(0, TILE, 4)
    )


def _count() -> str:
    """c: marks of row m."""
    return f"""
    mad.wide.u32 row, m, $words4, $3;
    mov.u32 c, 0;
    mov.u32 k, lane;
COUNT:
    setp.lt.u32 here, k, $tiles;
    mad.wide.u32 at, k, {4 * TILE}, row;
    {_words("w", "at", "here")}
    {"".join(f"popc.b32 t, w{t}; add.u32 c, c, t;" for t in range(TILE))}
    add.u32 k, k, 32;
    sub.u32 t, k, lane;
    setp.lt.u32 p, t, $tiles;
    @p bra COUNT;
    redux.sync.add.u32 c, c, -1;
    min.u32 c, c, $cap1;"""


def _choose(size: int, entries: int) -> str:
    """A block's pool: of word w, thread w's, those of whose neurons enough rows have active, `keep`; their places are
    from `before` on, and there are n_pool."""
    def total(x: str, to: str) -> str:
        return f"""
    redux.sync.add.u32 t, {x}, -1;
    @first_lane red.shared.add.u32 [{to}], t;"""

    descend = "".join(
        f"""
    and.b32 has, equal, p{i};
    or.b32 t, above, has;
    popc.b32 t, t;
    {total("t", f"tallies+{4 * i}")}
    bar.sync 0;
    ld.shared.u32 t, [tallies+{4 * i}];
    setp.gt.u32 p, t, {size};
    not.b32 t, has;
    and.b32 t, t, equal;
    selp.b32 equal, has, t, p;
    or.b32 t, above, has;
    selp.b32 above, above, t, p;"""
        for i in reversed(range(PLANES))
    )  # fmt: skip
    weigh = "mov.u32 c, 0;" + "".join(
        f"and.b32 t, p{i}, above; popc.b32 t, t; mad.lo.u32 c, t, {1 << i}, c;"
        for i in range(PLANES)
    )
    rows = "".join(
        f"""
    ld.shared.u32 t, [place+{4 * r}];
    setp.lt.and.u32 p, t, $cap1, mine;
    mov.b32 r{r}, 0;
    @p ld.global.b32 r{r}, [at];
    add.u64 at, at, step;"""
        for r in range(8)
    )
    return f"""
    mov.u32 w, %tid.x;
    setp.lt.u32 mine, w, $words;
    mov.u64 step, $words4;
    mul.lo.u32 m, $1, $rows;
    mad.wide.u32 at, m, $words4, $3;
    mad.wide.u32 at, w, 4, at;
    {"".join(f"mov.b32 p{i}, 0;" for i in range(PLANES))}
    mov.u32 place, counts;
    add.u32 end, place, {4 * 128};
ROWS:
    {rows}
    {_add_eight()}
    add.u32 place, place, 32;
    setp.lt.u32 p, place, end;
    @p bra ROWS;
    mov.b32 equal, -1;
    mov.b32 above, 0;
    {descend}
    or.b32 t, p2, p3;
    {"".join(f"or.b32 t, t, p{i};" for i in range(4, PLANES))}
    and.b32 has, p0, p1;
    or.b32 t, t, has;
    and.b32 above, above, t;
    {weigh}
    {total("c", f"tallies+{4 * PLANES}")}
    popc.b32 before, above;
    {_scan("before", "own")}
    shr.u32 t, w, 5;
    mad.lo.u32 t, t, 4, totals;
    setp.eq.u32 p, lane, 31;
    @p st.shared.u32 [t], before;
    sub.u32 before, before, own;
    bar.sync 0;
    ld.shared.u32 t, [tallies+{4 * PLANES}];
    setp.ge.u32 pools, t, {entries};
    mad.lo.u32 t, lane, 4, totals;
    ld.shared.u32 t, [t];
    shr.u32 n, w, 5;
    setp.lt.u32 p, lane, n;
    selp.u32 n, t, 0, p;
    redux.sync.add.u32 n, n, -1;
    add.u32 before, before, n;
    redux.sync.add.u32 n_pool, t, -1;
    selp.u32 n_pool, n_pool, 0, pools;
    selp.b32 keep, above, 0, pools;
    mad.lo.u32 t, w, 4, masks;
    @mine st.shared.b32 [t], keep;
    shr.u32 t, w, 3;
    mad.lo.u32 t, t, 4, places;
    and.b32 n, w, 7;
    setp.eq.and.u32 p, n, 0, mine;
    @p st.shared.u32 [t], before;
    shr.u32 base, w, 3;
    and.b32 t, w, 1;
    mul.lo.u32 t, t, 128;
    mad.lo.u32 base, base, 256, t;
    and.b32 t, w, 6;
    add.u32 base, base, t;
    mul.lo.u32 t, $1, {size};
    mad.wide.u32 at, t, 4, $14;
    mad.wide.u32 at, before, 4, at;
CHOSEN:
    setp.ne.and.b32 p, keep, 0, mine;
    vote.sync.any.pred q, p, -1;
    @!q bra NAMED;
    neg.s32 low, keep;
    and.b32 low, low, keep;
    xor.b32 keep, keep, low;
    {_neuron("base")}
    @p st.global.u32 [at], n;
    add.u64 at, at, 4;
    bra CHOSEN;
NAMED:
    setp.eq.u32 p, w, 0;
    mad.wide.u32 at, $1, 4, $13;
    @p st.global.u32 [at], n_pool;
    bar.sync 0;"""


def _scan(x: str, own: str) -> str:
    """x of all lanes up to this one; `own` is what it was."""
    return f"mov.b32 {own}, {x};" + "".join(
        f"""
    shfl.sync.up.b32 t|p, {x}, {1 << i}, 0, -1;
    @p add.u32 {x}, {x}, t;"""
        for i in range(5)
    )


def _list(pools: bool) -> str:
    """List a tile's entries, places `window` to `window` + LISTED_AT_ONCE of the warp's, each with where it goes."""
    listed = ""
    for t in range(TILE):
        where = f"""
    and.b32 t, low, mask{t};
    setp.ne.and.b32 pooled, t, 0, p;
    setp.eq.and.b32 strays, t, 0, p;
    sub.u32 t, low, 1;
    and.b32 t, t, mask{t};
    popc.b32 t, t;
    add.u32 t, t, slot;
    or.b32 t, t, 32768;
    selp.b32 t, t, stray, pooled;
    mad.lo.u32 n, t, 65536, n;
    @strays add.u32 stray, stray, 1;"""
        listed += f"""
    mov.b32 v, w{t};
LIST{t}:
    setp.ne.b32 p, v, 0;
    vote.sync.any.pred q, p, -1;
    @!q bra DONE{t};
    neg.s32 low, v;
    and.b32 low, low, v;
    xor.b32 v, v, low;
    {_neuron(f"{_first(t)}")}
    add.u32 n, n, base;
    {where if pools else ""}
    sub.u32 t, place, window;
    setp.lt.and.u32 q, t, {LISTED_AT_ONCE}, p;
    mad.lo.u32 t, t, 4, list;
    @q st.shared.u32 [t], n;
    @p add.u32 place, place, 1;
    bra LIST{t};
DONE{t}:"""
        if pools:
            listed += f"""
    popc.b32 t, mask{t};
    add.u32 slot, slot, t;"""
    return listed


def _put(pools: bool, wide: bool) -> str:
    """Write what is listed, places `window` on of `many`, two entries a lane."""
    halves = range(LISTED_AT_ONCE // 32)
    load = "".join(
        f"""
    add.u32 t, lane, {32 * h};
    add.u32 n, t, window;
    setp.lt.u32 there{h}, n, many;
    mad.lo.u32 t, t, 4, list;
    mov.u32 item{h}, 0;
    @there{h} ld.shared.u32 item{h}, [t];
    {"and.b32 t, item" + str(h) + ", 32767;" if pools else f"mov.u32 t, item{h};"}
    mad.wide.u32 at, t, 2, gates;
    @there{h} ld.global.u16 gate{h}, [at];"""
        for h in halves
    )
    store = ""
    for h in halves:
        if pools:
            store += f"""
    shr.u32 t, item{h}, 16;
    setp.ge.and.u32 pooled, t, 32768, there{h};
    and.b32 n, t, 32767;
    mad.lo.u32 t, n, 2, slots;
    @pooled st.shared.u16 [t], gate{h};
    not.pred p, pooled;
    and.pred there{h}, there{h}, p;
    and.b32 t, item{h}, 32767;"""
        else:
            store += f"""
    add.u32 n, lane, {32 * h};
    add.u32 n, n, window;
    add.u32 n, n, done;
    mov.u32 t, item{h};"""
        store += f"""
    mad.wide.u32 at, n, {4 if wide else 2}, indices;
    @there{h} st.global.u{32 if wide else 16} [at], t;
    mad.wide.u32 at, n, 2, values;
    @there{h} st.global.u16 [at], gate{h};"""
    return load + store


@functools.cache
def pack(
    words: int,
    N: int,
    cap: int,
    piece: int,
    pieces: int,
    wide: bool,
    rows: int,
    size: int = 0,
    entries: int = 0,
) -> str:
    """A block packs `rows` rows from their marks, $3, `words` words each, and the gates of 16 bits, $4, N each.

    $1 the block, of $11; $2 rows there are; $5 the counts; $6 the indices, int32 if `wide` else int16, and $7 the
    values, `cap` a row; $8 the state and $9 the heavy rows, of `relu_ffn_packing`; $10 the pieces, `pieces` of a row at
    most; $12 entries that cost as much as a row of the dense path, fp32.

    size: neurons of a block's pool at most, of 128 rows, if it is not 0. $13 the sizes, and $14 the neurons of each;
    $15 the values of its rows. A pool is the neurons that at least t of its packed rows have active, t the least that
    `size` allows and LEAST at least; there is none where those are less than `entries` entries.

    Counts are numbers of as many bits as there are planes, a word of marks a thread. A warp takes a row at a time: a
    lane lists the entries of a tile of 256 neurons, then lanes take entries in turn. The last block decides whether all
    rows take the dense path.
    """
    pools = size > 0
    warps = WARPS[pools]
    tiles = words // TILE
    shared = {"lists": 4 * LISTED_AT_ONCE * warps, "tallies": 4 * (PLANES + 2)}
    if pools:
        shared |= {
            "pool_rows": 2 * size * warps, "masks": 4 * words, "places": 4 * tiles,
            "counts": 4 * rows, "totals": 4 * 32,
        }  # fmt: skip
    declared = "".join(
        f".shared .align 16 .b8 ffn_{n}[{s}]; .reg .u32 {n};" for n, s in shared.items()
    )
    named = "".join(f"mov.u32 {n}, ffn_{n};" for n in shared)
    own_tile = _words("w", "at", "here")
    if pools:
        own_tile += "".join(f"mov.b32 mask{t}, 0;" for t in range(TILE))
        own_tile += f"""
    mad.lo.u32 t, k, {4 * TILE}, masks;
    @here ld.shared.v4.b32 {{mask0, mask1, mask2, mask3}}, [t];
    @here ld.shared.v4.b32 {{mask4, mask5, mask6, mask7}}, [t+16];
    mad.lo.u32 t, k, 4, places;
    mov.u32 slot_first, 0;
    @here ld.shared.u32 slot_first, [t];"""
    marks = "mov.u32 place_first, 0;" + "".join(
        f"popc.b32 t, w{t}; add.u32 place_first, place_first, t;"
        + (
            f"not.b32 t, mask{t}; and.b32 t, t, w{t}; popc.b32 t, t; mad.lo.u32 place_first, t, 65536, place_first;"
            if pools
            else ""
        )
        for t in range(TILE)
    )
    zero_pool_row = "".join(
        f"mad.lo.u32 t, lane, 16, slots; st.shared.v4.b32 [t+{i}], {{zero, zero, zero, zero}};"
        for i in range(0, 2 * size, 512)
    )
    copy_pool_row = f"""
    bar.warp.sync -1;
    mad.wide.u32 at, m, {2 * size}, $15;
    mad.wide.u32 at, lane, 16, at;
    mad.lo.u32 n, lane, 16, slots;
    add.u32 c, n_pool, 63;
    shr.u32 c, c, 6;
    mul.lo.u32 c, c, 128;""" + "".join(
        f"""
    mad.lo.u32 t, lane, 16, {i};
    setp.lt.u32 p, t, c;
    @p ld.shared.v4.b32 {{w0, w1, w2, w3}}, [n+{i}];
    @p st.global.v4.b32 [at+{i}], {{w0, w1, w2, w3}};"""
        for i in range(0, 2 * size, 512)
    )
    choose = (
        f"""
    mov.u32 r, warp;
COUNTED:
    mad.lo.u32 m, $1, {rows}, r;
    mov.u32 c, $cap1;
    setp.lt.u32 p, m, $2;
    @!p bra NO_ROW;
    {_count()}
NO_ROW:
    mad.lo.u32 t, r, 4, counts;
    @first_lane st.shared.u32 [t], c;
    add.u32 r, r, {warps};
    setp.lt.u32 p, r, {rows};
    @p bra COUNTED;
    bar.sync 0;
    {_choose(size, entries)}"""
        if pools
        else ""
    )
    count_row = (
        """
    mad.lo.u32 t, r, 4, counts;
    ld.shared.u32 c, [t];"""
        if pools
        else _count()
    )
    body = f"""{{
    .reg .pred p, q, here, mine, pools, pooled, strays, first_lane, last, there0, there1;
    .reg .b32 sum, equal, above, has, keep, low, v, zero, w<8>, r<8>, p<{PLANES}>, mask<8>;
    .reg .u32 lane, warp, w, r, m, c, k, t, n, own, before, n_pool, base, place, place_first, stray, stray_first;
    .reg .u32 slot, slot_first, window, many, done, kept, list, slots, end, item0, item1, gate0, gate1, low32, high32;
    .reg .u64 at, row, step, gates, indices, values, add, old, one;
    .reg .f32 x, y;
    {declared}
    {named}
    mov.u32 lane, %laneid;
    mov.u32 warp, %tid.x;
    shr.u32 warp, warp, 5;
    setp.eq.u32 first_lane, lane, 0;
    mov.b32 zero, 0;
    mov.u32 n_pool, 0;
    mov.u32 kept, 0;
    mad.lo.u32 list, warp, {4 * LISTED_AT_ONCE}, lists;
    {f"mad.lo.u32 slots, warp, {2 * size}, pool_rows;" if pools else ""}
    mad.lo.u32 t, lane, 4, tallies;
    setp.lt.u32 p, lane, {PLANES + 2};
    mov.u32 n, %tid.x;
    setp.lt.and.u32 p, n, 32, p;
    @p st.shared.u32 [t], zero;
    bar.sync 0;
    {choose}
    mov.u32 r, warp;
ROW:
    mad.lo.u32 m, $1, {rows}, r;
    setp.lt.u32 p, m, $2;
    @!p bra PACKED;
    {count_row}
    setp.lt.u32 p, c, $cap1;
    @p bra PACK;
    mad.wide.u32 at, m, 4, $5;
    @first_lane st.global.u32 [at], c;
    and.b32 t, m, {TALLIES.value - 1};
    mad.wide.u32 at, t, {8 * LINE.value}, $8;
    mov.u64 one, {ONE_HEAVY.value};
    @first_lane atom.global.relaxed.gpu.add.u64 old, [at], one;
    shr.u64 old, old, {int(math.log2(ONE_HEAVY.value))};
    cvt.u32.u64 n, old;
    and.b32 n, n, {ONE_ROW.value // ONE_HEAVY.value - 1};
    add.u32 c, $2, {TALLIES.value - 1};
    shr.u32 c, c, {TALLIES.value.bit_length() - 1};
    mad.lo.u32 n, t, c, n;
    mad.wide.u32 at, n, 4, $9;
    @first_lane st.global.u32 [at], m;
    bra PACKED;
PACK:
    mad.wide.u32 row, m, $words4, $3;
    mad.wide.u32 gates, m, {2 * N}, $4;
    mad.wide.u32 indices, m, {cap * (4 if wide else 2)}, $6;
    mad.wide.u32 values, m, {2 * cap}, $7;
    bar.warp.sync -1;
    {zero_pool_row if pools else ""}
    mov.u32 done, 0;
    mov.u32 k, lane;
CHUNK:
    setp.lt.u32 here, k, $tiles;
    mad.wide.u32 at, k, {4 * TILE}, row;
    {own_tile}
    mul.lo.u32 base, k, 256;
    {marks}
    {_scan("place_first", "own")}
    shfl.sync.idx.b32 many, place_first, 31, 31, -1;
    sub.u32 place_first, place_first, own;
    {f"shr.u32 stray_first, place_first, 16; add.u32 stray_first, stray_first, done; and.b32 place_first, place_first, 65535;" if pools else ""}
    {"shr.u32 t, many, 16; and.b32 many, many, 65535; mov.u32 own, t;" if pools else "mov.u32 own, many;"}
    mov.u32 window, 0;
WINDOW:
    mov.u32 place, place_first;
    {"mov.u32 stray, stray_first; mov.u32 slot, slot_first;" if pools else ""}
    {_list(pools)}
    bar.warp.sync -1;
    {_put(pools, wide)}
    bar.warp.sync -1;
    add.u32 window, window, {LISTED_AT_ONCE};
    setp.lt.u32 p, window, many;
    @p bra WINDOW;
    add.u32 done, done, own;
    add.u32 k, k, 32;
    sub.u32 t, k, lane;
    setp.lt.u32 p, t, $tiles;
    @p bra CHUNK;
    {copy_pool_row if pools else ""}
    mad.wide.u32 at, m, 4, $5;
    @first_lane st.global.u32 [at], done;
    add.u32 kept, kept, done;
    setp.le.u32 p, done, {piece};
    @p bra PACKED;
    add.u32 n, done, {piece - 1};
    div.u32 n, n, {piece};
    cvt.u64.u32 one, n;
    @first_lane atom.global.relaxed.gpu.add.u64 old, [$8+{8 * LISTED.value}], one;
    cvt.u32.u64 t, old;
    shfl.sync.idx.b32 t, t, 0, 31, -1;
    mad.wide.u32 at, t, 4, $10;
    mov.u32 k, lane;
PIECE:
    setp.lt.u32 p, k, n;
    mad.wide.u32 row, k, 4, at;
    mad.lo.u32 t, m, {pieces}, k;
    @p st.global.u32 [row], t;
    add.u32 k, k, 32;
    sub.u32 t, k, lane;
    setp.lt.u32 p, t, n;
    @p bra PIECE;
PACKED:
    add.u32 r, r, {warps};
    setp.lt.u32 p, r, {rows};
    @p bra ROW;
    @first_lane red.shared.add.u32 [tallies+{4 * (PLANES + 1)}], kept;
    bar.sync 0;
    setp.ne.u32 p, warp, 0;
    @p bra OUT;
    ld.shared.u32 t, [tallies+{4 * (PLANES + 1)}];
    setp.gt.u32 p, n_pool, 0;
    @p add.u32 t, t, {entries};
    cvt.u64.u32 add, t;
    add.u64 add, add, {ONE_BLOCK.value};
    membar.gl;
    @first_lane atom.global.relaxed.gpu.add.u64 old, [$8+{8 * POOLED.value}], add;
    add.u64 old, old, add;
    cvt.u32.u64 low32, old;
    shr.u64 old, old, 32;
    cvt.u32.u64 high32, old;
    shfl.sync.idx.b32 low32, low32, 0, 31, -1;
    shfl.sync.idx.b32 high32, high32, 0, 31, -1;
    shr.u32 t, high32, {int(math.log2(ONE_BLOCK.value)) - 32};
    setp.ne.u32 p, t, $11;
    @p bra OUT;
    membar.gl;
    mad.wide.u32 at, lane, {8 * LINE.value}, $8;
    mov.u64 one, 0;
    atom.global.relaxed.gpu.add.u64 old, [at], one;
    shr.u64 old, old, {int(math.log2(ONE_HEAVY.value))};
    cvt.u32.u64 n, old;
    and.b32 n, n, {ONE_ROW.value // ONE_HEAVY.value - 1};
    redux.sync.add.u32 n, n, -1;
    and.b32 high32, high32, {ONE_BLOCK.value // 2**32 - 1};
    cvt.rn.f32.u32 x, high32;
    cvt.rn.f32.u32 y, low32;
    fma.rn.f32 x, x, 0f4F800000, y;
    cvt.rn.f32.u32 y, n;
    fma.rn.f32 x, y, $12, x;
    cvt.rn.f32.u32 y, $2;
    mul.f32 y, y, $12;
    mul.f32 y, y, 0f3F666666;
    setp.gt.f32 p, x, y;
    mul.lo.u32 t, n, 2;
    setp.gt.u32 last, t, $2;
    or.pred p, p, last;
    selp.u32 n, $2, n, p;
    cvt.u64.u32 one, n;
    @first_lane st.global.u64 [$8+{8 * DENSE.value}], one;
OUT:
    mov.u32 $0, 0;
}}"""
    constants = {"$words4": 4 * words, "$words": words, "$tiles": tiles, "$cap1": cap + 1, "$rows": rows}
    for name, number in constants.items():
        body = body.replace(name, str(number))
    return body
