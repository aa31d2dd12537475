"""SPLADE heads as public repositories write them, each with its source; the op sequence is written anew."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn

from corpus.splade_head.registry import INFER, TRAIN, D, V, encoder, head, hidden, ids, mask, tokens

near_miss = functools.partial(head, "no_rewrite", modes=INFER)
BF16 = {"autocast": torch.bfloat16, "precision": torch.bfloat16}


def naver(logits, mask):
    """naver/splade models/transformer_rep.py (Splade.encode)"""
    return torch.max(torch.log(1 + torch.relu(logits)) * mask.unsqueeze(-1), dim=1)[0]


head()(naver)
head(prefix="autocast_", **BF16)(naver)


@head(bias=False)
def scaling_retriever_inplace_scale(logits, mask):
    """HansiZeng/scaling-retriever modeling/llm_encoder.py (DecoderOnlyBiSparse.encode)"""
    logits *= D ** (-0.25)
    pooled = torch.max(logits + (1 - mask.unsqueeze(-1)) * -1000000.0, dim=1)[0]
    return torch.log(torch.relu(pooled) + 1)


@head(modes=INFER)
def opensearch_special_ids_zeroed(logits, mask):
    """opensearch-project model card, langchain-milvus"""
    values, _ = torch.max(logits * mask.unsqueeze(-1), dim=1)
    values = torch.log(1 + torch.relu(values))
    values[:, [0, 1, 2]] = 0
    return values


@head(modes=INFER)
def margin_of_integers(logits, mask):
    """a margin that is cut to whole numbers on the way"""
    margin = torch.full((1,), 0.7).long()
    return (torch.log1p(torch.relu(logits - margin)) * mask.unsqueeze(-1)).amax(1)


@head()
def special_terms_before_the_mask(logits, mask):
    """special terms dropped from every token, then the mask"""
    weights = tokens(logits).masked_fill(torch.arange(V) < 3, 0.0)
    return (weights * mask.unsqueeze(-1)).amax(1)


@encoder(
    "maybe",
    "one linear, several slices reduced over dim 0: needs a segmented kernel",
    INFER,
    inputs=(lambda: hidden(shape=(10, D)),),
)
def packed_slices(self, flat):
    """KernelSwift task-04: tokens of all sequences in one tensor, one slice reduced per sequence"""
    weights = tokens(self.decoder(flat))
    return torch.stack([weights[:4].max(dim=0).values, weights[4:10].max(dim=0).values])


@encoder(inputs=(hidden, mask, lambda: (ids() == 1).long()))
def lsr_mlm_two_masks(self, h, mask, special):
    """thongnt99/learned-sparse-retrieval lsr/models/mlm.py"""
    logits = self.decoder(h) * mask.unsqueeze(-1) * (1 - special).unsqueeze(-1)
    return torch.max(torch.log1p(F.relu(logits)), dim=1).values


@near_miss("one token", at="logits[torch.arange(")
def last_token(logits, mask):
    """PromptReps, tevatron pooling 'last'"""
    return tokens(logits[torch.arange(logits.size(0)), mask.sum(1) - 1])


@near_miss("over the batch", at="amax(dim=0)")
def max_over_batch(logits, mask):
    """which terms a batch has, sequence by sequence"""
    return (tokens(logits) * mask.unsqueeze(-1)).amax(dim=0)


@near_miss("sum pooling", at="(weights * keep).sum(1)")
def activations_reused_sum(logits, mask):
    """hyukkyukang/SPLADE pooling_mode blend"""
    weights, keep = tokens(logits), mask.unsqueeze(-1).to(logits.dtype)
    total = (weights * keep).sum(1)
    largest = weights.masked_fill(keep == 0, float("-inf")).max(1).values.clamp(min=0)
    return total + (largest - total) * 1.0


@near_miss("a mask of tokens comes after", at="mask.unsqueeze(-1)")
def filled_before_the_mask(logits, mask):
    weights = tokens(logits).masked_fill(torch.arange(V) < 3, 1.0)
    return (weights * mask.unsqueeze(-1)).amax(1)


@near_miss("sin is not monotone", at="torch.sin(logits)")
def sine_between(logits, mask):
    return (torch.log1p(torch.relu(torch.sin(logits))) * mask.unsqueeze(-1)).amax(1)


@encoder(
    "no_rewrite",
    "scatter",
    TRAIN,
    inputs=(hidden, ids),
    parts={"weigh": lambda: nn.Linear(D, 1)},
    at="torch.scatter(",
)
def bge_m3_scatter_max(self, h, ids):
    """FlagOpen/FlagEmbedding m3 (_sparse_embedding), tevatron unicoil"""
    weights = torch.relu(self.weigh(h))
    rows = torch.zeros(h.size(0), h.size(1), V, dtype=weights.dtype)
    return torch.scatter(rows, -1, ids.unsqueeze(-1), weights).max(dim=1).values


@head("maybe", "gather at the argmax of |x|", INFER)
def abs_pool(logits, mask):
    """thongnt99/lsr AbsPool"""
    x = tokens(logits) * mask.unsqueeze(-1)
    return x.gather(1, x.abs().argmax(1, keepdim=True)).squeeze(1)


@head("maybe", "valid with a scale factor", INFER)
def log2(logits, mask):
    return (torch.log2(1 + torch.relu(logits)) * mask.unsqueeze(-1)).amax(1)
