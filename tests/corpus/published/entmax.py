"""Entmax attention as public repositories and libraries write it, and its near misses.

Written anew from the op sequence seen in the named source; nothing is copied. B=2, H=2, L=6, Dh=4; the library clients
(`lib_*`) are tiny models with random weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.case import Group

B, H, L, D = 2, 2, 6, 4
GROUP = Group("published.entmax", pattern="entmax_attention")


def _qkv(requires_grad: bool = False, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    made = (torch.randn(B, H, L, D, dtype=dtype).mul_(2) for _ in range(3))
    return tuple(t.requires_grad_(requires_grad) for t in made)


def _mask() -> Tensor:
    mask = torch.ones(B, 1, 1, L, dtype=torch.int64)
    mask[0, ..., 4:] = 0
    return mask


class Attend(nn.Module):
    """`fn(self, q, k, v, mask)` with the parameters it needs."""

    def __init__(self, fn: Callable, parameters: dict[str, Callable[[], Tensor]]):
        super().__init__()
        torch.manual_seed(0)
        for name, make in parameters.items():
            setattr(self, name, nn.Parameter(make()))
        self.fn = fn

    def forward(self, *args: Tensor) -> Any:
        return self.fn(self, *args)


def attention(
    source: str,
    *,
    both: bool = False,
    training: bool = False,
    masked: bool = True,
    dtype: torch.dtype = torch.float32,
    package: bool = True,
    parameters: dict[str, Callable[[], Tensor]] | None = None,
    pattern: str = "entmax_attention",
    **fields: Any,
) -> Callable[[Callable], Callable]:
    """Register `fn(self, q, k, v, mask)`, without mask if not `masked`, in inference or (`both`) also in training."""

    def register(fn: Callable) -> Callable:
        requires = ("entmax",) if package else ()
        for mode in (False, True) if both else (training,):

            def build(mode: bool = mode) -> tuple:
                inputs = _qkv(mode, dtype)
                return Attend(fn, parameters or {}), (*inputs, _mask()) if masked else inputs

            name = fn.__name__ + ({True: "__train", False: "__infer"}[mode] if both else "")
            GROUP.add(
                    name, source, build, training=mode, requires=requires, pattern=pattern,
                    **fields,
                )  # fmt: skip
        return fn

    return register


near_miss = functools.partial(attention, expect="no_rewrite")
maybe = functools.partial(attention, expect="maybe")


def package() -> Any:
    import entmax

    return entmax


def scores(q: Tensor, k: Tensor, mask: Tensor | None = None, fill: float = -1e9) -> Tensor:
    """q k^T / sqrt(d), keys outside the mask filled."""
    z = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    return z if mask is None else z.masked_fill(mask == 0, fill)


# The package


@attention("Annotated-Transformer derivatives: masked_fill(mask == 0, -1e9), entmax15", both=True)
def pkg_entmax15_masked_fill(self, q, k, v, mask):
    return package().entmax15(scores(q, k, mask), dim=-1) @ v


@attention("the same with sparsemax", both=True)
def pkg_sparsemax_masked_fill(self, q, k, v, mask):
    return package().sparsemax(scores(q, k, mask), dim=-1) @ v


@attention("a triangle built in forward", masked=False)
def pkg_entmax15_causal_inline(self, q, k, v):
    above = torch.ones(L, L, dtype=torch.bool).triu(1)
    z = (q @ k.transpose(-2, -1)).masked_fill(above, float("-inf"))
    return package().entmax15(z, dim=-1) @ v


@attention("vit comparisons, OpenNMT-like: entmax_bisect(scores, alpha=1.33)", both=True)
def pkg_bisect_float(self, q, k, v, mask):
    return package().entmax_bisect(scores(q, k, mask), alpha=1.33, dim=-1) @ v


@attention(
    "Adaptively Sparse Transformers: alpha a head, from a sigmoid",
    both=True,
    parameters={"a": lambda: torch.zeros(H)},
)
def pkg_bisect_learned_alpha(self, q, k, v, mask):
    alpha = (1 + torch.sigmoid(self.a)).view(1, H, 1, 1)
    return package().entmax_bisect(scores(q, k, mask), alpha=alpha, dim=-1) @ v


@maybe(
    "a Python loop over heads, stacked",
    why="the heads have to be assembled again",
    pattern="entmax",
    parameters={"a": lambda: torch.tensor([1.3, 1.7])},
)
def pkg_per_head_loop(self, q, k, v, mask):
    z = scores(q, k, mask)
    each = [package().entmax_bisect(z[:, h], alpha=self.a[h], dim=-1) for h in range(H)]
    return torch.stack(each, 1) @ v


@attention("sparsemax_bisect")
def pkg_sparsemax_bisect(self, q, k, v, mask):
    return package().sparsemax_bisect(scores(q, k, mask), dim=-1) @ v


@attention(
    "fairseq derivatives: entmax15(w.float()).type_as(w)",
    dtype=torch.bfloat16,
    precision=torch.bfloat16,
)
def pkg_entmax15_float_type_as(self, q, k, v, mask):
    z = (q @ k.transpose(-2, -1) * D**-0.5).masked_fill(mask == 0, float("-inf"))
    return package().entmax15(z.float(), dim=-1).type_as(v) @ v


@attention("under autocast", both=True, autocast=torch.bfloat16, precision=torch.bfloat16)
def pkg_entmax15_autocast(self, q, k, v, mask):
    return package().entmax15(scores(q, k, mask), dim=-1) @ v


@near_miss("attention dropout", training=True, why="dropout on the probabilities")
def pkg_entmax15_dropout(self, q, k, v, mask):
    p = package().entmax15(scores(q, k, mask), dim=-1)
    return F.dropout(p, 0.1, self.training) @ v


@attention(
    "ASEntmax: a learned temperature a head",
    both=True,
    parameters={"t": lambda: torch.zeros(H)},
)
def pkg_temperature(self, q, k, v, mask):
    z = scores(q, k) * torch.exp(self.t).view(1, H, 1, 1)
    return package().entmax15(z.masked_fill(mask == 0, -1e9), dim=-1) @ v


@attention("RoBERTa of the AdaSplash experiments: (1 - mask) * -10000 added, 20 steps")
def pkg_extended_mask(self, q, k, v, mask):
    z = q @ k.transpose(-1, -2) / math.sqrt(D) + (1.0 - mask.float()) * -10000.0
    return package().entmax_bisect(z, alpha=1.5, dim=-1, n_iter=20) @ v


@attention("fairseq and torchtext: [B*H, L, D]", both=True, masked=False)
def pkg_bmm(self, q, k, v):
    q, k, v = (t.reshape(-1, L, D) for t in (q, k, v))
    z = torch.bmm(q, k.transpose(1, 2)) * D**-0.5
    return torch.bmm(package().entmax15(z, dim=-1), v).view(B, H, L, D)


@maybe(
    "BLOOM: ALiBi through baddbmm",
    why="a bias through baddbmm",
    masked=False,
    parameters={"slopes": lambda: torch.randn(B * H, 1, L)},
)
def pkg_baddbmm(self, q, k, v):
    q, k, v = (t.reshape(-1, L, D) for t in (q, k, v))
    z = torch.baddbmm(self.slopes, q, k.transpose(1, 2), beta=1.0, alpha=D**-0.5)
    return torch.bmm(package().entmax15(z, dim=-1), v)


@maybe("attention in blocks of queries", why="one rewrite a block", masked=False, rewrites=2)
def pkg_query_blocks(self, q, k, v):
    blocks = [
        package().entmax15(q[:, :, i : i + 3] @ k.transpose(-2, -1) * D**-0.5, dim=-1) @ v
        for i in range(0, L, 3)
    ]
    return torch.cat(blocks, 2)


@attention("symbolic sizes", both=True, masked=False, dynamic=True)
def pkg_dynamic(self, q, k, v):
    return package().entmax15(q @ k.transpose(-2, -1) * D**-0.5, dim=-1) @ v


# By hand


def sparsemax_sorted(z: Tensor, dim: int = -1) -> Tensor:
    """Sorted, compared as z_k > (sum - 1) / k."""
    z = z - z.max(dim=dim, keepdim=True)[0]
    s, _ = torch.sort(z, descending=True, dim=dim)
    c = torch.cumsum(s, dim=dim) - 1
    n = torch.arange(1, z.size(dim) + 1, device=z.device).view(*(1,) * (z.dim() - 1), -1)
    size = (s > c / n).sum(dim=dim, keepdim=True)
    return torch.clamp(z - c.gather(dim, size - 1) / size, min=0)


def sparsemax_one_plus(z: Tensor) -> Tensor:
    """1 + k z_k > sum"""
    s = z.sort(dim=-1, descending=True).values
    n = torch.arange(1, z.size(-1) + 1, device=z.device, dtype=z.dtype)
    c = s.cumsum(-1)
    size = (1.0 + n * s > c).sum(-1, keepdim=True).clamp(min=1)
    return F.relu(z - (c.gather(-1, size - 1) - 1.0) / size.to(z.dtype))


def entmax15_sorted(z: Tensor) -> Tensor:
    z = (z - z.amax(-1, keepdim=True)) / 2
    s, _ = torch.sort(z, -1, descending=True)
    n = torch.arange(1, z.size(-1) + 1, device=z.device, dtype=z.dtype)
    mean = s.cumsum(-1) / n
    square = (s * s).cumsum(-1) / n
    delta = ((1 - n * (square - mean**2)) / n).clamp(min=0)
    tau = mean - delta.sqrt()
    size = (tau <= s).sum(-1, keepdim=True)
    return (z - tau.gather(-1, size - 1)).clamp(min=0) ** 2


def bisect_midpoint(z: Tensor, alpha: float = 1.5, steps: int = 24) -> Tensor:
    """From below the smallest score: with a score of -1e9 among them, 24 steps do not get far."""
    z = (alpha - 1.0) * (z - z.amax(-1, keepdim=True))
    low, high = z.amin(-1, keepdim=True) - 1.0, z.amax(-1, keepdim=True)
    for _ in range(steps):
        middle = (low + high) / 2
        p = torch.clamp(z - middle, min=0).pow(1 / (alpha - 1))
        above = p.sum(-1, keepdim=True) > 1.0
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    p = torch.clamp(z - high, min=0).pow(1 / (alpha - 1))
    return p / p.sum(-1, keepdim=True).clamp_min(1e-12)


def bisect_half_square(z: Tensor, steps: int = 30) -> Tensor:
    """(0.5 * (z - tau)) ** 2 with tau in [max - 2, max]"""
    z = z - z.max(-1, keepdim=True).values
    low, high = torch.full_like(z[..., :1], -2.0), torch.zeros_like(z[..., :1])
    for _ in range(steps):
        tau = 0.5 * (low + high)
        above = torch.clamp(0.5 * (z - tau), min=0).square().sum(-1, keepdim=True) >= 1
        low, high = torch.where(above, tau, low), torch.where(above, high, tau)
    return torch.clamp(0.5 * (z - low), min=0).square()


def bisect_early_exit(z: Tensor, alpha: float = 1.5, steps: int = 50, enough: float = 1e-6):
    """Looks at the interval on the host."""
    z = (alpha - 1.0) * (z - z.amax(-1, keepdim=True))
    low, high = z.amax(-1, keepdim=True) - 1.0, z.amax(-1, keepdim=True)
    for _ in range(steps):
        middle = (low + high) / 2
        p = torch.clamp(z - middle, min=0).pow(1 / (alpha - 1))
        above = p.sum(-1, keepdim=True) >= 1.0
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        if (high - low).abs().max().item() < enough:
            break
    return torch.clamp(z - low, min=0).pow(1 / (alpha - 1))


def _by_hand(name: str, transform: Callable, source: str, **fields: Any) -> None:
    def attend(self, q, k, v, mask):
        return transform(scores(q, k, mask)) @ v

    attend.__name__ = name
    attention(source, package=False, **fields)(attend)


_by_hand("hand_sparsemax_sort", sparsemax_sorted, "vit comparisons", both=True)
_by_hand("hand_sparsemax_one_plus", sparsemax_one_plus, "public code", both=True)
_by_hand("hand_entmax15_sort", entmax15_sorted, "the deep-spin algorithm inlined", both=True)
_by_hand(
    "hand_bisect_midpoint",
    bisect_midpoint,
    "a re-implementation of the bisection",
    both=True,
    expect="maybe",
    why="24 steps from below a score of -1e9 do not find the threshold",
)
_by_hand(
    "hand_bisect_half_square",
    bisect_half_square,
    "another parametrisation of tau",
    expect="maybe",
    why="unrolled",
)
_by_hand(
    "hand_bisect_early_exit",
    bisect_early_exit,
    "stops when the interval is small",
    expect="maybe",
    why=".item() in the loop breaks the graph",
)


class SparsemaxFunction(torch.autograd.Function):
    """OpenNMT-entmax and TabNet: staticmethods, a boolean assignment in the backward."""

    @staticmethod
    def forward(ctx, z, dim=-1):
        ctx.dim = dim
        z = z - z.max(dim=dim, keepdim=True)[0]
        s, _ = torch.sort(z, descending=True, dim=dim)
        c = s.cumsum(dim) - 1
        n = torch.arange(1, z.size(dim) + 1, device=z.device, dtype=z.dtype)
        size = (n * s > c).sum(dim=dim, keepdim=True)
        tau = c.gather(dim, size - 1) / size.to(z.dtype)
        out = torch.clamp(z - tau, min=0)
        ctx.save_for_backward(size, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        size, out = ctx.saved_tensors
        grad_in = grad.clone()
        grad_in[out == 0] = 0
        mean = grad_in.sum(dim=ctx.dim, keepdim=True) / size.to(out.dtype)
        return torch.where(out != 0, grad_in - mean, grad_in), None


class Entmax15Function(torch.autograd.Function):
    """The same for alpha 1.5."""

    @staticmethod
    def forward(ctx, z):
        z = (z - z.max(dim=-1, keepdim=True).values) / 2
        s, _ = torch.sort(z, dim=-1, descending=True)
        n = torch.arange(1, z.size(-1) + 1, device=z.device, dtype=z.dtype)
        mean = s.cumsum(-1) / n
        spread = n * ((s**2).cumsum(-1) / n - mean**2)
        tau = mean - torch.sqrt(torch.clamp((1 - spread) / n, 0))
        size = (tau <= s).sum(-1, keepdim=True)
        y = torch.clamp(z - tau.gather(-1, size - 1), min=0) ** 2
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        root = y.sqrt()
        d = grad * root
        return d - d.sum(-1, keepdim=True) / root.sum(-1, keepdim=True) * root


_by_hand(
    "function_sparsemax",
    lambda z: SparsemaxFunction.apply(z, -1),
    "OpenNMT-entmax onmt/modules/sparse_activations.py; dreamquark-ai/tabnet",
    both=True,
)
_by_hand("function_entmax15", Entmax15Function.apply, "the same for alpha 1.5", both=True)


# Near misses


@near_miss("F.scaled_dot_product_attention", why="softmax", package=False)
def miss_sdpa(self, q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.bool())


@near_miss("RoBERTa of the AdaSplash experiments", why="the zeros are counted")
def miss_sparsity_statistics(self, q, k, v, mask):
    z = (q @ k.transpose(-2, -1)).masked_fill(mask == 0, -1e9)
    p = package().entmax15(z, dim=-1)
    return p @ v, ((p == 0) & (mask == 0)).sum(-1).float().mean()


@near_miss("the mask multiplied afterwards", why="not what entmax gives")
def miss_mask_afterwards(self, q, k, v, mask):
    p = package().entmax15(q @ k.transpose(-2, -1), dim=-1) * mask
    return p / p.sum(-1, keepdim=True).clamp_min(1e-9) @ v


@maybe(
    "a router over experts",
    why="no values: at most the transformation",
    pattern="entmax",
    parameters={"w": lambda: torch.randn(D, 5)},
)
def miss_router(self, q, k, v, mask):
    return package().entmax15(q.reshape(-1, D) @ self.w, dim=-1)


@near_miss("entmax15_loss", both=True, why="a Fenchel-Young loss")
def miss_loss(self, q, k, v, mask):
    target = torch.zeros(B * H * L, dtype=torch.long)
    return package().entmax15_loss(q.reshape(-1, D), target).sum()


@near_miss("budget_bisect", why="the sum is a budget")
def miss_budget(self, q, k, v, mask):
    return package().budget_bisect(q @ k.transpose(-2, -1), budget=2, dim=-1) @ v


@near_miss("ReLU attention", why="no simplex", package=False)
def miss_relu(self, q, k, v, mask):
    return F.relu(q @ k.transpose(-2, -1)) / L @ v


@near_miss("TabNet: sparsemax over features times a prior", why="no matmul", package=False)
def miss_tabnet(self, q, k, v, mask):
    p = SparsemaxFunction.apply(q * k, -1)
    return p * v, p


@maybe("ensure_sum_one=False", why="eight steps, not renormalised")
def miss_not_renormalised(self, q, k, v, mask):
    z = q @ k.transpose(-2, -1)
    return package().entmax_bisect(z, alpha=1.5, dim=-1, n_iter=8, ensure_sum_one=False) @ v


@near_miss("relu(z - max + 1) ** 2 normalised", why="no threshold is looked for", package=False)
def miss_wrong_scale(self, q, k, v, mask):
    z = q @ k.transpose(-2, -1)
    p = F.relu(z - (z.amax(-1, keepdim=True) - 1.0)).square()
    return p / p.sum(-1, keepdim=True) @ v


# Libraries


def interface(kind: str) -> Callable[..., Any]:
    """An attention function for transformers' AttentionInterface."""

    def attend(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = (
                t[:, :, None].expand(-1, -1, groups, -1, -1).reshape(t.shape[0], -1, *t.shape[2:])
                for t in (key, value)
            )
        z = torch.matmul(query, key.transpose(2, 3)) * (scaling or query.shape[-1] ** -0.5)
        if attention_mask is not None:
            z = z + attention_mask[..., : key.shape[-2]]
        p = getattr(package(), kind)(z.float(), dim=-1).to(query.dtype)
        p = F.dropout(p, p=dropout, training=module.training)
        return torch.matmul(p, value).transpose(1, 2).contiguous(), None

    return attend


class Transformer(nn.Module):
    """A tiny model of transformers whose attention function is `interface(kind)`."""

    def __init__(self, which: str, kind: str, layers: int = 1):
        super().__init__()
        import transformers
        from transformers.masking_utils import AttentionMaskInterface, eager_mask

        name = f"corpus_{kind}"
        transformers.AttentionInterface.register(name, interface(kind))
        AttentionMaskInterface.register(name, eager_mask)
        sizes: dict[str, Any] = {
            "vocab_size": 64,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": layers,
            "num_attention_heads": 2,
            "max_position_embeddings": 64,
            "attn_implementation": name,
        }
        still: dict[str, Any] = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
        torch.manual_seed(0)
        match which:
            case "llama":
                config = transformers.LlamaConfig(**sizes, num_key_value_heads=1, use_cache=False)
                self.model = transformers.LlamaModel(config)
            case "bert":
                self.model = transformers.BertModel(transformers.BertConfig(**sizes, **still))
            case "roberta":
                config = transformers.RobertaConfig(**sizes, **still, pad_token_id=0)
                self.model = transformers.RobertaModel(config)
            case "modernbert":
                special = {
                    "pad_token_id": 0,
                    "bos_token_id": 2,
                    "eos_token_id": 3,
                    "cls_token_id": 2,
                    "sep_token_id": 3,
                }
                config = transformers.ModernBertConfig(**sizes, **special)
                self.model = transformers.ModernBertModel(config)
            case "gpt2":
                config = transformers.GPT2Config(
                    vocab_size=64, n_embd=16, n_inner=32, n_layer=layers, n_head=2, n_positions=64,
                    use_cache=False, attn_implementation=name, attn_pdrop=0.0, resid_pdrop=0.0,
                    embd_pdrop=0.0,
                )  # fmt: skip
                self.model = transformers.GPT2Model(config)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.model(input_ids=ids, attention_mask=mask)[0]


def token_ids() -> tuple[Tensor, Tensor]:
    """Ids and mask [B, L]; the first sequence is shorter."""
    torch.manual_seed(3)
    ids = torch.randint(5, 60, (B, L))
    mask = torch.ones(B, L, dtype=torch.int64)
    mask[0, 4:] = 0
    return ids, mask


for _which in ("llama", "bert", "roberta", "gpt2", "modernbert"):
    for _training in (False, True):
        GROUP.add(
            f"lib_{_which}__{'train' if _training else 'infer'}",
            f"transformers' AttentionInterface with a tiny {_which}",
            lambda which=_which: (Transformer(which, "entmax15"), token_ids()),
            training=_training,
            requires=("transformers", "entmax"),
            pattern="entmax_attention",
        )
