"""The shared-memory scoring of a chunk as PTX, for NVIDIA GPUs: what Triton's blocks have no words for.

A block's warps go their own ways through a query's posting lists, and a thread reads of its warp's lists without
waiting for the block. `sparse_scores.accumulate` uses these strings; its portable kernel does the same in Triton.
"""

from __future__ import annotations

# Postings that a warp takes at a time: 8 a lane, all under way at once. Lists of more are shared out among the warps.
_PIECE = 256
# Terms of a row that a lane reads at a time, by four lanes a row, and how often before it sees what is in the query:
# nearly all rows of 127 terms, or so, are no longer.
_EIGHT = 8
_APART = 4 * _EIGHT  # a row's terms from one round to the next
_ROUNDS = 8
READ_ANYHOW = 4 * _APART  # terms that are read whether the row has them or not
# Warps of a block that rescores, and rows it takes in a turn.
_BLOCK_WARPS = 8
TURN = 8 * _BLOCK_WARPS
# Where the length of a row stands in the 64 bits that say where it is.
LENGTH_AT = 40
# A filter has a line of 128 bytes for each low byte of a term, by which common terms, whose numbers are near each other
# in some vocabularies, are told apart. Lines of which each begins in the middle of the one before take half the room
# and let twice as much through that a query has not: 252 us a batch of 500 at 100 000 documents (H200) against 247.
_LINE = 128
FILTER_BYTES = 255 * _LINE + 128
# Terms that passed, of up to 32 rows of a warp: where they are, in bytes from the first, and above, for the scales of
# `bytes`, the number of the row.
_PASSED = 96
_TAKES = _PASSED // 32
# Terms of a lane that are under way at once where a turn's do not fit into the list.
_AT_ONCE = 8
_ROW_AT = 44
PASSED_BYTES = 8 * _PASSED * _BLOCK_WARPS
# Keys that a block ranks, and the shared memory that takes.
RANKED = 1024
RANK_BYTES = 16 * RANKED + 8 * _BLOCK_WARPS


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


def mark() -> str:
    """Set a query's filter, which is all 0, up: a bit for each of its terms, 32 times, a bank of shared memory each.

    $1 the filter; $2 the query's terms, of which the first $4 stand at the beginning of their row and the rest, of $3
    in all, $5 places further on. A term's bit is that of the low five bits of its high byte.
    """
    return f"""{{
    .reg .pred p, q;
    .reg .u32 lane, i, base, left, t, t1, one, a, l;
    .reg .u64 from;
    mov.u32 lane, %laneid;
    mov.u32 base, %tid.x;
    shr.u32 base, base, 5;
    mad.lo.u32 i, lane, {_BLOCK_WARPS}, base;
TERMS:
    setp.ge.u32 p, base, $3;
    @p bra DONE;
    setp.lt.u32 q, i, $3;
    setp.ge.u32 p, i, $4;
    mov.u32 a, i;
    @p add.u32 a, a, $5;
    mad.wide.u32 from, a, 4, $2;
    mov.u32 t, 0;
    @q ld.global.u32 t, [from];
    vote.sync.ballot.b32 left, q, -1;
BITS:
    bfind.u32 l, left;
    shl.b32 one, 1, l;
    xor.b32 left, left, one;
    shfl.sync.idx.b32 t1, t, l, 31, -1;
    mad.lo.u32 a, lane, 4, $1;
    and.b32 one, t1, 255;
    mad.lo.u32 a, one, {_LINE}, a;
    shr.u32 t1, t1, 8;
    and.b32 t1, t1, 31;
    shl.b32 one, 1, t1;
    red.shared.or.b32 [a], one;
    setp.ne.u32 p, left, 0;
    @p bra BITS;
    add.u32 base, base, {32 * _BLOCK_WARPS};
    add.u32 i, i, {32 * _BLOCK_WARPS};
    bra TERMS;
DONE:
    mov.u32 $0, 0;
    }}"""


