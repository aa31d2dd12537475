"""Packing from a bitmask as PTX, for NVIDIA GPUs: places are scans of a warp, and what a warp lists
stays in shared memory, none of which Triton's blocks have words for. `relu_ffn.bitmask_packing` uses this string.
"""

from __future__ import annotations

import functools
import math

from .packing import BLOCKS, COUNTERS, DENSE, LINE, LISTED, ONE_BLOCK, ONE_OVERFLOW, ONE_ROW

# Words of the bitmask that are one lane's, of 256 neurons.
TILE = 8
# Bytes of shared memory to declare, of the 48 KiB that a kernel may.
MOST_SHARED = 47 << 10


def _take_lowest(word: str, base: str) -> str:
    """n: the neuron of the lowest mark, `low`, of a word whose first is `base`; the word without it."""
    return f"""neg.s32 low, {word};
    and.b32 low, low, {word};
    xor.b32 {word}, {word}, low;
    bfind.u32 n, low;
    shr.u32 t, n, 1;
    and.b32 n, n, 1;
    mad.lo.u32 n, t, 8, n;
    add.u32 n, n, {base};"""


def _first_of(word: str, tile: str, to: str) -> str:
    """The first neuron of a word, counted from the first tile or from its own, whose first is `tile`."""
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


def _count() -> str:
    """c0: bits of the row at `row0`, cap + 1 at most."""
    return (
        """mov.u32 k, lane;
    mov.u32 c0, 0;
COUNT:
    setp.lt.u32 here, k, $tiles;"""
        + f"mad.wide.u32 at, k, {4 * TILE}, row0;"
        + _words("w0_", "at")
        + "".join(f"popc.b32 t, w0_{t}; add.u32 c0, c0, t;" for t in range(TILE))
        + """
    add.u32 k, k, 32;
    sub.u32 t, k, lane;
    setp.lt.u32 p, t, $tiles;
    @p bra COUNT;
    redux.sync.add.u32 c0, c0, -1;
    min.u32 c0, c0, $cap1;"""
    )


def _scan(x: str, own: str) -> str:
    """x of all lanes up to this one; `own` is what it was."""
    return f"mov.b32 {own}, {x};" + "".join(
        f"""
    shfl.sync.up.b32 t|p, {x}, {1 << i}, 0, -1;
    @p add.u32 {x}, {x}, t;"""
        for i in range(5)
    )


def _list(room: int) -> str:
    """List the entries of a lane's words, w0 to w7 at `words`, places `window` to `window` + room of the warp's."""
    left = "mov.b32 left, 0;" + "".join(
        f"setp.ne.b32 p, w{t}, 0; selp.b32 t, {1 << t}, 0, p; or.b32 left, left, t;"
        for t in range(TILE)
    )
    return f"""
    {left}
    mov.b32 v, 0;
    mov.u32 first, 0;
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
    {_first_of("word", "base", "n")}
    selp.u32 first, n, first, p;
    setp.ne.b32 p, v, 0;
    vote.sync.any.pred q, p, -1;
    @!q bra LISTED;
    {_take_lowest("v", "first")}
    sub.u32 t, place, window;
    setp.lt.and.u32 q, t, {room}, p;
    mad.lo.u32 t, t, 4, list;
    @q st.shared.u32 [t], n;
    @p add.u32 place, place, 1;
    bra LIST;
LISTED:"""


