"""Packing from marks as PTX, for NVIDIA GPUs: counts are bit planes, places are scans of a warp, and what a warp lists
stays in shared memory, none of which Triton's blocks have words for. `relu_ffn_marked` uses this string.
"""

from __future__ import annotations

import functools
import math

from .relu_ffn_packing import DENSE, LINE, LISTED, ONE_BLOCK, ONE_HEAVY, ONE_ROW, POOLED, TALLIES

__all__ = ["pack"]

# Words of marks that are one lane's, of 256 neurons.
TILE = 8
# Rows that a warp counts at once, and whose words a thread counts at once.
AT_ONCE = 4
WORDS_AT_ONCE = 16
# Bit planes of how many of 128 rows have a neuron active, and a neuron of so many rows pays in a pool.
PLANES = 8
LEAST = 3
# Bytes of shared memory to declare, of the 48 KiB that a kernel may.
MOST_SHARED = 47 << 10


def _add(total: str, carry: str, a: str, b: str, c: str) -> str:
    """Add three bits in each of 32 places."""
    return f"""
    lop3.b32 sum, {a}, {b}, {c}, 0x96;
    lop3.b32 {carry}, {a}, {b}, {c}, 0xE8;
    mov.b32 {total}, sum;"""


def _add_eight(first: int) -> str:
    """Add words r[first] to r[first + 7] to the planes."""
    r = [f"r{first + i}" for i in range(8)]
    done = (
        _add(r[0], r[1], r[0], r[1], r[2])
        + _add(r[3], r[4], r[3], r[4], r[5])
        + _add(r[6], r[7], r[6], r[7], "p0")
        + _add("p0", r[0], r[0], r[3], r[6])
        + _add(r[1], r[4], r[1], r[4], r[7])
        + _add("p1", r[0], r[0], r[1], "p1")
        + _add("p2", r[0], r[0], r[4], "p2")
    )
    return done + "".join(_carry(i, r[0]) for i in range(3, PLANES))


def _carry(i: int, carry: str) -> str:
    return f"""
    and.b32 sum, p{i}, {carry};
    xor.b32 p{i}, p{i}, {carry};
    mov.b32 {carry}, sum;"""


def _take_lowest(word: str, base: str, by_quad: bool) -> str:
    """n: the neuron of the lowest mark, `low`, of a word whose first is `base`; the word without it."""
    spread = "shr.u32 t, n, 1; and.b32 n, n, 1; mad.lo.u32 n, t, 8, n;" if by_quad else ""
    return f"""neg.s32 low, {word};
    and.b32 low, low, {word};
    xor.b32 {word}, {word}, low;
    bfind.u32 n, low;
    {spread}
    add.u32 n, n, {base};"""


def _first_of(word: str, tile: str, to: str, by_quad: bool) -> str:
    """The first neuron of a word, counted from the first tile or from its own, whose first is `tile`."""
    if not by_quad:
        return f"and.b32 t, {word}, {TILE - 1}; mad.lo.u32 {to}, t, 32, {tile};"
    return f"""and.b32 t, {word}, 1;
    mad.lo.u32 {to}, t, 128, {tile};
    and.b32 t, {word}, 6;
    add.u32 {to}, {to}, t;"""


def _words(to: str, at: str) -> str:
    """A lane's words of a tile from `at` on, where it has one `here`, or zeros."""
    return "".join(f"mov.b32 {to}{t}, 0;" for t in range(TILE)) + "".join(
        f"""
    @here ld.global.v4.b32 {{{", ".join(f"{to}{t}" for t in range(h, h + 4))}}}, [{at}+{4 * h}];"""
        for h in range(0, TILE, 4)
    )


def _count(n: int, label: str) -> str:
    """c[i]: marks of each of n rows from `row[i]` on, cap + 1 at most."""
    return (
        "mov.u32 k, lane;"
        + "".join(f"mov.u32 c{i}, 0;" for i in range(n))
        + f"""
{label}:
    setp.lt.u32 here, k, $tiles;"""
        + "".join(
            f"mad.wide.u32 at, k, {4 * TILE}, row{i};" + _words(f"w{i}_", "at") for i in range(n)
        )
        + "".join(
            f"popc.b32 t, w{i}_{t}; add.u32 c{i}, c{i}, t;" for i in range(n) for t in range(TILE)
        )
        + f"""
    add.u32 k, k, 32;
    sub.u32 t, k, lane;
    setp.lt.u32 p, t, $tiles;
    @p bra {label};"""
        + "".join(
            f"redux.sync.add.u32 c{i}, c{i}, -1; min.u32 c{i}, c{i}, $cap1;" for i in range(n)
        )
    )


