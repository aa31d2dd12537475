"""Entmax attention as public repositories and libraries write it, each with its source.

The library clients (`lib_*`) are tiny models with random weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.entmax.registry import GROUP, INFER, SCALE, B, D, H, L, attention, entmax

maybe = functools.partial(attention, "maybe", modes=INFER)
near_miss = functools.partial(attention, "no_rewrite", modes=INFER)


@maybe("the heads have to be assembled again", pattern="entmax")
def per_head_loop(q, k, v, mask):
    """a Python loop over heads with an alpha for each, stacked"""
    alpha, z = torch.linspace(1.3, 1.7, H), q @ k.mT * SCALE
    each = [entmax.entmax_bisect(z[:, h], alpha=alpha[h], dim=-1) for h in range(H)]
    return torch.stack(each, 1) @ v


@attention(autocast=torch.bfloat16, precision=torch.bfloat16)
def entmax15_under_autocast(q, k, v, mask):
    """the package's function, not its module"""
    scores = (q @ k.mT * SCALE).masked_fill(~mask[:, None, None], -1e9)
    return entmax.entmax15(scores, dim=-1) @ v


@maybe("one rewrite a block", rewrites=3)
def query_blocks(q, k, v, mask):
    """attention in blocks of queries"""
    parts = [entmax.entmax15(part @ k.mT * SCALE, dim=-1) @ v for part in q.split(3, dim=2)]
    return torch.cat(parts, 2)


@near_miss("softmax")
def scaled_dot_product_attention(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])


@attention("no_rewrite", "Fenchel-Young loss", at="entmax15_loss(")
def fenchel_young_loss(q, k, v, mask):
    return entmax.entmax15_loss(q.reshape(-1, D), torch.zeros(B * H * L, dtype=torch.long)).sum()


@near_miss("no matmul")
def tabnet(q, k, v, mask):
    """sparsemax over features times a prior"""
    p = entmax.sparsemax(q * k, dim=-1)
    return p * v, p


@maybe("eight steps, not renormalised")
def attention_not_renormalised(q, k, v, mask):
    return entmax.entmax_bisect(q @ k.mT, alpha=1.5, n_iter=8, ensure_sum_one=False) @ v


def interface(kind: str) -> Callable[..., Any]:
    """Return an attention function for transformers' AttentionInterface."""

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
        p = getattr(entmax, kind)(z.float(), dim=-1).to(query.dtype)
        p = F.dropout(p, p=dropout, training=module.training)
        return torch.matmul(p, value).transpose(1, 2).contiguous(), None

    return attend


SIZES = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
STILL = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
MODERNBERT = {
    **SIZES, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3,
}  # fmt: skip
GPT2 = {
    "vocab_size": 64, "n_embd": 16, "n_inner": 32, "n_head": 2, "n_positions": 64, "use_cache": False,
    "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
}  # fmt: skip
# which: transformers' model, its configuration, and the configuration's arguments
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaModel", "LlamaConfig", {**SIZES, "num_key_value_heads": 1, "use_cache": False}),
    "bert": ("BertModel", "BertConfig", {**SIZES, **STILL}),
    "gpt2": ("GPT2Model", "GPT2Config", GPT2),
    "modernbert": ("ModernBertModel", "ModernBertConfig", MODERNBERT),
}


class Transformer(nn.Module):
    """A tiny model of transformers whose attention function is `interface(kind)`."""

    def __init__(self, which: str, kind: str, layers: int = 1):
        super().__init__()
        import transformers
        from transformers.masking_utils import AttentionMaskInterface, eager_mask

        name = f"corpus_{kind}"
        transformers.AttentionInterface.register(name, interface(kind))
        AttentionMaskInterface.register(name, eager_mask)
        torch.manual_seed(0)
        model, config, sizes = MODELS[which]
        given = {**sizes, "num_hidden_layers": layers, "attn_implementation": name}
        self.model = getattr(transformers, model)(getattr(transformers, config)(**given))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.model(input_ids=ids, attention_mask=mask)[0]


def token_ids() -> tuple[Tensor, Tensor]:
    """Return ids and mask [B, L]; the first sequence is shorter."""
    torch.manual_seed(3)
    ids = torch.randint(5, 60, (B, L))
    mask = torch.ones(B, L, dtype=torch.int64)
    mask[0, 4:] = 0
    return ids, mask


for which in MODELS:

    def client(which=which):
        return Transformer(which, "entmax15"), token_ids()

    client.__name__ = f"lib_{which}"
    GROUP.program(requires=("transformers",))(client)
