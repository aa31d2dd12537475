"""The shared-memory scoring of a chunk as PTX, for NVIDIA GPUs: what Triton's blocks have no words for.

A block's warps go their own ways through a query's posting lists, and a thread reads of its warp's lists without
waiting for the block. `sparse_scores_accumulate` uses these strings; its portable kernel does the same in Triton.
"""

from __future__ import annotations

__all__ = ["accumulate", "append", "clear"]

# Postings that a warp takes at a time: 8 a lane, all under way at once. Lists of more are shared out among the warps.
_PIECE = 256


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
    """
    words = ("x0", "x1", "x2", "x3")
    one = "".join(
        f"""
    setp.lt.s32 p, {x}, $2;
    @p bra SKIP{i};
    {f"ld.global.u32 doc, [ids+{4 * i}];" if listed else f"add.u32 doc, place, {i}; add.u32 doc, doc, $6;"}
    cvt.u64.u32 from, doc;
    add.u64 from, from, $7;
    ld.global.u8 gone, [from];
    setp.ne.u32 p, gone, 0;
    @p bra SKIP{i};
    atom.global.relaxed.gpu.add.u32 slot, [$3], 1;
    setp.ge.u32 p, slot, $5;
    @p bra SKIP{i};
    xor.b32 doc, doc, 2147483647;
    mov.b64 key, {{doc, {x}}};
    mad.wide.u32 from, slot, 8, $4;
    st.global.b64 [from], key;
SKIP{i}:"""
        for i, x in enumerate(words)
    )
    return f"""{{
    .reg .pred p;
    .reg .s32 x0, x1, x2, x3, m, m1;
    .reg .u32 a, place, doc, gone, slot;
    .reg .u64 from, key, ids;
    mov.u32 place, %tid.x;
    shl.b32 place, place, 2;
    mad.lo.u32 a, place, 4, $1;
LOOP:
    ld.shared.v4.u32 {{x0, x1, x2, x3}}, [a];
    max.s32 m, x0, x1;
    max.s32 m1, x2, x3;
    max.s32 m, m, m1;
    setp.lt.s32 p, m, $2;
    @p bra REST;
    {"mad.wide.u32 ids, place, 4, $6;" if listed else ""}
    {one}
REST:
    add.u32 a, a, {16 * threads};
    add.u32 place, place, {4 * threads};
    setp.lt.u32 p, place, {docs};
    @p bra LOOP;
    mov.u32 $0, 0;
    }}"""
