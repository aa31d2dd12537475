"""Draws a program from a seed: blocks of the families in many spellings, among ordinary layers, with hazards inserted
between their steps."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

import torch

from .program import STAGES, Input, Program, Step

__all__ = ["FAMILIES", "generate"]

D, H, T = 8, 16, 5  # features, neurons, terms per document
NO_FLOATS = (
    "keep",
    "ids",
    "best",
    "offsets",
    "size",
)  # prefixes of the names of tensors that are not floating-point


class Maker:
    """A builder that draws the inputs and steps of one program."""

    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        self.inputs: dict[str, Input] = {}
        self.steps: list[Step] = []
        self.returns: list[str] = []
        self.floats = self.r.choices(
            [torch.float32, torch.bfloat16, torch.float16, torch.float64], [82, 9, 3, 6]
        )[0]
        self.training = self.r.random() < 0.6
        self.frozen = self.r.choices([0.0, 0.3], [3, 1])[0]
        self.weights = self.r.choices(["weight", "integers", "zeros"], [94, 5, 1])[0]
        self.values = self.r.choices(
            ["normal", "integers", "repeated", "nan", "infinite", "zeros", "huge"],
            [78, 6, 5, 4, 4, 2, 1],
        )[0]
        self.count = 0
        # Draws what was added later: the other draws of a seed stay as they were. `often` is its share.
        self.more, self.often = random.Random(f"more {seed}"), 0.0

    def name(self, stem: str) -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def do(self, stem: str, text: str, instead: str | None = None) -> str:
        """Append a step that assigns `text` to a new name, and return the name."""
        name = self.name(stem)
        self.steps.append(Step(f"{name} = {text}", instead))
        return name

    def choose(self, *texts: str) -> str:
        return self.r.choice(texts)

    def rarely(self, share: float) -> bool:
        return self.more.random() < share * self.often

    def write(self, texts: Sequence[str], most: int, **names: str) -> None:
        """Append up to `most` of these writes, at least one if `most` is more than one."""
        for _ in range(self.more.randint(most > 1, most)):
            self.steps.append(Step(self.more.choice(texts).format(**names)))

    def parts(self, text: str, count: int = 2) -> list[str]:
        """Append the steps that assign `text` to several names and write some of them from one another."""
        names = [self.name("t") for _ in range(count)]
        self.steps.append(Step(f"{', '.join(names)} = {text}"))
        low, high = self.more.sample(names, 2)
        self.write(PART_WRITES, 3, low=low, high=high)
        return names

    def given(self, stem: str, shape: tuple, values: str, **fields: object) -> str:
        name = self.name(stem)
        self.inputs[name] = Input(name, shape, values, **fields)  # type: ignore[arg-type]
        return name

    def features(self, shape: tuple = ("B", "L", D)) -> str:
        grad = self.training and self.r.random() < 0.5
        return self.given("x", shape, self.values, dtype=self.floats, grad=grad)

    def weight(self, *shape: int | str) -> str:
        grad = self.training and self.r.random() >= self.frozen
        return self.given("w", shape, self.weights, dtype=self.floats, grad=grad)

    def mask(self, shape: tuple = ("B", "L")) -> str:
        kinds = ["mask", "mask:random", "mask:empty", "mask:weights", "mask:signed"]
        values = self.r.choices(kinds, [5, 3, 2, 2, 1])[0]
        if values in kinds[:3] and self.r.random() < 0.3:
            return self.given("keep", shape, values, dtype=self.r.choice([torch.bool, torch.int64]))
        return self.given("mask", shape, values, dtype=self.floats)

    def linear(
        self, x: str, out: int | str, features: int | str = D, weight: str | None = None
    ) -> str:
        w = weight or self.weight(out, features)
        if self.r.random() < 0.65:
            b = self.weight(out)
            text = self.choose(
                *[f"F.linear({x}, {w}, {b})"] * 5,
                f"{x} @ {w}.T + {b}",
                f"{b} + torch.matmul({x}, {w}.t())",
            )
        else:
            text = self.choose(
                *[f"F.linear({x}, {w})"] * 4,
                f"{x} @ {w}.mT",
                f"torch.einsum('...d,vd->...v', {x}, {w})",
            )
        return self.do("z", text)

    def rectified(self, z: str) -> str:
        text = self.choose(
            *[
                f"F.relu({z})",
                f"torch.relu({z})",
                f"{z}.relu()",
                f"{z}.clamp(min=0)",
                f"{z}.clamp_min(0)",
            ]
            * 2,
            f"torch.maximum({z}, torch.zeros_like({z}))",
            f"torch.where({z} > 0, {z}, 0.0)",
            f"F.threshold({z}, 0.0, 0.0)",
            f"torch.fmax({z}, torch.zeros_like({z}))",
            f"F.relu({z}, inplace=True)",
        )
        return self.do("a", text, z)


# --- Constants of a graph, and parts of one tensor ---------------------------------------------------------

MASKS = (
    "torch.ones({n}, {n}, dtype=torch.bool)",
    "torch.zeros({n}, {n}, dtype=torch.bool)",
    "torch.full(({n}, {n}), True)",
    "torch.ones({n}, {n}, dtype=torch.bool).tril()",
    "torch.ones({n}, {n}).triu(1) == 0",
    "torch.arange({n})[:, None] >= torch.arange({n})",
    "(torch.arange({n})[:, None] - torch.arange({n})).abs() < 2",
)
MASK_WRITES = (
    "{k}[1:, :4] = False",
    "{k}[1:, :1] = True",
    "{k}[:, -1] = False",
    "{k}[0] = True",
    "{k}.T[:2] = False",
    "{k}[torch.tensor([0, -1])] = True",
    "{k}[{k}.T.clone()] = True",
    "{k}.fill_diagonal_(True)",
    "{k}.diagonal().fill_(False)",
    "{k}.logical_not_()",
    "{k} |= torch.eye({n}, dtype=torch.bool)",
    "{k}.logical_or_({k}.T.clone())",
    "{k}[1:] &= {k}[:1]",
    "{k}[:, 1:].logical_xor_({k}[:, :1])",
    "{k}.masked_fill_(torch.arange({n}) > 2, True)",
    "{k}.view(-1)[::3] = True",
)
MASK_READS = (
    "{k} | {k}.T",
    "{k} & {k}.mT",
    "{k} ^ {k}.T",
    "{k} | ~{k}.T",
    "~{k}",
    "{k}[:1] | {k}",
    "{k}.logical_or({k}.flip(0))",
    "torch.stack([{k}, {k}.T]).any(0)",
    "({k}.float() + {k}.float().T) > 0",
    "{k}.expand(2, -1, -1)[1] & {k}.T",
)
BIASES = (
    "torch.zeros({n}, {n})",
    "torch.full(({n}, {n}), 0.25)",
    "torch.ones({n}, {n}).tril()",
    "-0.1 * (torch.arange({n})[:, None] - torch.arange({n})).abs()",
    "torch.zeros({n}, {n}).masked_fill_(torch.arange({n})[:, None] < torch.arange({n}), -1e4)",
)
BIAS_WRITES = (
    "{k}[1:, :2] = -1.0",
    "{k}[:, 0] += 0.5",
    "{k}[0] = 0.75",
    "{k}.T[-1].zero_()",
    "{k}.fill_diagonal_(0.5)",
    "{k}[torch.tensor([0])] = 2.0",
    "{k}[{k} > 0.2] = -0.5",
    "{k}[1:].mul_({k}[:1])",
    "{k}.add_({k}.T.clone())",
    "{k}.clamp_(min=0.0)",
    "{k}.view(-1)[::3] = 1.0",
)
BIAS_READS = ("{k} + {k}.T", "{k} - {k}.mT", "{k} * {k}", "{k}.maximum({k}.T)", "{k} + {k}[:1]")
PART_WRITES = (
    "{low}[:] = 3.0",
    "{low}.mul_(0.5)",
    "{low}.relu_()",
    "{low}.copy_({high})",
    "{high}.add_({low})",
    "{high} = {high}.mul_({low})",
    "{high}.mul_({low})",
    "{high} += {low}.detach()",
    "{high} = {high}.add_({low})",
    "{high} = {high}.add_({low})",
    "{high}[..., 1:] = {low}[..., 1:]",
    "torch.maximum({low}.detach(), {high}.detach(), out={high}.detach())",
)
ID_WRITES = ("{k}[:, 0] = 3", "{k}[1:] = {k}[:1]", "{k}.fill_(1)", "{k}[:, 1:].sub_({k}[:, 1:])")


def built(m: Maker, n: str, kind: str) -> str:
    """Append the steps of a constant: a mask [n, n], a bias [n, n], or one of two parts [n] of a tensor."""
    if kind == "part":
        halves = [f"torch.ones(2, {n})", f"torch.zeros(3, {n})[1:]", f"torch.full((2, {n}), 0.5)"]
        halves += [f"torch.zeros(2, {n}).unbind(0)", f"torch.ones(2 * {n}).chunk(2)"]
        return m.more.choice(m.parts(m.more.choice(halves)))
    makes, writes, reads = {
        "keep": (MASKS, MASK_WRITES, MASK_READS),
        "bias": (BIASES, BIAS_WRITES, BIAS_READS),
    }[kind]
    k = m.do(kind, m.more.choice(makes).format(n=n))
    m.write(writes, 2, k=k, n=n)
    if m.more.random() < 0.7:
        other = m.do(kind, m.more.choice(reads).format(k=k), k)
        m.write(writes, 1, k=m.more.choice([k, other]), n=n)
        k = other
    return k


def projections(m: Maker, x: str, count: int, out: int | str) -> list[str]:
    """Append one projection that is split into several."""
    w = m.weight(count, out, D)
    whole = m.do(
        "z", m.more.choice([f"F.linear({x}, {w}.flatten(0, 1))", f"{x} @ {w}.view(-1, {D}).T"])
    )
    size = f"{whole}.shape[-1] // {count}"
    slices = ", ".join(f"{whole}[..., {i} * ({size}) : {i + 1} * ({size})]" for i in range(count))
    texts = [slices, slices, f"{whole}.chunk({count}, -1)", f"{whole}.split({size}, -1)"]
    texts += [f"{whole}.unflatten(-1, ({count}, -1)).unbind(-2)"]
    texts += [", ".join(f"F.linear({x}, {w}[{i}])" for i in range(count))]
    return m.parts(m.more.choice(texts), count)


# --- Blocks of the families: each returns its result -----------------------------------------------------


def splade_head(m: Maker, x: str) -> str:
    """Append a SPLADE head: the maximum over the positions of functions of logits."""
    z = m.linear(x, "V")
    mask = m.mask() if m.r.random() < 0.75 else None
    where = m.r.choice(["after", "after", "before", "last"])
    if mask and where == "before":
        fill = m.choose("-1e4", "float('-inf')", "-50.0", "0.0")
        z = m.do("z", f"{z}.masked_fill({mask}.unsqueeze(-1) == 0, {fill})", z)
    elif mask and where == "last":
        z = m.do("z", f"{z} + (1 - {mask}.to({z}.dtype)).unsqueeze(-1) * -1e4", z)
    a = (
        m.rectified(z)
        if m.r.random() < 0.9
        else m.do("a", m.choose(f"F.leaky_relu({z})", f"F.softplus({z})", f"F.elu({z})"), z)
    )
    for _ in range(m.r.choices([0, 1, 2], [2, 6, 1])[0]):
        a = m.do(
            "a",
            m.choose(
                *[f"torch.log1p({a})"] * 4,
                f"torch.log(1 + {a})",
                f"({a} + 1).log()",
                f"{a}.sqrt()",
                f"{a} * 0.5",
                f"{a}.square()",
                f"({a} * 3.0) * 0.25",
            ),
            a,
        )
    if mask and where == "after":
        a = m.do(
            "a",
            m.choose(
                f"{a} * {mask}.unsqueeze(-1)",
                f"{a} * {mask}[:, :, None]",
                f"{mask}.unsqueeze(-1) * {a}",
            ),
            a,
        )
    kind = m.choose(
        *[
            "{}.amax(1)",
            "{}.amax(dim=1)",
            "torch.amax({}, -2)",
            "{}.max(1).values",
            "torch.max({}, dim=1)[0]",
        ]
        * 2,
        "{}.mT.amax(-1)",
    )
    return m.do("y", kind.format(a))


def gathered(m: Maker, a: str) -> str:
    """Append a decoder of the largest activations, which gathers rows or columns of its weight."""
    best, ids = m.name("t"), m.name("ids")
    m.steps.append(Step(f"{best}, {ids} = {a}.topk(3, dim=-1)"))
    if m.more.random() < 0.3:
        m.write(ID_WRITES, 1, k=ids)
    rows, columns = m.weight("H", D), m.weight(D, "H")
    texts = [
        f"({best}.unsqueeze(-1) * {rows}[{ids}]).sum(-2)",
        f"torch.einsum('blk,blkd->bld', {best}, {rows}[{ids}])",
        f"({best}.unsqueeze(-2) @ F.embedding({ids}, {rows})).squeeze(-2)",
        f"({columns}[:, {ids}] * {best}).sum(-1).movedim(0, -1)",
        f"torch.zeros_like({a}).scatter(-1, {ids}, {best}) @ {rows}",
    ]
    return m.do("y", m.more.choice(texts))


def relu_ffn(m: Maker, x: str) -> str:
    """Append a feed-forward block with sparse activations."""
    u, *more = projections(m, x, 2, "H") if m.rarely(0.25) else [m.linear(x, "H")]
    if more and m.more.random() < 0.5:
        a = m.do("a", f"{u}.relu_()", u)
        m.write(PART_WRITES, 1, low=more[0], high=a)
    elif m.r.random() < 0.85:
        a = m.rectified(u)
    else:
        texts = [f"{u} * ({u} > 0)", f"{u} * ({u} > 0.3)", f"({u} + {u}.abs()) * 0.5"]
        a = m.do("a", m.choose(*texts, f"F.relu6({u})"), u)
    if m.r.random() < 0.25:
        a = m.do("a", m.choose(f"{a}.square()", f"{a} ** 2", f"{a} * {a}"), a)
    if m.r.random() < 0.35 or more:
        g = more[0] if more else m.linear(x, "H")
        texts = [f"{a} * {g}", f"{g} * {a}", f"torch.mul({g}, {a})"]
        a = m.do("a", m.choose(*texts, *[f"{a}.mul_({g})"] * 2 * len(more)), a)
    y = gathered(m, a) if m.rarely(0.25) else m.linear(a, D, "H")
    if m.r.random() < 0.3:
        y = m.do("y", f"{x} + {y}", y)
    return y


def probabilities(m: Maker, z: str, dims: Sequence[str] = ("-1",), shape: tuple = ()) -> str:
    dim = m.r.choice(dims)
    texts = [f"entmax15({z}, dim={dim})", f"sparsemax({z}, dim={dim})"] * 3
    texts += [f"entmax_bisect({z}, {m.choose('1.5', '1.3', '2.0', '1.75')}, dim={dim})"]
    if dim == "-1" and m.r.random() < 0.3:
        kind, grad = m.r.choice([torch.float32, m.floats]), m.training and m.r.random() < 0.5
        alpha = m.given("alpha", (*shape, 1), "alpha", dtype=kind, grad=grad)
        texts += [f"entmax_bisect({z}, {alpha}, dim=-1)"] * 6
    return m.do("p", m.r.choice(texts), z)


def entmax(m: Maker, x: str) -> str:
    """Append sparse probabilities of rows."""
    if m.r.random() < 0.5:
        z = m.linear(x, "N")
    else:
        z = m.given(
            "z", ("B", "L", "N"), m.values, dtype=m.floats, grad=m.training and m.r.random() < 0.7
        )
    if m.r.random() < 0.4:
        # Each row keeps an element: for a row of -inf alone the operator returns zeros, as documented.
        keep = m.given("keep", ("B", "L", "N"), "mask:one", dtype=torch.bool)
        fill = m.choose("-1e4", "-1e9", "-3e4", "float('-inf')")
        z = m.do("z", f"{z}.masked_fill(~{keep}, {fill})", z)
    if m.r.random() < 0.3:
        z = m.do("z", m.choose(f"{z} / 0.7", f"{z} * 2.0", f"{z} - {z}.amax(-1, keepdim=True)"), z)
    return probabilities(m, z, ("-1", "-1", "1", "2"), ("B", "L"))


def entmax_attention(m: Maker, x: str) -> str:
    """Append attention with sparse probabilities."""
    source = m.features() if m.r.random() < 0.2 else x
    heads = m.r.random() < 0.3

    def projected(of: str) -> str:
        t = m.linear(of, D)
        return m.do("t", f"{t}.unflatten(-1, (2, -1)).transpose(1, 2)") if heads else t

    if not heads and source == x and m.rarely(0.3):
        q, k, v = projections(m, x, 3, D)
    else:
        q, k, v = projected(x), projected(source), projected(source)
    scale = m.choose("", "* 0.5", "/ 2.0", "/ 8**0.5", f"* {q}.shape[-1] ** -0.5")
    s = m.do(
        "s",
        f"{m.choose(f'{q} @ {k}.mT', f'{q} @ {k}.transpose(-2, -1)', f'torch.matmul({q}, {k}.mT)')} {scale}",
    )
    kind = m.r.random()
    if m.rarely(0.5):
        n = f"{s}.shape[-1]"
        what = m.more.choice(["keep", "keep", "keep", "bias", "part"])
        k = built(m, n, what)
        texts = [f"{s}.masked_fill(~{k}, -1e4)", f"torch.where({k}, {s}, -1e4)"]
        texts += [
            f"{s}.masked_fill_({k}.logical_not(), -3e4)",
            f"{s} + (~{k}).to({s}.dtype) * -1e4",
        ]
        s = m.do("s", m.more.choice(texts) if what == "keep" else f"{s} + {k}.to({s}.dtype)", s)
    elif kind < 0.3:
        mask = m.mask()
        at = f"{mask}[:, None, None]" if heads else f"{mask}[:, None]"
        s = m.do(
            "s",
            f"{s}.masked_fill({at} == 0, {m.choose('-1e4', '-3e4', '-1e9' if m.floats != torch.float16 else '-6e4')})",
            s,
        )
    elif kind < 0.5:
        past = f"torch.ones({s}.shape[-2], {s}.shape[-1], dtype=torch.bool).tril()"
        keep = m.do("keep", past)
        s = m.do(
            "s", m.choose(f"{s}.masked_fill(~{keep}, -1e4)", f"torch.where({keep}, {s}, -1e4)"), s
        )
    elif kind < 0.6:
        bias = m.weight("L", "L")
        s = m.do("s", f"{s} + {bias}", s)
    p = probabilities(m, s, shape=("B", 1, 1) if heads else ("B", 1))
    y = m.do("y", m.choose(f"{p} @ {v}", f"torch.matmul({p}, {v})"))
    return m.do("y", f"{y}.transpose(1, 2).flatten(2)") if heads else y


def sparse_scores(m: Maker, x: str) -> str:
    """Append scores of documents; their queries are a new input."""
    q = m.given(
        "q",
        ("Q", "V"),
        m.r.choice(["sparse", "normal"]) if m.values not in ("nan", "infinite") else m.values,
        dtype=m.floats,
        grad=m.training and m.r.random() < 0.5,
    )
    width = m.r.choice([m.floats] * 6 + [torch.float32, torch.float16, torch.bfloat16])
    kind = m.r.random()
    if m.rarely(0.3):  # the table's columns are gathered or cut
        order = f"torch.arange({q}.shape[1]).flip(0)"
        texts = [f"{q}[:, {order}]", f"{q}.index_select(1, {order})", f"{q}[:, :4]", f"{q}[:, 1:]"]
        q = m.do("q", m.more.choice(texts), q)
    if kind < 0.7:
        ids = m.given("ids", ("N", T), "ids:4", dtype=torch.int64)
        if m.rarely(0.3):
            ids = m.do("ids", f"{ids}.clone()", ids)
            m.write(ID_WRITES, 2, k=ids)
        w = m.given("w", ("N", T), m.r.choice(["sparse", "normal"]), dtype=width)
        f = m.choose("", "", "", "", ".sqrt()", ".relu()", ".log1p()", " * 2.0")
        texts = [f"({q}[:, {ids}]{f} * {w}).sum(-1)", f"({w} * {q}[:, {ids}]{f}).sum(dim=2)"] * 3
        if width == m.floats:
            texts.append(f"torch.einsum('qnl,nl->qn', {q}[:, {ids}]{f}, {w})")
        if f == "":
            texts.append(
                f"({q}.index_select(1, {ids}.view(-1)).view(-1, *{ids}.shape) * {w}).sum(-1)"
            )
            texts.append(f"(F.embedding({ids}, {q}.t()) * {w}.unsqueeze(-1)).sum(1).t()")
        if m.r.random() < 0.3:  # in two steps, so that hazards can come between them
            g = m.do("g", f"{q}[:, {ids}]{f}")
            texts = [f"({g} * {w}).sum(-1)"]
        y = m.do("y", m.r.choice(texts))
    else:
        ids = m.given("ids", ("P",), "ids:4", dtype=torch.int64)
        rows = m.given("ids", ("P",), "sorted:2", dtype=torch.int64)
        w = m.given("w", ("P",), "normal", dtype=m.floats)
        parts = m.do("parts", f"{q}[:, {ids}] * {w}")
        size = f"{q}.new_zeros({q}.shape[0], 4)"
        y = m.do(
            "y",
            m.choose(
                f"{size}.index_add_(1, {rows}, {parts})",
                f"{size}.scatter_add(1, {rows}.expand({q}.shape[0], -1), {parts})",
                f"torch.index_add({size}, 1, {rows}, {parts})",
            ),
        )
        return y
    if m.r.random() < 0.4:
        y = m.do(
            "y",
            m.choose(
                f"{y}.topk(2)[0]",
                f"torch.topk({y}, 2, dim=1).values",
                f"{y}.topk(min(2, {y}.shape[-1]), dim=-1)[0]",
            ),
        )
    return y


def layer_norm(m: Maker, x: str) -> str:
    return m.do("h", f"F.layer_norm({x}, ({D},), {m.weight(D)})", x)


def ordinary_block(m: Maker, x: str) -> str:
    """Append a feed-forward block without sparse activations."""
    a = m.do("a", m.choose("F.gelu({})", "F.silu({})", "torch.tanh({})").format(m.linear(x, "H")))
    return m.do("h", f"{x} + {m.linear(a, D, 'H')}", x)


def ordinary_attention(m: Maker, x: str) -> str:
    q, k, v = (m.linear(x, D) for _ in range(3))
    fused = f"F.scaled_dot_product_attention({q}, {k}, {v})"
    return m.do("h", m.choose(f"({q} @ {k}.mT * 0.5).softmax(-1) @ {v}", fused), x)


def convolution(m: Maker, x: str) -> str:
    return m.do("h", f"F.conv1d({x}.mT, {m.weight(D, D, 3)}, padding=1).mT", x)


def highway(m: Maker, x: str) -> str:
    gate = m.do("g", f"torch.sigmoid({m.linear(x, D)})")
    return m.do("h", f"{gate} * torch.tanh({m.linear(x, D)}) + (1 - {gate}) * {x}", x)


ORDINARY = (layer_norm, layer_norm, ordinary_block, ordinary_attention, convolution, highway)


FAMILIES: dict[str, Callable[[Maker, str], str]] = {
    f.__name__: f for f in (splade_head, relu_ffn, entmax, entmax_attention, sparse_scores)
}


# --- Hazards -------------------------------------------------------------------------------------------

WRITES = (
    "{v}.mul_(0.5)",
    "{v}.clamp_(-0.5, 0.5)",
    "{v} += 0.25",
    "{v} *= 0.5",
    "{v}.detach().clamp_(-0.5, 0.5)",
    "{v}.data.mul_(2.0)",
    "{v}.detach().mT.mul_(0.5)",
    "{v}[..., :1] = 0.25",
    "{v}[..., 0].zero_()",
    "{v}.detach()[..., -1].fill_(0.75)",
    "{v}.detach().reshape(-1)[:1].fill_(2.0)",
    "{v}.unbind(0)[0].add_(1.0)",
    "{v}.detach().numpy()[..., 0] = 0.5",
    "np.multiply({v}.detach().numpy(), 0.5, out={v}.detach().numpy())",
    "negate_({v}.detach())",
    "torch.mul({v}.detach(), 0.5, out={v}.detach())",
    "torch._foreach_mul_([{v}.detach()], 0.5)",
    "torch._foreach_add_([{v}], 0.5)",
    "F.relu({v}, inplace=True)",
    "{v}.copy_({v}.detach() * 0.5)",
    "{v}.index_fill_(-1, torch.tensor([0]), 0.5)",
    "{v}.masked_fill_({v} > 0.5, 0.0)",
    "{v}.data = {v}.data * 2.0",
    "torch.cond({v}.sum() > -1e30, lambda t: t.mul_(0.5).sum(), lambda t: t.sum(), ({v}.detach(),))",
    "checkpoint(lambda t: t.mul_(0.5), {v}.detach())",
    "region(lambda t: t.mul_(0.5).sum(), {v}.detach())",
    "scale_in_place({v}.detach())",
)
QUIET = (
    "{v}.mul_(0.25)",
    "{v}.clamp_(-0.5, 0.5)",
    "{v}[..., 0] = 0.0",
    "{v}.add_(0.5)",
)  # under no_grad
CHANGES = {
    "narrowed": (
        "{v}.to(torch.bfloat16).to({v}.dtype)",
        "{v}.half().to({v}.dtype)",
        "{v}.to(torch.float8_e4m3fn).to({v}.dtype)",
        "{v}.to(torch.float8_e5m2).to({v}.dtype)",
        "{v}.bfloat16().float().to({v}.dtype)",
        "{v}.round().to(torch.int8).to({v}.dtype)",
    ),
    "widened": (
        "{v}.double().to({v}.dtype)",
        "{v}.double()",
        "{v} * torch.tensor(0.3, dtype=torch.float64)",
        "{v} * torch.full((1,), 0.3, dtype=torch.float32)",
    ),
    "number": (
        "{v} * 0.1",
        "({v} * 0.3) * 7.0",
        "{v} / 3",
        "{v} * 1e-3 * 1e3",
        "1.5 * {v} + 0.25",
        "-{v}",
        "{v} * torch.tensor(200.0, dtype=torch.float16) * 300.0 / 60000.0",
        "torch.add({v}, {v}, alpha=0.3)",
        "torch.sub({v}, 0.25)",
        "torch.rsub({v}, 1.0)",
    ),
    "function": (
        "{v}.nan_to_num()",
        "{v}.clamp(-1.0, 1.0)",
        "torch.fmax({v}, torch.full_like({v}, -0.25))",
        "torch.where({v} > 0.3, {v}, 0.0)",
        "{v} * ({v} > 0)",
        "{v}.tanh()",
        "{v}.sin()",
        "F.hardtanh({v}, -0.5, 1.0)",
    ),
    "cut": ("{v}.detach()", "{v}.detach().requires_grad_()", "{v} + {v}.detach()", "{v}.data"),
    "function of its own": (
        "straight_through({v})",
        "reverse({v})",
        "keep({v})",
        "scale_in_place({v}.clone())",
    ),
    "view": (
        "{v}.mT.contiguous().mT",
        "{v}.flip(0)",
        "{v}.clone()",
        "torch.cat([{v}, {v}])[: {v}.shape[0]]",
        "{v}.as_strided({v}.size(), {v}.stride())",
        "{v}.unsqueeze(0).squeeze(0)",
        "{v}[..., torch.arange({v}.shape[-1] - 1, -1, -1)]",
        "{v}.roll(1, -1)",
    ),
    "random": (
        "F.dropout({v}, 0.5, training=True)",
        "{v} + torch.rand_like({v})",
        "F.dropout({v}, 0.5, training=False)",
    ),
    "subclass": ("{v}.as_subclass(Tagged)", "{v}.as_subclass(Doubling)"),
    "transform": (
        "torch.vmap(lambda t: t * 2.0)({v})",
        "torch.func.functionalize(lambda t: t.clone().mul_(0.5))({v})",
    ),
}
READS = (
    "{v}.mean()",
    "({v} > 0).sum()",
    "({v} > 0).float().mean()",
    "{v}.detach().abs().sum()",
    "{v}.isfinite().all()",
    "{v}.square().sum()",
    "({v} != 0).sum(-1)",
    "{v}.abs().sum()",
    "{v} + 1.0",
    "{v}",
)
MODES = (
    "torch.no_grad()",
    "torch.inference_mode()",
    "torch.enable_grad()",
    "torch.set_grad_enabled(False)",
)
CASTS = ("torch.autocast('cpu', dtype=torch.bfloat16)", "torch.autocast('cpu', enabled=False)")
HAZARDS = {
    "write": 6, "quiet write": 2, "late write": 3, "read": 5, "mode": 3, "autocast": 1, "region": 3,
    "shared": 1, "out of order": 1, "narrowed": 3, "widened": 2, "number": 3, "function": 2, "cut": 2,
    "function of its own": 2, "view": 2, "random": 1, "subclass": 1, "transform": 1,
}  # fmt: skip


MORE = {"built": 5, "parts": 5, "second family": 2}  # beside those
SECOND = (
    "{v}.relu().amax(1)",
    "F.relu({v}).log1p().amax(1)",
    "sparsemax({v}, dim=-1)",
    "entmax15({v}, dim=-1)",
    "sparsemax({v} @ {v}.mT, dim=-1) @ {v}",
    "F.linear(F.relu({v}), torch.full((3, {v}.shape[-1]), 0.5, dtype={v}.dtype))",
)
USES = (
    "{v} + {k}",
    "{v} + {k}",
    "{v} * {k}",
    "{v}.masked_fill({k} > 0.2, -1e4)",
    "{v}.add_({k})",
    "{k} + {v}",
)


def _is_float(name: str) -> bool:
    return not name.startswith(NO_FLOATS)


def _position(m: Maker, axes: int = 0) -> tuple[int, str]:
    """Draw a position among the steps and a tensor that exists there, preferably a recent one.

    axes: how many an input has at least.
    """
    at = m.r.randint(0, len(m.steps))
    made = [n for s in m.steps[:at] for n in s.stores if _is_float(n)]
    given = [n for n, i in m.inputs.items() if _is_float(n) and len(i.shape) >= axes]
    names = made[-4:] * 2 + given if made else given
    return at, m.r.choice(names)


def disturb(m: Maker, kind: str) -> None:
    """Insert a hazard of this kind."""
    at, v = _position(m, axes=2 * (kind in MORE))
    if kind == "built" and m.r.random() < 0.7:  # right after a projection, where blocks have biases
        made = [(i, n) for i, s in enumerate(m.steps, 1) for n in s.stores if n.startswith("z")]
        at, v = m.r.choice(made or [(at, v)])
    if kind in ("write", "late write"):
        if kind == "late write":  # possibly between two reads
            at = m.r.randint(at, len(m.steps))
        text = m.r.choice(WRITES).format(v=v)
        m.steps.insert(at, Step(text, hazard=kind))
    elif kind == "quiet write":
        m.steps.insert(
            at,
            Step(
                m.r.choice(QUIET).format(v=v),
                within=m.r.choice(MODES[:1] * 3 + MODES[1:2]),
                hazard=kind,
            ),
        )
    elif kind == "read":
        name = m.name("r")
        m.steps.insert(
            m.r.choice([at, len(m.steps)]),
            Step(f"{name} = {m.r.choice(READS).format(v=v)}", v, hazard=kind),
        )
        m.returns.append(name)
    elif kind in ("mode", "autocast"):
        within = m.r.choice(MODES if kind == "mode" else CASTS)
        for i in range(at, min(len(m.steps), at + m.r.randint(1, 3))):
            m.steps[i] = dataclasses.replace(m.steps[i], within=within, hazard=kind)
    elif kind == "region":
        part = f"{m.r.choices(['checkpoint', 'region', 'branch'], [5, 4, 1])[0]} {m.name('')}"
        first = m.r.randint(0, max(0, len(m.steps) - 2))
        for i in range(first, min(len(m.steps), first + m.r.randint(2, 6))):
            if m.steps[i].part is None:
                m.steps[i] = dataclasses.replace(m.steps[i], part=part, hazard=kind)
    elif kind == "second family":
        name = m.name("y")
        at = m.r.choice([at, len(m.steps)])
        m.steps.insert(at, Step(f"{name} = {m.r.choice(SECOND).format(v=v)}", v, hazard=kind))
        m.returns.append(name)
    elif kind in ("built", "parts"):
        later, m.steps = m.steps[at:], m.steps[:at]
        (_build if kind == "built" else _part)(m, v, later)
        added = [s if s in m.steps[:at] else dataclasses.replace(s, hazard=kind) for s in m.steps]
        m.steps = added + later
    elif kind == "shared":
        _share(m)
    elif kind == "again":
        _again(m)
    elif kind == "out of order":  # an input becomes a transposed view
        name = m.r.choice([n for n in m.inputs if _is_float(n)])
        m.steps.insert(
            0,
            Step(
                f"{name} = {name}.mT.contiguous().mT"
                if len(m.inputs[name].shape) > 1
                else f"{name} = {name}.flip(0)",
                name,
                hazard=kind,
            ),
        )
    else:
        _change(m, kind, at, v)


def _build(m: Maker, v: str, later: list[Step]) -> None:
    """Add a constant to `v`, or the like, in all later reads."""
    what = m.more.choice(["keep", "bias", "part", "part"])
    size = f"{v}.shape[-1]" if what == "part" else f"max({v}.shape[-2:])"
    k = built(m, m.do("size", size), what)
    k += "" if what == "part" else f"[: {v}.shape[-2], : {v}.shape[-1]]"
    use = m.more.choice(USES).format(
        v=v, k=f"{k}.to({v}.dtype)" if m.floats != torch.float32 else k
    )
    name = m.do(v.rstrip("0123456789"), use, v)
    later[:] = [s.renamed(v, name) for s in later]


def _part(m: Maker, v: str, later: list[Step]) -> None:
    """Write to parts of `v`, or of its copy, from one another."""
    if m.more.random() < 0.5:
        name = m.do(v.rstrip("0123456789"), f"{v}.clone()", v)
        later[:] = [s.renamed(v, name) for s in later]
        v = name
    of = m.more.choice([v, v, f"{v}.detach()"])
    half, first = f"{v}.shape[-1] // 2", f"{v}.shape[0] // 2"
    texts = [f"{of}[..., :{half}], {of}[..., -({half}):]", f"{of}[:{first}], {of}[-{first}:]"] * 2
    texts += [f"{of}[..., 0], {of}[..., -1]", f"{of}[..., ::2][..., :{half}], {of}[..., 1::2]"]
    texts += [f"{of}.chunk(2, -1)", f"{of}.unbind(-1)[:2]", f"{of}[:, :1], {of}[:, 1:2]"]
    parts = m.parts(m.more.choice(texts))
    if m.more.random() < 0.3:
        m.returns.append(m.do("r", f"{m.more.choice(parts)} * 2.0"))
        m.write(PART_WRITES, 2, low=parts[0], high=parts[1])


def _share(m: Maker) -> None:
    """Replace an input by another one of the same shape, dtype and values."""
    by_shape: dict[tuple, list[str]] = {}
    for i in m.inputs.values():
        by_shape.setdefault((i.shape, i.dtype, i.values), []).append(i.name)
    some = [names for names in by_shape.values() if len(names) > 1]
    if some:
        first, second = m.r.sample(m.r.choice(some), 2)
        m.steps = [s.renamed(second, first) for s in m.steps]
        del m.inputs[second]


def _again(m: Maker) -> None:
    """Compute a result a second time from a detached input, and return both. AOTAutograd may merge such duplicates."""
    y = m.r.choice(m.returns)
    needed, steps = {y}, []
    for s in reversed(m.steps):
        if not needed.isdisjoint(s.stores):
            steps.insert(0, s)
            needed |= {*s.loads}
    given = [n for n in m.inputs if n in needed and n.startswith(("x", "z", "q"))]
    if not given:
        return
    x = m.r.choice(given)
    copied = [Step(f"{x}_again = {x}.detach()", x)]
    for name in {x, *(n for s in steps for n in s.stores)}:
        steps = [s.renamed(name, f"{name}_again") for s in steps]
    m.steps += [dataclasses.replace(s, part=None, hazard="again") for s in copied + steps]
    m.returns.append(f"{y}_again")


def _change(m: Maker, kind: str, at: int, v: str) -> None:
    """Replace `v` by a function of it in all later reads, or in the next one only."""
    name = m.name(v.rstrip("0123456789"))
    text = m.r.choice(CHANGES[kind]).format(v=v)
    once = m.r.random() < 0.5
    for i in range(at, len(m.steps)):
        if v in m.steps[i].loads:
            m.steps[i] = m.steps[i].renamed(v, name)
            if once:
                break
    m.steps.insert(at, Step(f"{name} = {text}", v, hazard=kind))


def generate(
    seed: int,
    families: Sequence[str] = tuple(FAMILIES),
    hazards: Sequence[str] | None = None,
    values: str | None = None,
    floats: torch.dtype | None = None,
    more: float = 0.4,
) -> Program:
    """Return the program of a seed.

    families: the blocks that it may have. hazards: the kinds to insert, by default up to three at random. values: the
    kind of its inputs' values. floats: their dtype. more: the share of programs that may build constants, write to
    parts of tensors and gather decoders, if the hazards are random.
    """
    m = Maker(seed)
    m.values, m.floats = values or m.values, floats or m.floats
    m.weights = "integers" if values == "integers" else m.weights
    r = m.r
    m.often = 1.0 if hazards is None and m.more.random() < more else 0.0
    # A few programs are models of several layers.
    chosen = [r.choice(list(families)) for _ in range(r.choices([1, 2, 3, 6], [28, 48, 20, 4])[0])]
    ordinary = r.choices([0.0, 0.5], [4, 1])[0]
    x = m.features()
    for family in sorted(chosen, key=lambda f: f in ("splade_head", "sparse_scores")):
        if r.random() < ordinary:
            x = r.choice(ORDINARY)(m, x)
        y = FAMILIES[family](m, x)
        m.returns.append(y)
        if family in ("relu_ffn", "entmax_attention") and r.random() < 0.6:
            x = y
    if hazards is None:
        number = r.choices([0, 1, 2, 3], [32, 44, 18, 6])[0]
        hazards = r.choices(list(HAZARDS), list(HAZARDS.values()), k=number)
        hazards += ["again"] * (seed % 12 == 7)  # by the seed, so that no other draw changes
    for kind in hazards:
        disturb(m, kind)
    m.r = m.more
    for kind in m.more.choices(list(MORE), list(MORE.values()), k=m.more.randint(0, 2)):
        if m.often:
            disturb(m, kind)
    if any(s.part for s in m.steps):
        # Dynamo (2.11 to 2.14) ignores `__torch_function__` of the arguments of a region.
        m.steps = [s.renamed("Doubling", "Tagged") if "Doubling" in s.loads else s for s in m.steps]
    stored = {n for s in m.steps for n in s.stores} | {*m.inputs}
    used = {n for s in m.steps for n in s.loads}
    # A bisection with a tensor alpha is exact in no precision, and autocast rounds the results of entmax functions.
    powers = any(i.values == "alpha" for i in m.inputs.values())
    autocast = any(s.within in CASTS for s in m.steps)
    whole = m.values == m.weights == "integers" and m.floats.itemsize >= 4
    exact = whole and not powers and not autocast
    program = Program(
        seed=seed,
        inputs=tuple(i for i in m.inputs.values() if i.name in used),
        steps=tuple(m.steps),
        returns=tuple(dict.fromkeys(n for n in m.returns if n in stored)),
        sizes=_sizes(r),
        training=m.training,
        dynamic=r.choices([None, True, False], [78, 12, 10])[0],
        autocast=m.floats == torch.float32 and r.random() < 0.06,
        exact=exact,
        stage=STAGES["again" in hazards],  # AOTAutograd is what may merge duplicates
        module=r.random() < 0.3,
        families=tuple(dict.fromkeys(chosen)),
    )
    return dataclasses.replace(program, exact=program.exact and not program.autocast)


SIZES = {
    "B": (1, 2, 2, 3, 4),
    "L": (1, 2, 3, 5, 6),
    "Q": (1, 2, 3),
    "V": (5, 7, 9),
    "H": (16, 24),
    "N": (4, 7, 12),
    "P": (6, 10, 17),
}


def _sizes(r: random.Random) -> tuple[dict[str, int], ...]:
    def draw() -> dict[str, int]:
        sizes = {name: r.choice(choice) for name, choice in SIZES.items()}
        if r.random() < 0.1:  # equal sizes, also equal to the number of features, 8
            sizes["B"] = sizes["L"] = sizes["V"] = r.choice([4, 5, 8])
        if r.random() < 0.04:
            sizes[r.choice(["B", "L", "Q"])] = 0
        return sizes

    first = draw()
    kind = r.choices(["once", "again", "other sizes"], [66, 15, 19])[0]
    if kind == "once":
        return (first,)
    # V and H are sizes of weights, which stay the same in all calls.
    other = {**draw(), "V": first["V"], "H": first["H"]}
    return (first, first if kind == "again" else other)