def _put(wide: bool, room: int, values: bool) -> str:
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
    mad.wide.u32 at, item{h}, 2, gates;"""
        if values:
            load += f"@there{h} ld.global.u16 gate{h}, [at];"
        store += f"""
    add.u32 n, i, {32 * h};
    add.u32 n, n, window;
    add.u32 n, n, done;
    mad.wide.u32 at, n, {4 if wide else 2}, indices;
    @there{h} st.global.u{32 if wide else 16} [at], item{h};"""
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
    N: int,
    cap: int,
    piece: int,
    pieces: int,
    wide: bool,
    rows: int,
    warps: int,
    values: bool = True,
) -> str:
    """A block of `warps` packs `rows` rows from their bitmask, $3, `words` words each, and the gates of 16 bits, $4, N
    each.

    $1 the block, of $11; $2 rows there are; $5 the counts; $6 the indices, int32 if `wide` else int16, and $7, if
    `values`, the values, `cap` a row; $8 the state and $9 the overflow rows, of `relu_ffn.packing`; $10 the pieces,
    `pieces` of a row at most; $12 entries that cost as much as a row of the dense path, fp32.

    A warp takes a row at a time: a lane lists the entries of 256 neurons, then lanes take entries in turn. The last
    block decides whether all rows take the dense path.
    """
    tiles = words // TILE
    shared = {"counters": 4 * 3}  # the row that is taken next, entries, overflow rows
    room = (MOST_SHARED - sum(shared.values())) // (4 * 32 * warps) * 32
    room = min(room, 32 * -(-cap // 32))
    shared["lists"] = 4 * room * warps
    declared = "".join(
        f".shared .align 16 .b8 ffn_{n}[{s}]; .reg .u32 {n};" for n, s in shared.items()
    )
    named = "".join(f"mov.u32 {n}, ffn_{n};" for n in shared)
    # A row's count has read its only words.
    own_tile = (
        "".join(f"mov.b32 w{t}, w0_{t};" for t in range(TILE)) if tiles <= 32 else _words("w", "at")
    )
    own_tile += "mul.lo.u32 base, k, 256; mad.wide.u32 words, k, 32, row;"
    bitmask = "mov.u32 place_first, 0;" + "".join(
        f"popc.b32 t, w{t}; add.u32 place_first, place_first, t;" for t in range(TILE)
    )
    # Rows are uneven: a warp takes the next one when it is done with one.
    next_row = (
        f"""
    mov.u32 r, 1;
    @first_lane atom.shared.add.u32 r, [counters], r;
    shfl.sync.idx.b32 r, r, 0, 31, -1;
    setp.ge.u32 none, r, {rows};
    @none bra PACKED;"""
        if rows > warps
        else ""
    )
    body = f"""{{
    .reg .pred p, q, here, none, first_lane, last, there<2>;
    .reg .b32 low, v, zero, left, w<8>, w0_<8>;
    .reg .u32 lane, warp, block, word, first, r, m, i, c0;
    .reg .u32 k, t, n, own, base, place, place_first, window, many, done;
    .reg .u32 kept, overflows, list, item<2>, gate<2>, low32, high32;
    .reg .u64 at, row, row0, words, gates, indices, values, add, old, one;
    .reg .f32 x, y;
    {declared}
    {named}
    mov.u32 lane, %laneid;
    mov.u32 warp, %tid.x;
    shr.u32 warp, warp, 5;
    setp.eq.u32 first_lane, lane, 0;
    mov.b32 zero, 0;
    mov.u32 kept, 0;
    mov.u32 overflows, 0;
    mad.lo.u32 list, warp, {4 * room}, lists;
    mov.u32 block, $1;
    mad.lo.u32 t, lane, 4, counters;
    setp.lt.u32 p, lane, 3;
    mov.u32 n, %tid.x;
    setp.lt.and.u32 p, n, 32, p;
    @p st.shared.u32 [t], zero;
    bar.sync 0;
    {"mov.u32 r, warp;" if rows == warps else ""}
ROW:
    {next_row}
    mad.lo.u32 m, block, {rows}, r;
    setp.lt.u32 p, m, $2;
    @!p bra PACKED;
    mad.wide.u32 row0, m, $words4, $3;
    {_count()}
    setp.lt.u32 p, c0, $cap1;
    @p bra PACK;
    add.u32 overflows, overflows, 1;
    mad.wide.u32 at, m, 4, $5;
    @first_lane st.global.u32 [at], c0;
    and.b32 t, m, {COUNTERS.value - 1};
    mad.wide.u32 at, t, {8 * LINE.value}, $8;
    mov.u64 one, {ONE_OVERFLOW.value};
    @first_lane atom.global.relaxed.gpu.add.u64 old, [at], one;
    shr.u64 old, old, {int(math.log2(ONE_OVERFLOW.value))};
    cvt.u32.u64 n, old;
    and.b32 n, n, {ONE_ROW.value // ONE_OVERFLOW.value - 1};
    add.u32 k, $2, {COUNTERS.value - 1};
    shr.u32 k, k, {COUNTERS.value.bit_length() - 1};
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
    mov.u32 done, 0;
    mov.u32 k, lane;
CHUNK:
    setp.lt.u32 here, k, $tiles;
    mad.wide.u32 at, k, {4 * TILE}, row;
    {own_tile}
    {bitmask}
    {_scan("place_first", "own")}
    shfl.sync.idx.b32 many, place_first, 31, 31, -1;
    sub.u32 place_first, place_first, own;
    mov.u32 own, many;
    mov.u32 window, 0;
WINDOW:
    mov.u32 place, place_first;
    {_list(room)}
    bar.warp.sync -1;
    {_put(wide, room, values)}
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
    @first_lane red.shared.add.u32 [counters+4], kept;
    @first_lane red.shared.add.u32 [counters+8], overflows;
    bar.sync 0;
    setp.ne.u32 p, warp, 0;
    @p bra OUT;
    ld.shared.u32 t, [counters+4];
    cvt.u64.u32 add, t;
    add.u64 add, add, {ONE_BLOCK.value};
    ld.shared.u32 t, [counters+8];
    setp.eq.u32 p, t, 0;
    @p bra TELL;
    membar.gl;
TELL:
    @first_lane atom.global.relaxed.gpu.add.u64 old, [$8+{8 * BLOCKS.value}], add;
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
    shr.u64 old, old, {int(math.log2(ONE_OVERFLOW.value))};
    cvt.u32.u64 n, old;
    and.b32 n, n, {ONE_ROW.value // ONE_OVERFLOW.value - 1};
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
        "$tiles": tiles,
        "$cap1": cap + 1,
    }
    for name, number in constants.items():
        body = body.replace(name, str(number))
    return body