def _count_block(rows: int, warps: int) -> str:
    """`counts` of a block's rows; those behind the last have too many."""
    done = ""
    for first in range(0, rows // warps, AT_ONCE):
        n = min(AT_ONCE, rows // warps - first)
        done += "sub.u32 last_row, $2, 1;" + "".join(
            f"""
    mad.lo.u32 m, block, {rows}, warp;
    add.u32 m, m, {(first + i) * warps};
    setp.lt.u32 there{i}, m, $2;
    min.u32 m, m, last_row;
    mad.wide.u32 row{i}, m, $words4, $3;"""
            for i in range(n)
        )
        done += _count(n, f"COUNT{first}")
        done += "".join(
            f"""
    selp.u32 c{i}, c{i}, $cap1, there{i};
    add.u32 t, warp, {(first + i) * warps};
    mad.lo.u32 t, t, 4, counts;
    @first_lane st.shared.u32 [t], c{i};"""
            for i in range(n)
        )
    return done + "bar.sync 0;"


def _groups(words: int, warps: int) -> int:
    """How many groups of threads there are, one for each word, among which a block's rows are shared out."""
    groups = 1
    while groups < 8 and 2 * groups * -(-words // 32) <= warps:
        groups *= 2
    return groups


def _bytes_of_planes(words: int, rows: int, warps: int) -> int:
    """What all groups but one have to hand over."""
    groups = _groups(words, warps)
    return 4 * (groups - 1) * (rows // groups).bit_length() * words


def _planes(words: int, rows: int, warps: int) -> str:
    """p: in how many of a block's packed rows the neurons of word w are active, of the first `words` threads; others
    have zeros."""
    wide = 32 * -(-words // 32)
    groups = _groups(words, warps)
    each = rows // groups
    batch = min(WORDS_AT_ONCE, each)
    own = each.bit_length()
    load = "".join(
        f"""
    ld.shared.v4.u32 {{n0, n1, n2, n3}}, [place+{4 * r}];"""
        + "".join(
            f"""
    setp.lt.and.u32 p, n{i}, $cap1, mine;
    mov.b32 r{r + i}, 0;
    @p ld.global.b32 r{r + i}, [at+{(r + i) * 4 * words}];"""
            for i in range(4)
        )
        for r in range(0, batch, 4)
    )
    share = f"""
    mov.u32 w, %tid.x;
    div.u32 n, w, {wide};
    mul.lo.u32 t, n, {wide};
    sub.u32 t, w, t;
    setp.lt.u32 mine, t, {words};
    setp.lt.and.u32 mine, n, {groups}, mine;
    min.u32 n, n, {groups - 1};
    mul.lo.u32 place, n, {each};
    mad.lo.u32 m, block, {rows}, place;
    mad.wide.u32 at, m, $words4, $3;
    mad.wide.u32 at, t, 4, at;
    mad.lo.u32 place, place, 4, counts;
    add.u32 end, place, {4 * each};
    {"".join(f"mov.b32 p{i}, 0;" for i in range(PLANES))}
ROWS:
    {load}
    {"".join(_add_eight(i) for i in range(0, batch, 8))}
    add.u64 at, at, {batch * 4 * words};
    add.u32 place, place, {4 * batch};
    setp.lt.u32 p, place, end;
    @p bra ROWS;"""
    if groups == 1:
        return share
    put = "".join(f"@p st.shared.b32 [place+{4 * i * words}], p{i};" for i in range(own))
    add = ""
    for g in range(groups - 1):
        at = 4 * g * own * words
        add += "mov.b32 v, 0;" + "".join(
            f"mov.b32 r0, 0; @mine ld.shared.b32 r0, [place+{at + 4 * i * words}];"
            + _add(f"p{i}", "v", f"p{i}", "r0", "v")
            for i in range(own)
        )
        add += "".join(_carry(i, "v") for i in range(own, PLANES))
    # They are handed over where entries will be listed.
    return f"""{share}
    sub.u32 n, n, 1;
    mad.lo.u32 place, n, {own * words}, t;
    mad.lo.u32 place, place, 4, lists;
    setp.ge.and.u32 p, w, {wide}, mine;
    {put}
    bar.sync 0;
    setp.lt.u32 mine, w, {words};
    {"".join(f"selp.b32 p{i}, p{i}, 0, mine;" for i in range(PLANES))}
    mad.lo.u32 place, w, 4, lists;
    {add}"""


def _choose(size: int, entries: int, by_quad: bool) -> str:
    """A block's pool, by its planes: of word w, thread w's, those of whose neurons enough rows have active, `keep`;
    their places are from `before` on, and there are n_pool."""

    def total(x: str, to: str) -> str:
        return f"""
    redux.sync.add.u32 t, {x}, -1;
    @teller red.shared.add.u32 [{to}], t;"""

    # Bit by bit, the largest count that more neurons than there is room for have at least; `above` have more.
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
    )
    weigh = "mov.u32 c0, 0;" + "".join(
        f"and.b32 t, p{i}, above; popc.b32 t, t; mad.lo.u32 c0, t, {1 << i}, c0;"
        for i in range(PLANES)
    )
    return f"""
    mov.u32 w, %tid.x;
    setp.lt.u32 mine, w, $words;
    sub.u32 t, w, lane;
    setp.lt.and.u32 teller, t, $words, first_lane;
    mov.b32 equal, -1;
    mov.b32 above, 0;
    {descend}
    or.b32 t, p2, p3;
    {"".join(f"or.b32 t, t, p{i};" for i in range(4, PLANES))}
    and.b32 has, p0, p1;
    or.b32 t, t, has;
    and.b32 above, above, t;
    {weigh}
    {total("c0", f"tallies+{4 * PLANES}")}
    popc.b32 before, above;
    {_scan("before", "own")}
    mad.lo.u32 t, warp, 4, totals;
    setp.eq.u32 p, lane, 31;
    @p st.shared.u32 [t], before;
    sub.u32 before, before, own;
    bar.sync 0;
    ld.shared.u32 t, [tallies+{4 * PLANES}];
    setp.ge.u32 pools, t, {entries};
    mad.lo.u32 t, lane, 4, totals;
    setp.lt.u32 p, lane, $warps;
    mov.u32 n, 0;
    @p ld.shared.u32 n, [t];
    redux.sync.add.u32 n_pool, n, -1;
    setp.lt.u32 p, lane, warp;
    selp.u32 n, n, 0, p;
    redux.sync.add.u32 n, n, -1;
    add.u32 before, before, n;
    selp.u32 n_pool, n_pool, 0, pools;
    selp.b32 keep, above, 0, pools;
    mad.lo.u32 t, w, 4, masks;
    @mine st.shared.b32 [t], keep;
    mad.lo.u32 t, w, 4, places;
    @mine st.shared.u32 [t], before;
    setp.eq.u32 p, part, 0;
    selp.b32 keep, keep, 0, p;
    shr.u32 n, w, 3;
    mul.lo.u32 n, n, 256;
    {_first_of("w", "n", "base", by_quad)}
    mul.lo.u32 t, block, {size};
    mad.wide.u32 at, t, 4, $14;
    mad.wide.u32 at, before, 4, at;
CHOSEN:
    setp.ne.and.b32 p, keep, 0, mine;
    vote.sync.any.pred q, p, -1;
    @!q bra NAMED;
    {_take_lowest("keep", "base", by_quad)}
    @p st.global.u32 [at], n;
    add.u64 at, at, 4;
    bra CHOSEN;
NAMED:
    add.u32 filled, n_pool, 63;
    shr.u32 filled, filled, 6;
    mul.lo.u32 filled, filled, 8;
    add.u32 t, w, part;
    setp.eq.u32 p, t, 0;
    mad.wide.u32 at, block, 4, $13;
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


def _list(pools: bool, room: int, by_quad: bool) -> str:
    """List the entries of a lane's words, w0 to w7 at `words`, places `window` to `window` + room of the warp's, each
    with where it goes."""
    left = "mov.b32 left, 0;" + "".join(
        f"setp.ne.b32 p, w{t}, 0; selp.b32 t, {1 << t}, 0, p; or.b32 left, left, t;"
        for t in range(TILE)
    )
    of_word = (
        """
    mad.lo.u32 n, word, 4, own_masks;
    @p ld.shared.b32 mask, [n];
    mad.lo.u32 n, word, 4, own_places;
    @p ld.shared.u32 slot, [n];"""
        if pools
        else ""
    )
    where = (
        """
    and.b32 t, low, mask;
    setp.ne.and.b32 pooled, t, 0, p;
    setp.eq.and.b32 strays, t, 0, p;
    sub.u32 t, low, 1;
    and.b32 t, t, mask;
    popc.b32 t, t;
    add.u32 t, t, slot;
    or.b32 t, t, 32768;
    selp.b32 t, t, stray, pooled;
    mad.lo.u32 n, t, 65536, n;
    @strays add.u32 stray, stray, 1;"""
        if pools
        else ""
    )
    return f"""
    {left}
    mov.b32 v, 0;
    mov.b32 mask, 0;
    mov.u32 first, 0;
    mov.u32 slot, 0;
LIST:
    setp.eq.b32 p, v, 0;
    setp.ne.and.b32 p, left, 0, p;
    neg.s32 t, left;
    and.b32 t, t, left;
    bfind.u32 word, t;
    @p xor.b32 left, left, t;
    and.b32 word, word, {TILE - 1};
    mad.wide.u32 at, word, 4, words;
    @p ld.global.b32 v, [at];
    {of_word}
    {_first_of("word", "base", "n", by_quad)}
    selp.u32 first, n, first, p;
    setp.ne.b32 p, v, 0;
    vote.sync.any.pred q, p, -1;
    @!q bra LISTED;
    {_take_lowest("v", "first", by_quad)}
    {where}
    sub.u32 t, place, window;
    setp.lt.and.u32 q, t, {room}, p;
    mad.lo.u32 t, t, 4, list;
    @q st.shared.u32 [t], n;
    @p add.u32 place, place, 1;
    bra LIST;
LISTED:"""


def _put(pools: bool, wide: bool, room: int, values: bool) -> str:
    """Write what is listed, places `window` on of `many`, two entries a lane at a time."""
    load, store = "", ""
    for h in range(2):
        load += f"""
    add.u32 t, i, {32 * h};
    add.u32 n, t, window;
    setp.lt.u32 there{h}, n, many;
    setp.lt.and.u32 there{h}, t, {room}, there{h};
    mad.lo.u32 t, t, 4, list;
    mov.u32 item{h}, 0;
    @there{h} ld.shared.u32 item{h}, [t];
    {f"and.b32 t, item{h}, 32767;" if pools else f"mov.u32 t, item{h};"}
    mad.wide.u32 at, t, 2, gates;"""
        if values:
            load += f"@there{h} ld.global.u16 gate{h}, [at];"
        elif pools:
            load += f"""
    setp.ge.and.u32 pooled, item{h}, {1 << 31}, there{h};
    @pooled ld.global.u16 gate{h}, [at];"""
        if pools:
            store += f"""
    shr.u32 t, item{h}, 16;
    setp.ge.and.u32 pooled, t, 32768, there{h};
    and.b32 n, t, 32767;
    mad.wide.u32 at, n, 2, pool_row;
    @pooled st.global.u16 [at], gate{h};
    not.pred p, pooled;
    and.pred there{h}, there{h}, p;
    and.b32 t, item{h}, 32767;"""
        else:
            store += f"""
    add.u32 n, i, {32 * h};
    add.u32 n, n, window;
    add.u32 n, n, done;
    mov.u32 t, item{h};"""
        store += f"""
    mad.wide.u32 at, n, {4 if wide else 2}, indices;
    @there{h} st.global.u{32 if wide else 16} [at], t;"""
        if values:
            store += f"""
    mad.wide.u32 at, n, 2, values;
    @there{h} st.global.u16 [at], gate{h};"""
    return f"""
    mov.u32 i, lane;
PUT:
    {load}
    {store}
    add.u32 i, i, 64;
    sub.u32 t, i, lane;
    setp.lt.u32 p, t, {room};
    add.u32 t, t, window;
    setp.lt.and.u32 p, t, many, p;
    @p bra PUT;"""


@functools.cache
def pack(
    words: int,
    by_quad: bool,
    N: int,
    cap: int,
    piece: int,
    pieces: int,
    wide: bool,
    rows: int,
    warps: int,
    size: int = 0,
    entries: int = 0,
    parts: int = 1,
    values: bool = True,
) -> str:
    """`parts` blocks of `warps` each pack `rows` rows from their marks, $3, `words` words each, and the gates of 16
    bits, $4, N each. by_quad: which order marks are in.

    $1 the block, of $11; $2 rows there are; $5 the counts; $6 the indices, int32 if `wide` else int16, and $7, if
    `values`, the values, `cap` a row; $8 the state and $9 the heavy rows, of `relu_ffn_packing`; $10 the pieces,
    `pieces` of a row at most; $12 entries that cost as much as a row of the dense path, fp32.

    size: neurons of a block's pool at most, a multiple of 256, if it is not 0: pools are of 128 rows. $13 the sizes,
    and $14 the neurons of each; $15 the values of its rows. A pool is the neurons that at least t of its packed rows
    have active, t the least that `size` allows and LEAST at least; there is none where those are less than `entries`
    entries. Each of the parts chooses it, and packs a share of the rows. There are as many threads as words at least.

    Counts are numbers of as many bits as there are planes, a word of marks a thread. A warp takes a row at a time: a
    lane lists the entries of 256 neurons, then lanes take entries in turn. The last block decides whether all
    rows take the dense path.
    """
    pools = size > 0
    if pools and words > 32 * warps:
        raise ValueError(f"pools need a thread for each of {words} words, {warps} warps have fewer")
    tiles = words // TILE
    shared = {"tallies": 4 * (PLANES + 4)}
    if pools:
        shared |= {"masks": 4 * words, "places": 4 * words, "counts": 4 * rows, "totals": 4 * 32}
    room = (MOST_SHARED - sum(shared.values())) // (4 * 32 * warps) * 32
    room = min(room, 32 * -(-cap // 32))
    shared["lists"] = max(4 * room * warps, _bytes_of_planes(words, rows, warps) if pools else 0)
    declared = "".join(
        f".shared .align 16 .b8 ffn_{n}[{s}]; .reg .u32 {n};" for n, s in shared.items()
    )
    named = "".join(f"mov.u32 {n}, ffn_{n};" for n in shared)
    # A row's count has read its only words.
    own_tile = (
        "".join(f"mov.b32 w{t}, w0_{t};" for t in range(TILE))
        if tiles <= 32 and not pools
        else _words("w", "at")
    )
    own_tile += "mul.lo.u32 base, k, 256; mad.wide.u32 words, k, 32, row;"
    if pools:
        own_tile += "".join(f"mov.b32 mask{t}, 0;" for t in range(TILE))
        own_tile += f"""
    mad.lo.u32 own_masks, k, {4 * TILE}, masks;
    mad.lo.u32 own_places, k, {4 * TILE}, places;
    @here ld.shared.v4.b32 {{mask0, mask1, mask2, mask3}}, [own_masks];
    @here ld.shared.v4.b32 {{mask4, mask5, mask6, mask7}}, [own_masks+16];"""
    marks = "mov.u32 place_first, 0;" + "".join(
        f"popc.b32 t, w{t}; add.u32 place_first, place_first, t;" for t in range(TILE)
    )
    split = "mov.u32 own, many;"
    if pools:  # strays in the high half
        marks += "".join(
            f"""
    not.b32 t, mask{t};
    and.b32 t, t, w{t};
    popc.b32 t, t;
    mad.lo.u32 place_first, t, 65536, place_first;"""
            for t in range(TILE)
        )
        split = """
    shr.u32 stray_first, place_first, 16;
    add.u32 stray_first, stray_first, done;
    and.b32 place_first, place_first, 65535;
    shr.u32 own, many, 16;
    and.b32 many, many, 65535;"""
    zero_pool_row = """
    mad.wide.u32 pool_row, m, $size2, $15;
    mad.wide.u32 at, lane, 16, pool_row;""" + "".join(
        f"""
    add.u32 t, lane, {32 * i};
    setp.lt.u32 p, t, filled;
    @p st.global.v4.b32 [at+{512 * i}], {{zero, zero, zero, zero}};"""
        for i in range(2 * size // 512)
    )
    choose = (
        _count_block(rows, warps) + _planes(words, rows, warps) + _choose(size, entries, by_quad)
        if pools
        else ""
    )
    # Rows are uneven: a warp takes the next one when it is done with one.
    next_row = (
        f"""
    mov.u32 r, 1;
    @first_lane atom.shared.add.u32 r, [tallies+{4 * (PLANES + 3)}], r;
    shfl.sync.idx.b32 r, r, 0, 31, -1;
    setp.ge.u32 none, r, {rows // parts};
    @none bra PACKED;
    mad.lo.u32 r, part, {rows // parts}, r;"""
        if rows > warps
        else ""
    )
    count_row = (
        """
    mad.lo.u32 t, r, 4, counts;
    ld.shared.u32 c0, [t];"""
        if pools
        else "mad.wide.u32 row0, m, $words4, $3;" + _count(1, "COUNT")
    )
    body = f"""{{
    .reg .pred p, q, here, mine, none, pools, pooled, strays, first_lane, teller, last, there<{AT_ONCE}>;
    .reg .b32 sum, equal, above, has, keep, low, v, zero, left, mask, w<8>, r<{WORDS_AT_ONCE}>, p<{PLANES}>, mask<8>;
    .reg .b32 {", ".join(f"w{i}_<8>" for i in range(AT_ONCE))};
    .reg .u32 lane, warp, block, part, filled, word, first, own_masks, own_places, w, r, m, i, c<{AT_ONCE}>, n<4>;
    .reg .u32 k, t, n, own, before, n_pool, base, place, place_first, stray, stray_first, slot, window, many, done;
    .reg .u32 kept, heavies, list, end, last_row, item<2>, gate<2>, low32, high32;
    .reg .u64 at, row, row<{AT_ONCE}>, words, pool_row, gates, indices, values, add, old, one;
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
    mov.u32 heavies, 0;
    mad.lo.u32 list, warp, {4 * room}, lists;
    div.u32 block, $1, {parts};
    mul.lo.u32 t, block, {parts};
    sub.u32 part, $1, t;
    mad.lo.u32 t, lane, 4, tallies;
    setp.lt.u32 p, lane, {PLANES + 4};
    mov.u32 n, %tid.x;
    setp.lt.and.u32 p, n, 32, p;
    @p st.shared.u32 [t], zero;
    bar.sync 0;
    {choose}
    {"mov.u32 r, warp;" if rows == warps else ""}
ROW:
    {next_row}
    mad.lo.u32 m, block, {rows}, r;
    setp.lt.u32 p, m, $2;
    @!p bra PACKED;
    {count_row}
    setp.lt.u32 p, c0, $cap1;
    @p bra PACK;
    add.u32 heavies, heavies, 1;
    mad.wide.u32 at, m, 4, $5;
    @first_lane st.global.u32 [at], c0;
    and.b32 t, m, {TALLIES.value - 1};
    mad.wide.u32 at, t, {8 * LINE.value}, $8;
    mov.u64 one, {ONE_HEAVY.value};
    @first_lane atom.global.relaxed.gpu.add.u64 old, [at], one;
    shr.u64 old, old, {int(math.log2(ONE_HEAVY.value))};
    cvt.u32.u64 n, old;
    and.b32 n, n, {ONE_ROW.value // ONE_HEAVY.value - 1};
    add.u32 k, $2, {TALLIES.value - 1};
    shr.u32 k, k, {TALLIES.value.bit_length() - 1};
    mad.lo.u32 n, t, k, n;
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
    {marks}
    {_scan("place_first", "own")}
    shfl.sync.idx.b32 many, place_first, 31, 31, -1;
    sub.u32 place_first, place_first, own;
    {split}
    mov.u32 window, 0;
WINDOW:
    mov.u32 place, place_first;
    {"mov.u32 stray, stray_first;" if pools else ""}
    {_list(pools, room, by_quad)}
    bar.warp.sync -1;
    {_put(pools, wide, room, values)}
    bar.warp.sync -1;
    add.u32 window, window, {room};
    setp.lt.u32 p, window, many;
    @p bra WINDOW;
    add.u32 done, done, own;
    add.u32 k, k, 32;
    sub.u32 t, k, lane;
    setp.lt.u32 p, t, $tiles;
    @p bra CHUNK;
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
    {"@!none bra ROW;" if rows > warps else ""}
    @first_lane red.shared.add.u32 [tallies+{4 * (PLANES + 1)}], kept;
    @first_lane red.shared.add.u32 [tallies+{4 * (PLANES + 2)}], heavies;
    bar.sync 0;
    setp.ne.u32 p, warp, 0;
    @p bra OUT;
    ld.shared.u32 t, [tallies+{4 * (PLANES + 1)}];
    setp.eq.u32 p, part, 0;
    setp.gt.and.u32 p, n_pool, 0, p;
    @p add.u32 t, t, {entries};
    cvt.u64.u32 add, t;
    add.u64 add, add, {ONE_BLOCK.value};
    ld.shared.u32 t, [tallies+{4 * (PLANES + 2)}];
    setp.eq.u32 p, t, 0;
    @p bra TELL;
    membar.gl;
TELL:
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
    constants = {
        "$words4": 4 * words,
        "$words": words,
        "$tiles": tiles,
        "$cap1": cap + 1,
        "$warps": warps,
        "$size2": 2 * size,
    }
    for name, number in constants.items():
        body = body.replace(name, str(number))
    return body