def ordinal() -> str:
    """The number of those of the same class, below 32, that came before, in any order but for the warps'.

    $1 counters in shared memory, a word a class; $2 the class. All lanes come here together.
    """
    return """{
    .reg .pred p;
    .reg .u32 same, before, n, at, x, lane;
    match.any.sync.b32 same, $2, -1;
    mov.u32 before, %lanemask_lt;
    and.b32 before, before, same;
    popc.b32 before, before;
    popc.b32 n, same;
    mad.lo.u32 at, $2, 4, $1;
    mov.u32 x, 0;
    setp.eq.u32 p, before, 0;
    @p atom.shared.add.u32 x, [at], n;
    brev.b32 lane, same;
    clz.b32 lane, lane;
    shfl.sync.idx.b32 x, x, lane, 31, -1;
    add.u32 $0, x, before;
    }"""


def rescore(weights: str, rows: int) -> str:
    """Keys of documents by their exact scores: fp64 sums over their rows, a row four lanes', eight rows a warp's.

    $1 the query's filter; $2 in shared memory where `rows` rows
    begin, 40 bits, and how long they are, 24 bits above; for weights of `bytes` their scales and zeros, two fp32 each,
    stand behind; then there is room of PASSED_BYTES; $3 the terms of all rows, 16 bits each, and $4 their weights:
    `singles`, `halves` or `bytes`, both from a multiple of 16 bytes on; $5 the documents; $6 the documents' keys; $7
    the query; $8 how many documents; $9 which of them the first of these rows is, and $10 how many further the row is
    that comes {TURN} later.

    Few of a row's terms are the query's. A lane asks the filter about eight terms at a time, in a bank of its own, and
    keeps the answers as bits. What passes goes into a list of the warp's, in order; once that is full, or 32 rows have
    been read, the lanes share it out, load weights and the query's weights, 0 where the filter was wrong, and put the
    products in its place; then a lane adds up a row. Rows whose terms do not fit are added up on the spot. A warp's
    first list is of fewer rows than the one's before, so that they do not all wait at the same time.
    """
    width = {"bytes": 1, "halves": 2, "singles": 4}[weights]
    load = "b32" if width == 4 else f"u{8 * width}"
    lists = (16 if weights == "bytes" else 8) * rows
    # Rounds take turns between two words of answers, so that both have about as many.
    words = ("even", "odd")
    apart = 2 * _APART  # of the rounds of one word
    assert _ROUNDS * _EIGHT == 64, "the answers are two words"
    sure = 3  # rounds, which most rows have

    def fetch(r: int) -> str:
        load = f"ld.global.nc.v4.u32 {{t{r}0, t{r}1, t{r}2, t{r}3}}, [terms+{2 * _APART * r}];"
        if r < READ_ANYHOW // _APART:
            # Without a condition, most rows being as long: what a register held before is then of no interest.
            return f"""
    {load}"""
        return f"""
    {"".join(f"mov.u32 t{r}{i}, 0;" for i in range(4))}
    setp.gt.s32 p, coming, {_APART * r};
    @p {load}"""

    def ask(t: str, m: str) -> str:
        """Eight terms' answers, into the upper bits of m.

        A product of bytes makes an address of one of them, or takes it out: in another pipe than what shifts.
        """
        return "".join(
            f"""
    dp4a.u32.u32 a, {t}{i}, {_LINE << 16 * half}, bank;
    ld.shared.u32 x, [a];
    dp4a.u32.u32 a, {t}{i}, {1 << 16 * half + 8}, none;
    shf.r.wrap.b32 x, x, x, a;
    shf.r.wrap.b32 {m}, {m}, x, 1;"""
            for i in range(4)
            for half in range(2)
        )

    def ask_while(r: int) -> str:
        """Round r, where any lane has terms in it."""
        return f"""
    setp.gt.s32 p, left, {_APART * r};
    vote.sync.any.pred p, p, -1;
    @!p bra ASKED{r};
    {ask(f"t{r}", words[r % 2])}"""

    def asked(r: int) -> str:
        """What to do where that was the end: the bits move to where they belong."""
        return f"""
    bra ASKED;
ASKED{r}:
    shr.u32 even, even, {32 - _EIGHT * ((r + 1) // 2)};
    shr.u32 odd, odd, {32 - _EIGHT * (r // 2)};"""

    def valid(m: str, first: int) -> str:
        """Those of m's bits that are terms of the row: rounds `first`, `first` + 2, ..."""
        return f"""
    add.s32 u, left, {apart - _EIGHT - _APART * first};
    shr.s32 a, u, {apart.bit_length() - 1};
    mad.lo.s32 u, a, {-apart}, left;
    sub.s32 u, u, {_APART * first};
    max.s32 u, u, 0;
    mad.lo.u32 u, a, {_EIGHT}, u;
    bmsk.clamp.b32 u, 0, u;
    and.b32 {m}, {m}, u;"""

    # Bit b of a word is entry b + (apart - 8) * (b / 8) of what belongs to it.
    def bit(m: str, shift: int = apart - _EIGHT, p: str = "p") -> str:
        """The highest of the bits m, which it loses: p, whether there is one, and b, the entry."""
        return f"""
    setp.ne.u32 {p}, {m}, 0;
    bfind.u32 b, {m};
    shl.b32 a, 1, b;
    xor.b32 {m}, {m}, a;
    shr.u32 a, b, 3;
    mad.lo.u32 b, a, {shift}, b;"""

    def note(m: str, first: int, name: str = "") -> str:
        """List the bits m."""
        name += m.upper()
        return f"""
{name}:
    {bit(m)}
    {f"add.u32 b, b, {_APART * first};" if first else ""}
    mad.wide.u32 from, b, 2, passing;
    @p st.shared.b64 [at], from;
    @p add.u32 at, at, 8;
    setp.ne.u32 p, {m}, 0;
    vote.sync.any.pred p, p, -1;
    @p bra {name};"""

    convert = {
        "singles": "mov.b32 f, w;",
        "halves": "cvt.u16.u32 h, w; cvt.f32.f16 f, h;",
        "bytes": "cvt.rn.f32.u32 f, w; sub.rn.f32 f, f, zero; mul.rn.f32 f, f, scale;",
    }[weights]

    def at_once(*bits: tuple[str, int, int]) -> str:
        """Add up as many of the bits m as there are (m, first, shift), all of which are under way at once."""
        send = "".join(
            f"""
    {bit(m, shift, f"p{j}")}
    mad.wide.u32 from, b, 2, ids;
    mov.u32 i{j}, 0;
    @p{j} ld.global.nc.u16 i{j}, [from+{2 * first}];
    mad.wide.u32 from, b, {width}, values;
    mov.u32 w{j}, 0;
    @p{j} ld.global.nc.{load} w{j}, [from+{width * first}];"""
            for j, (m, first, shift) in enumerate(bits)
        )
        look = "".join(
            f"""
    mad.wide.u32 from, i{j}, 4, $7;
    mov.f32 g{j}, 0f00000000;
    @p{j} ld.global.nc.f32 g{j}, [from];"""
            for j in range(len(bits))
        )
        add = "".join(
            f"""
    mov.u32 w, w{j};
    {convert}
    cvt.f64.f32 dx, f;
    cvt.f64.f32 dy, g{j};
    fma.rn.f64 sum, dx, dy, sum;"""
            for j in range(len(bits))
        )
        return send + look + add

    begin = f"""
    ld.shared.v2.u32 {{low, high}}, [row];
    and.b32 a, high, 255;
    mov.b64 terms, {{low, a}};
    shr.u32 coming, high, {LENGTH_AT - 32};
    and.b32 a, low, {_EIGHT - 1};
    add.u32 coming, coming, a;
    sub.s32 coming, coming, first;
    mov.u32 from_first, -1;
    setp.eq.u32 p, first, 0;
    @p shl.b32 from_first, from_first, a;
    and.b64 terms, terms, {-_EIGHT};
    add.u64 terms, terms, mine;
    shl.b64 following, terms, 1;
    add.u64 terms, following, $3;
    {"".join(fetch(r) for r in range(_ROUNDS))}"""

    def entry(u: int) -> str:
        """Terms and weights of the list's take u."""
        where = {
            "singles": "shl.b64 from, from, 1;",
            "halves": "",
            "bytes": "shr.u64 from, from, 1;",
        }[weights]
        alone = f"and.b64 from, from, {(1 << _ROW_AT) - 1};" if weights == "bytes" else ""
        return f"""
    setp.lt.u32 p, a, used;
    mov.u64 from, 0;
    @p ld.shared.b64 from, [at+{256 * u}];
    {alone}
    add.u64 key, from, $3;
    mov.u32 i{u}, 0;
    @p ld.global.u16 i{u}, [key];
    {where}
    add.u64 key, from, $4;
    mov.u32 w{u}, 0;
    @p ld.global.L1::no_allocate.{load} w{u}, [key];
    add.u32 a, a, 32;"""

    def other(u: int) -> str:
        """The query's weights for take u."""
        return f"""
    setp.lt.u32 p, a, used;
    mad.wide.u32 from, i{u}, 4, $7;
    mov.u32 i{u}, 0;
    @p ld.global.u32 i{u}, [from];
    add.u32 a, a, 32;"""

    def product(u: int) -> str:
        scaled = f"""
    mov.u64 from, 0;
    @p ld.shared.b64 from, [at+{256 * u}];
    shr.u64 from, from, {_ROW_AT};
    cvt.u32.u64 b, from;
    mad.lo.u32 b, b, 8, $2;
    ld.shared.v2.f32 {{scale, zero}}, [b+{8 * rows}];"""
        return f"""
    setp.lt.u32 p, a, used;
    {scaled if weights == "bytes" else ""}
    mov.u32 w, w{u};
    {convert}
    cvt.f64.f32 dx, f;
    mov.b32 f, i{u};
    cvt.f64.f32 dy, f;
    mul.rn.f64 dx, dx, dy;
    @p st.shared.f64 [at+{256 * u}], dx;
    add.u32 a, a, 32;"""

    numbered = f"""
    sub.u32 a, row, $2;
    cvt.u64.u32 from, a;
    shl.b64 from, from, {_ROW_AT - 3};
    or.b64 passing, passing, from;"""
    across = "".join(
        f"""
    mov.b64 {{low, high}}, sum;
    shfl.sync.bfly.b32 low, low, {lanes}, 31, -1;
    shfl.sync.bfly.b32 high, high, {lanes}, 31, -1;
    mov.b64 dx, {{low, high}};
    add.rn.f64 sum, sum, dx;"""
        for lanes in (2, 1)
    )
    scan = "".join(
        f"shfl.sync.up.b32 a|p, count, {d}, 0, -1; @p add.u32 count, count, a;"
        for d in (1, 2, 4, 8, 16)
    )
    # Of document number b, whose id is in doc.
    write = """
    cvt.rn.f32.f64 f, sum;
    add.rn.f32 f, f, 0f00000000;
    mov.b32 bits, f;
    setp.lt.s32 q, bits, 0;
    @q xor.b32 bits, bits, 2147483647;
    not.b32 a, doc;
    mov.b64 key, {{a, bits}};
    mad.wide.u32 from, b, 8, $6;
    @{p} st.global.b64 [from], key;"""

    def add_up(name: str) -> str:
        """A lane a row of the list's, which is then empty."""
        steps = "".join(
            f"""
    setp.gt.u32 p, x, {n};
    @p ld.shared.f64 dx, [at+{8 * n}];
    @p add.rn.f64 sum, sum, dx;"""
            for n in range(4)
        )
        return f"""
    bar.warp.sync -1;
    and.b32 a, begins, 65535;
    mad.lo.u32 at, a, 8, list;
    shr.u32 x, begins, 16;
    @!here mov.u32 x, 0;
    mov.f64 sum, 0d0000000000000000;
{name}SUM:
    {steps}
    add.u32 at, at, 32;
    max.u32 x, x, 4;
    sub.u32 x, x, 4;
    setp.ne.u32 p, x, 0;
    vote.sync.any.pred p, p, -1;
    @p bra {name}SUM;
    mov.u32 b, i_first;
    {write.format(p="here")}
    bar.warp.sync -1;
    mov.u32 used, 0;
    mov.u32 turns, 0;"""

    advance = f"""
    add.u32 row, row, {8 * TURN};
    add.u32 i, i, $10;
    add.u32 turns, turns, 1;
    setp.lt.u32 p, row, end;
    setp.lt.and.u32 more, i, $8, p;
    setp.lt.and.u32 go, turns, 4, more;"""
    long = _ROUNDS * _APART
    names = ", ".join(f"t{r}{i}" for r in range(_ROUNDS) for i in range(4))
    takes = ", ".join(f"i{u}, w{u}" for u in range(max(_TAKES, _AT_ONCE)))
    each = range(_AT_ONCE)
    return f"""{{
    .reg .pred p, q, again, more, here, go, {", ".join(f"p{j}" for j in each)};
    .reg .u32 lane, row, end, i, a, b, w, x, bank, none, low, high, even, odd, from_first, first;
    .reg .u32 list, at, numbered, count, used, turns, begins, i_first, doc, total, {names}, {takes};
    .reg .s32 left, coming, u, bits;
    .reg .b16 h;
    .reg .f32 f, scale, zero, {", ".join(f"g{j}" for j in each)};
    .reg .f64 sum, dx, dy;
    .reg .u64 mine, terms, following, passing, ids, values, from, key;
    mov.u32 lane, %laneid;
    mad.lo.u32 bank, lane, 4, $1;
    mov.u32 none, 0;
    and.b32 first, lane, 3;
    shl.b32 first, first, 3;
    cvt.u64.u32 mine, first;
    mov.u32 i, %tid.x;
    shr.u32 list, i, 5;
    mad.lo.u32 list, list, {8 * _PASSED}, $2;
    add.u32 list, list, {lists};
    shr.u32 i, i, 2;
    mad.lo.u32 row, i, 8, $2;
    add.u32 end, $2, {8 * rows};
    and.b32 i, i, {-8};
    add.u32 i, i, $9;
    setp.ge.u32 p, i, $8;
    @p bra END;
    mov.u32 used, 0;
    mov.u32 turns, %tid.x;
    shr.u32 turns, turns, 5;
    and.b32 turns, turns, 3;
    mul.lo.u32 i_first, turns, $10;
    sub.u32 i_first, i, i_first;
    mov.u32 begins, -1;
    mov.u32 doc, 0;
    setp.ne.u32 again, used, 0;
    {begin}
LOOP:
    mov.u32 even, 0;
    mov.u32 odd, 0;
    mov.s32 left, coming;
    mov.u64 passing, following;
    {numbered if weights == "bytes" else ""}
    {"".join(ask(f"t{r}", words[r % 2]) for r in range(sure))}
    {"".join(ask_while(r) for r in range(sure, _ROUNDS))}
    {"".join(asked(r) for r in range(sure, _ROUNDS))}
ASKED:
    {valid("even", 0)}
    and.b32 even, even, from_first;
    {valid("odd", 1)}
    popc.b32 count, even;
    popc.b32 a, odd;
    add.u32 count, count, a;
    mov.u32 b, count;
    {scan}
    sub.u32 numbered, count, b;
    shfl.sync.idx.b32 total, count, 31, 31, -1;
    setp.gt.s32 p, left, {long};
    vote.sync.any.pred p, p, -1;
    @p bra LARGE;
    setp.gt.u32 p, total, {_PASSED};
    @p bra LARGE;
LIST:
    add.u32 x, used, total;
    setp.gt.u32 again, x, {_PASSED};
    @again bra FLUSH;
    add.u32 numbered, numbered, used;
    add.u32 count, count, used;
    mov.u32 used, x;
    and.b32 a, lane, 7;
    shl.b32 a, a, 2;
    shfl.sync.idx.b32 low, numbered, a, 31, -1;
    add.u32 a, a, 3;
    shfl.sync.idx.b32 high, count, a, 31, -1;
    sub.u32 high, high, low;
    shl.b32 high, high, 16;
    or.b32 low, low, high;
    shr.u32 a, lane, 3;
    setp.eq.u32 p, a, turns;
    @p mov.u32 begins, low;
    mad.lo.u32 at, numbered, 8, list;
    {advance}
    @!go bra LAST;
    {begin}
    {note("even", 0)}
    {note("odd", 1)}
    bra LOOP;
LAST:
    {note("even", 0, "LAST")}
    {note("odd", 1, "LAST")}
FLUSH:
    bar.warp.sync -1;
    shr.u32 a, lane, 3;
    mad.lo.u32 b, a, $10, i_first;
    and.b32 x, lane, 7;
    add.u32 b, b, x;
    mov.u32 i_first, b;
    setp.lt.u32 q, a, turns;
    setp.lt.and.u32 here, b, $8, q;
    setp.ne.and.u32 here, begins, -1, here;
    mad.wide.u32 from, b, 4, $5;
    @here ld.global.u32 doc, [from];
    mad.lo.u32 at, lane, 8, list;
    mov.u32 a, lane;
    {"".join(entry(u) for u in range(_TAKES))}
    mov.u32 a, lane;
    bar.warp.sync -1;
    {"".join(other(u) for u in range(_TAKES))}
    bar.warp.sync -1;
    mov.u32 a, lane;
    {"".join(product(u) for u in range(_TAKES))}
    @again bra SINCE;
    @!more bra SINCE;
    {begin}
    {add_up("NEXT")}
    mov.u32 i_first, i;
    bra LOOP;
SINCE:
    {add_up("SINCE")}
    mov.u32 i_first, i;
    @again bra LIST;
    bra END;
LARGE:
    ld.shared.v2.u32 {{low, high}}, [row];
    and.b32 low, low, {-_EIGHT};
    and.b32 high, high, 255;
    mov.b64 from, {{low, high}};
    add.u64 from, from, mine;
    shl.b64 ids, from, 1;
    add.u64 ids, ids, $3;
    shl.b64 values, from, {width.bit_length() - 1};
    add.u64 values, values, $4;
    {f"ld.shared.v2.f32 {{scale, zero}}, [row+{8 * rows}];" if weights == "bytes" else ""}
    mov.f64 sum, 0d0000000000000000;
REST:
    or.b32 a, even, odd;
    setp.ne.u32 p, a, 0;
    vote.sync.any.pred p, p, -1;
    @!p bra LONG;
    {at_once(*(("even", 0, apart - _EIGHT), ("odd", _APART, apart - _EIGHT)) * (_AT_ONCE // 2))}
    bra REST;
LONG:
    setp.gt.s32 p, left, {long};
    vote.sync.any.pred q, p, -1;
    @!q bra WRITE;
    @p ld.global.nc.v4.u32 {{t00, t01, t02, t03}}, [ids+{2 * long}];
    mov.u32 even, 0;
    {ask("t0", "even")}
    sub.s32 u, left, {long};
    max.s32 u, u, 0;
    bmsk.clamp.b32 u, 24, u;
    and.b32 even, even, u;
FEW:
    {at_once(*[("even", long - 24, 0)] * (_AT_ONCE // 2))}
    setp.ne.u32 p, even, 0;
    vote.sync.any.pred p, p, -1;
    @p bra FEW;
    sub.s32 left, left, {_APART};
    add.u64 ids, ids, {2 * _APART};
    add.u64 values, values, {width * _APART};
    bra LONG;
WRITE:
    {across}
    shr.u32 b, lane, 2;
    add.u32 b, b, i;
    setp.eq.u32 q, first, 0;
    setp.lt.and.u32 p, b, $8, q;
    mad.wide.u32 from, b, 4, $5;
    @p ld.global.u32 doc, [from];
    {write.format(p="p")}
    shr.u32 a, lane, 3;
    setp.eq.u32 p, a, turns;
    @p mov.u32 begins, -1;
    {advance}
    @!go bra FLUSH;
    {begin}
    bra LOOP;
END:
    mov.u32 $0, 0;
    }}"""


