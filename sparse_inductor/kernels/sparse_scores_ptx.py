"""The shared-memory scoring of a chunk as PTX, for NVIDIA GPUs: what Triton's blocks have no words for.

A block's warps go their own ways through a query's posting lists, and a thread reads of its warp's lists without
waiting for the block. `sparse_scores_accumulate` uses these strings; its portable kernel does the same in Triton.
"""

from __future__ import annotations

__all__ = ["accumulate", "append", "clear", "rescore"]

# Postings that a warp takes at a time: 8 a lane, all under way at once. Lists of more are shared out among the warps.
_PIECE = 256
# Entries that half a warp reads of a row at a time, four a lane, and how often before it adds them up: nearly all rows
# of 127 terms, or so, are no longer.
_ENTRIES = 64
_ROUNDS = 3


def clear(docs: int, threads: int) -> str:
    """Zero `docs` accumulators from address $1 on."""
    stores = "".join(
        f"st.shared.v4.u32 [a+{at}], {{z, z, z, z}};" for at in range(0, 4 * docs, 16 * threads)
    )
    return (
        "{ .reg .u32 a, z; mov.u32 z, 0; mov.u32 a, %tid.x; shl.b32 a, a, 4; add.u32 a, a, $1;"
        f"{stores} mov.u32 $0, 0; }}"
    )


def accumulate(docs: int, warps: int) -> str:
    """Add up the contributions of a query's terms to a chunk's documents.

    $1 the accumulators, with 32 words behind them that nobody reads; $2 the chunk's offsets; $3 its postings; $4 the
    query's terms and $5 their weights, of which the first $7 stand at the beginning of their rows and the rest, of $6
    in all, $8 places further on.

    A lane looks up one list (32 in turn), and the warps take the lists' pieces one after the other: piece x belongs to
    the first lane whose running count of pieces is larger. All warps know all lists, so none waits for another. Whole
    pieces need no predicates.
    """
    groups = range(_PIECE // 32)

    def add(i: int, some: bool) -> str:
        # A contribution is the high half of posting times weight, the document's place being too small to matter, made
        # odd, so that what is positive stays so. A lane without a posting adds to a word that nobody reads: a branch
        # around it would cost the whole warp more.
        where = f"selp.b32 a, a, nowhere, p{i};" if some else ""
        return (
            f"and.b32 a, x{i}, {docs - 1}; mad.lo.u32 a, a, 4, $1; {where} mul.hi.s32 v, x{i}, w1; or.b32 v, v, 1;"
            "red.shared.add.u32 [a], v;"
        )

    def load(i: int, some: bool) -> str:
        test, when = (f"setp.gt.s32 p{i}, left, {32 * i};", f"@p{i}") if some else ("", "")
        return f"{test} {when} ld.global.nc.L1::no_allocate.u32 x{i}, [at+{128 * i}];"

    def first(n: int, some: bool = True) -> str:
        """The first n groups of 32 postings; `some`: what there is of them."""
        return " ".join([load(i, some) for i in groups[:n]] + [add(i, some) for i in groups[:n]])

    scan = "".join(
        f"shfl.sync.up.b32 v|p, count, {d}, 0, -1; @p add.u32 count, count, v;"
        for d in (1, 2, 4, 8, 16)
    )
    return f"""{{
    .reg .pred p, q, p0, p1, p2, p3, p4, p5, p6, p7;
    .reg .u32 lane, x, base, i, t, w, start, length, own, count, before, all, v, a, l, w1, s1, n1, b1, off;
    .reg .u32 x0, x1, x2, x3, x4, x5, x6, x7, nowhere;
    .reg .s32 left;
    .reg .u64 at, from;
    mov.u32 lane, %laneid;
    mad.lo.u32 nowhere, lane, 4, $1;
    add.u32 nowhere, nowhere, {4 * docs};
    mov.u32 x, %tid.x;
    shr.u32 x, x, 5;
    mov.u32 base, 0;
LISTS:
    setp.ge.u32 p, base, $6;
    @p bra DONE;
    add.u32 i, base, lane;
    setp.lt.u32 q, i, $6;
    setp.ge.u32 p, i, $7;
    @p add.u32 i, i, $8;
    mov.u32 start, 0;
    mov.u32 length, 0;
    mov.u32 w, 0;
    mad.wide.u32 from, i, 4, $4;
    @q ld.global.u32 t, [from];
    mad.wide.u32 from, i, 4, $5;
    @q ld.global.u32 w, [from];
    mad.wide.u32 from, t, 4, $2;
    @q ld.global.u32 start, [from];
    @q ld.global.u32 length, [from+4];
    sub.u32 length, length, start;
    add.u32 own, length, {_PIECE - 1};
    shr.u32 own, own, {_PIECE.bit_length() - 1};
    mov.u32 count, own;
    {scan}
    sub.u32 before, count, own;
    shfl.sync.idx.b32 all, count, 31, 31, -1;
PIECES:
    setp.ge.u32 p, x, all;
    @p bra NEXT;
    setp.gt.u32 q, count, x;
    vote.sync.ballot.b32 l, q, -1;
    brev.b32 l, l;
    clz.b32 l, l;
    shfl.sync.idx.b32 s1, start, l, 31, -1;
    shfl.sync.idx.b32 n1, length, l, 31, -1;
    shfl.sync.idx.b32 w1, w, l, 31, -1;
    shfl.sync.idx.b32 b1, before, l, 31, -1;
    sub.u32 off, x, b1;
    shl.b32 off, off, {_PIECE.bit_length() - 1};
    sub.u32 n1, n1, off;
    add.u32 off, off, s1;
    add.u32 off, off, lane;
    mad.wide.u32 at, off, 4, $3;
    sub.u32 left, n1, lane;
    add.u32 x, x, {warps};
    setp.ge.u32 q, n1, {_PIECE};
    @q bra WHOLE;
    setp.gt.u32 q, n1, 128;
    @q bra MANY;
    setp.gt.u32 q, n1, 64;
    @q bra MORE;
    {first(2)}
    bra PIECES;
MORE:
    {first(4)}
    bra PIECES;
MANY:
    {first(8)}
    bra PIECES;
WHOLE:
    {first(8, some=False)}
    bra PIECES;
NEXT:
    sub.u32 x, x, all;
    add.u32 base, base, 32;
    bra LISTS;
DONE:
    mov.u32 $0, 0;
    }}"""


def append(docs: int, threads: int, listed: bool) -> str:
    """Append the documents whose accumulator is at least $2 to the query's candidates, as `_key`s of theirs.

    $1 the accumulators; $3 the address of the query's count; $4 of its candidates, of which there is room for $5; $6
    the first document, or, where they are `listed`, the address of their ids; $7 the address of the deleted flags.

    A thread marks its documents in the bits of a word first, and a warp takes places for all of them at once: to wait
    for a place each took as long as all the rest where a hundred documents of a chunk reach the threshold.
    """
    turns = docs // (4 * threads)
    assert turns <= 8, "a thread's documents are the bits of one word"
    marks = "".join(
        f"""
    ld.shared.v4.u32 {{x0, x1, x2, x3}}, [a+{16 * threads * turn}];
    max.s32 m, x0, x1;
    max.s32 m1, x2, x3;
    max.s32 m, m, m1;
    setp.lt.s32 p, m, $2;
    @p bra BELOW{turn};
    {"".join(f"setp.ge.s32 p, x{i}, $2; @p or.b32 hits, hits, {1 << (4 * turn + i)};" for i in range(4))}
BELOW{turn}:"""
        for turn in range(turns)
    )
    # The highest bit of `rest`, which it leaves: the document's place in the chunk, and its number.
    take = f"""
    bfind.u32 bit, rest;
    shl.b32 one, 1, bit;
    xor.b32 rest, rest, one;
    shr.u32 m, bit, 2;
    mul.lo.u32 m, m, {4 * threads};
    and.b32 m1, bit, 3;
    add.u32 at, place, m;
    add.u32 at, at, m1;
    {"mad.wide.u32 from, at, 4, $6; ld.global.u32 doc, [from];" if listed else "add.u32 doc, at, $6;"}"""
    scan = "".join(
        f"shfl.sync.up.b32 v|p, count, {d}, 0, -1; @p add.u32 count, count, v;"
        for d in (1, 2, 4, 8, 16)
    )
    return f"""{{
    .reg .pred p;
    .reg .s32 x0, x1, x2, x3, m, m1;
    .reg .u32 a, place, doc, gone, slot, hits, rest, bit, one, at, count, own, all, v, lane;
    .reg .u64 from, key;
    mov.u32 place, %tid.x;
    shl.b32 place, place, 2;
    mad.lo.u32 a, place, 4, $1;
    mov.u32 hits, 0;
    {marks}
    mov.u32 rest, hits;
LIVE:
    setp.eq.u32 p, rest, 0;
    @p bra COUNT;
    {take}
    cvt.u64.u32 from, doc;
    add.u64 from, from, $7;
    ld.global.u8 gone, [from];
    setp.ne.u32 p, gone, 0;
    @p xor.b32 hits, hits, one;
    bra LIVE;
COUNT:
    popc.b32 own, hits;
    mov.u32 count, own;
    {scan}
    shfl.sync.idx.b32 all, count, 31, 31, -1;
    setp.eq.u32 p, all, 0;
    @p bra END;
    mov.u32 lane, %laneid;
    setp.eq.u32 p, lane, 31;
    mov.u32 slot, 0;
    @p atom.global.relaxed.gpu.add.u32 slot, [$3], all;
    shfl.sync.idx.b32 slot, slot, 31, 31, -1;
    sub.u32 count, count, own;
    add.u32 slot, slot, count;
    mov.u32 rest, hits;
WRITE:
    setp.eq.u32 p, rest, 0;
    @p bra END;
    {take}
    mad.lo.u32 at, at, 4, $1;
    ld.shared.u32 x0, [at];
    xor.b32 doc, doc, 2147483647;
    mov.b64 key, {{doc, x0}};
    mad.wide.u32 from, slot, 8, $4;
    setp.lt.u32 p, slot, $5;
    @p st.global.b64 [from], key;
    add.u32 slot, slot, 1;
    bra WRITE;
END:
    mov.u32 $0, 0;
    }}"""


def rescore(weights: int, half: bool) -> str:
    """Keys of documents by their exact scores: fp64 sums over their rows, a row half a warp's.

    $1 the query's map in shared memory: a byte a term, the place of its weight in the fp32 table `weights` bytes
    behind; $2 the terms of all rows, 16 bits each, and $3 their weights, fp32 or `half`, both from a multiple of 16
    bytes on; $4 the documents, $5 where all rows start, $6 the documents' keys, $7 how many; $8 the number of this
    block's first warp and $9 of all warps.

    A lane reads four entries at a time, from multiples of four on; what is not the row's counts 0. While two rows are
    added up the next two are on their way, where the two after them are, and which the two after those.
    """
    words = 2 if half else 4  # of four weights; as many bytes has each
    kind = "v2.b32" if half else "v4.b32"

    def fetch(s: str, r: int) -> str:
        """Round r of the rows that set s of registers is for."""
        terms = ", ".join(f"t{s}{r}{i}" for i in range(2))
        values = ", ".join(f"w{s}{r}{i}" for i in range(words))
        return f"""
    add.s32 place, rel{s}, {_ENTRIES * r};
    setp.lt.s32 p, place, length{s};
    mov.u32 t{s}{r}0, 0;
    mov.u32 t{s}{r}1, 0;
    @p ld.global.nc.L1::no_allocate.v2.u32 {{{terms}}}, [at+{2 * _ENTRIES * r}];
    @p ld.global.nc.L1::no_allocate.{kind} {{{values}}}, [from+{words * _ENTRIES * r}];"""

    def begin(s: str, r0: int = 0) -> str:
        rounds = range(_ROUNDS) if not r0 else [r0]
        return f"""
    and.b64 from, start{s}, -4;
    add.u64 from, from, entry;
    shl.b64 at, from, 1;
    add.u64 at, at, $2;
    shl.b64 from, from, {words.bit_length() - 1};
    add.u64 from, from, $3;
    {"".join(fetch(s, r) for r in rounds)}"""

    def add(s: str, r: int) -> str:
        code = ""
        for e in range(4):
            # 15 bits: behind the last row may be anything.
            term = f"bfe.u32 a, t{s}{r}{e // 2}, {16 * (e % 2)}, 15;"
            weight = (
                f"mov.b32 {{h0, h1}}, w{s}{r}{e // 2}; cvt.f32.f16 f, h{e % 2};"
                if half
                else f"mov.b32 f, w{s}{r}{e};"
            )
            code += f"""
    {term}
    add.u32 a, a, $1;
    ld.shared.u8 a, [a];
    mad.lo.u32 a, a, 4, $1;
    ld.shared.f32 g, [a+{weights}];
    {weight}
    add.s32 place, rel{s}, {_ENTRIES * r + e};
    setp.lt.u32 p, place, length{s};
    selp.f32 f, f, 0f00000000, p;
    cvt.f64.f32 x, f;
    cvt.f64.f32 y, g;
    fma.rn.f64 sum, x, y, sum;"""
        return code

    name = """
    setp.lt.u32 p, i, $7;
    mov.u32 named, -1;
    mad.wide.u32 from, i, 4, $4;
    @p ld.global.nc.u32 named, [from];
    mad.lo.u32 i, $9, 2, i;"""
    # A row from 0 to 0 where there is no document.
    look = """
    mov.u32 found, named;
    setp.ge.s32 p, named, 0;
    mov.u64 next, 0;
    mov.u64 end, 0;
    mad.wide.s32 from, named, 8, $5;
    @p ld.global.nc.u64 next, [from];
    @p ld.global.nc.u64 end, [from+8];"""

    def begun(s: str) -> str:
        """The rows that were found last, into set s."""
        return f"""
    mov.u64 start{s}, next;
    sub.u64 end, end, next;
    cvt.u32.u64 length{s}, end;
    mov.u32 doc{s}, found;
    cvt.u32.u64 a, start{s};
    and.b32 a, a, 3;
    sub.s32 rel{s}, first, a;
    {begin(s)}"""

    def turn(s: str, other: str) -> str:
        """The two documents of set s, while those of the other set are read."""
        across = "".join(
            f"""
    mov.b64 {{low, high}}, sum;
    shfl.sync.bfly.b32 low, low, {lanes}, 31, -1;
    shfl.sync.bfly.b32 high, high, {lanes}, 31, -1;
    mov.b64 x, {{low, high}};
    add.rn.f64 sum, sum, x;"""
            for lanes in (8, 4, 2, 1)
        )
        last = _ROUNDS - 1
        return f"""
    {begun(other)}
    {look}
    {name}
    mov.f64 sum, 0d0000000000000000;
    {"".join(add(s, r) for r in range(_ROUNDS))}
LONGER{s}:
    add.s32 place, rel{s}, {_ENTRIES * _ROUNDS};
    setp.ge.s32 p, place, length{s};
    @p bra DONE{s};
    add.s32 rel{s}, rel{s}, {_ENTRIES};
    add.u64 start{s}, start{s}, {_ENTRIES};
    {begin(s, last)}
    {add(s, last)}
    bra LONGER{s};
DONE{s}:
    not.b32 id, doc{s};
    {across}
    cvt.rn.f32.f64 f, sum;
    add.rn.f32 f, f, 0f00000000;
    mov.b32 bits, f;
    setp.lt.s32 p, bits, 0;
    @p xor.b32 bits, bits, 2147483647;
    mov.b64 key, {{id, bits}};
    setp.lt.and.u32 p, mine, $7, writes;
    mad.wide.u32 from, mine, 8, $6;
    @p st.global.b64 [from], key;
    mad.lo.u32 mine, $9, 2, mine;"""

    sets = ("a", "b")
    rounds = range(_ROUNDS)
    registers = ", ".join(
        [f"t{s}{r}{i}" for s in sets for r in rounds for i in range(2)]
        + [f"w{s}{r}{i}" for s in sets for r in rounds for i in range(words)]
        + [f"{what}{s}" for s in sets for what in ("length", "doc")]
    )
    return f"""{{
    .reg .pred p, writes;
    .reg .u32 lane, i, even, a, mine, id, low, high, named, found, {registers};
    .reg .s32 rela, relb, first, place, bits;
    .reg .b16 h0, h1;
    .reg .f32 f, g;
    .reg .f64 sum, x, y;
    .reg .u64 starta, startb, at, from, entry, key, next, end;
    mov.u32 lane, %laneid;
    mov.u32 even, %tid.x;
    shr.u32 even, even, 5;
    add.u32 even, even, $8;
    shl.b32 even, even, 1;
    shr.u32 i, lane, 4;
    add.u32 i, i, even;
    mov.u32 mine, i;
    and.b32 lane, lane, 15;
    setp.eq.u32 writes, lane, 0;
    shl.b32 first, lane, 2;
    cvt.u64.u32 entry, first;
    {name}
    {look}
    {name}
    {begun("a")}
    {look}
    {name}
LOOP:
    setp.ge.u32 p, even, $7;
    @p bra END;
    {turn("a", "b")}
    mad.lo.u32 even, $9, 2, even;
    setp.ge.u32 p, even, $7;
    @p bra END;
    {turn("b", "a")}
    mad.lo.u32 even, $9, 2, even;
    bra LOOP;
END:
    mov.u32 $0, 0;
    }}"""