def rank() -> str:
    """Write the scores and ids that keys stand for, each at its rank: buckets of equal width, and a count of the larger
    ones in its own.

    $1 room of RANK_BYTES in shared memory; $2 the keys, all different, $3 of them, RANKED at most; $4 how many to
    write, no more than that, to $5, fp32, and $6, int64. See `_write_ranked`, which does it in global memory.
    """
    threads = 32 * _BLOCK_WARPS
    each = range(RANKED // threads)
    assert len(each) == 4, "a thread's buckets are a vector"
    bits = RANKED.bit_length() - 1
    begins, moved, sums = 4 * RANKED, 8 * RANKED, 16 * RANKED
    keys = ", ".join(f"h{u}, l{u}, b{u}, c{u}, n{u}" for u in each)
    of_warps = ", ".join(f"v{i}" for i in range(_BLOCK_WARPS))

    def load(u: int) -> str:
        return f"""
    mov.u32 h{u}, 0;
    @p{u} ld.global.v2.u32 {{l{u}, h{u}}}, [from+{8 * threads * u}];
    selp.b32 a, h{u}, most, p{u};
    max.s32 most, most, a;
    selp.b32 a, h{u}, least, p{u};
    min.s32 least, least, a;"""

    def read(at: int) -> str:
        return "".join(
            f"ld.shared.v4.u32 {{v{i}, v{i + 1}, v{i + 2}, v{i + 3}}}, [$1+{at + 4 * i}];"
            for i in range(0, _BLOCK_WARPS, 4)
        )

    def bucket(u: int) -> str:
        return f"sub.u32 b{u}, most, h{u}; shr.u32 b{u}, b{u}, shift; mad.lo.u32 b{u}, b{u}, 4, $1;"

    def move(u: int) -> str:
        """The key to where its bucket's are."""
        return f"""
    @p{u} ld.shared.u32 a, [b{u}+{begins}];
    add.u32 a, a, n{u};
    mad.lo.u32 a, a, 8, $1;
    @p{u} st.shared.v2.u32 [a+{moved}], {{l{u}, h{u}}};"""

    def look(u: int) -> str:
        """A key of the list by buckets, and its bucket."""
        return f"""
    mov.u32 h{u}, most;
    @p{u} ld.shared.v2.u32 {{l{u}, h{u}}}, [at+{moved + 8 * threads * u}];
    {bucket(u)}
    mov.u32 c{u}, 0;
    @p{u} ld.shared.u32 c{u}, [b{u}];
    @p{u} ld.shared.u32 n{u}, [b{u}+{begins}];"""

    def write(u: int) -> str:
        """Its rank, and what it stands for there."""
        return f"""
    mov.b64 mine, {{l{u}, h{u}}};
    mad.lo.u32 at, n{u}, 8, $1;
COUNT{u}:
    setp.ne.u32 p, c{u}, 0;
    vote.sync.any.pred q, p, -1;
    @!q bra COUNTED{u};
    @p ld.shared.s64 other, [at+{moved}];
    @p sub.u32 c{u}, c{u}, 1;
    add.u32 at, at, 8;
    setp.gt.and.s64 q, other, mine, p;
    @q add.u32 n{u}, n{u}, 1;
    bra COUNT{u};
COUNTED{u}:
    setp.lt.and.u32 p, n{u}, $4, p{u};
    mad.wide.u32 from, n{u}, 4, $5;
    setp.lt.s32 q, h{u}, 0;
    @q xor.b32 h{u}, h{u}, 2147483647;
    @p st.global.u32 [from], h{u};
    not.b32 l{u}, l{u};
    mov.u32 a, 0;
    mad.wide.u32 from, n{u}, 8, $6;
    @p st.global.v2.u32 [from], {{l{u}, a}};"""

    scan = "".join(
        f"shfl.sync.up.b32 b|p, a, {d}, 0, -1; @p add.u32 a, a, b;" for d in (1, 2, 4, 8, 16)
    )
    return f"""{{
    .reg .pred p, q, p0, p1, p2, p3;
    .reg .u32 tid, lane, warp, a, b, shift, at, {keys}, {of_warps};
    .reg .s32 most, least, x;
    .reg .s64 mine, other;
    .reg .u64 from;
    mov.u32 tid, %tid.x;
    mov.u32 lane, %laneid;
    shr.u32 warp, tid, 5;
    mad.wide.u32 from, tid, 8, $2;
    mov.s32 most, {-(1 << 31)};
    mov.s32 least, {(1 << 31) - 1};
    {"".join(f"add.u32 a, tid, {threads * u}; setp.lt.u32 p{u}, a, $3;" for u in each)}
    {"".join(load(u) for u in each)}
    redux.sync.max.s32 most, most, -1;
    redux.sync.min.s32 least, least, -1;
    mov.u32 b, 0;
    mad.lo.u32 at, tid, 16, $1;
    mad.lo.u32 a, warp, 4, $1;
    bar.sync 0;
    st.shared.v4.u32 [at], {{b, b, b, b}};
    setp.eq.u32 p, lane, 0;
    @p st.shared.u32 [a+{sums}], most;
    @p st.shared.u32 [a+{sums + 4 * _BLOCK_WARPS}], least;
    bar.sync 0;
    {read(sums)}
    {"".join(f"max.s32 most, most, v{i};" for i in range(_BLOCK_WARPS))}
    {read(sums + 4 * _BLOCK_WARPS)}
    {"".join(f"min.s32 least, least, v{i};" for i in range(_BLOCK_WARPS))}
    sub.u32 a, most, least;
    bfind.u32 shift, a;
    add.s32 x, shift, {1 - bits};
    max.s32 x, x, 0;
    mov.u32 shift, x;
    {"".join(bucket(u) + f"@p{u} atom.shared.add.u32 n{u}, [b{u}], 1;" for u in each)}
    bar.sync 0;
    ld.shared.v4.u32 {{c0, c1, c2, c3}}, [at];
    add.u32 c1, c1, c0;
    add.u32 c2, c2, c1;
    add.u32 c3, c3, c2;
    mov.u32 a, c3;
    {scan}
    setp.eq.u32 p, lane, 31;
    mad.lo.u32 b, warp, 4, $1;
    @p st.shared.u32 [b+{sums}], a;
    sub.u32 a, a, c3;
    bar.sync 0;
    {read(sums)}
    {"".join(f"setp.gt.u32 p, warp, {i}; @p add.u32 a, a, v{i};" for i in range(_BLOCK_WARPS - 1))}
    add.u32 c0, c0, a;
    add.u32 c1, c1, a;
    add.u32 c2, c2, a;
    st.shared.v4.u32 [at+{begins}], {{a, c0, c1, c2}};
    bar.sync 0;
    {"".join(move(u) for u in each)}
    bar.sync 0;
    mad.lo.u32 at, tid, 8, $1;
    {"".join(look(u) for u in each)}
    {"".join(write(u) for u in each)}
    mov.u32 $0, 0;
    }}"""
