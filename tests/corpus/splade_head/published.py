"""SPLADE heads as public repositories write them, each with its source; only the operations are reproduced."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn

from corpus.splade_head.registry import (
    INFER,
    TRAIN,
    B,
    D,
    S,
    V,
    Vocabulary,
    encoder,
    head,
    hidden,
    ids,
    mask,
    program,
    tokens,
)

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


@head("maybe", "gather at the argmax of |x|", INFER)
def abs_pool(logits, mask):
    """thongnt99/lsr AbsPool"""
    x = tokens(logits) * mask.unsqueeze(-1)
    return x.gather(1, x.abs().argmax(1, keepdim=True)).squeeze(1)


@head("maybe", "valid with a scale factor", INFER)
def log2(logits, mask):
    return (torch.log2(1 + torch.relu(logits)) * mask.unsqueeze(-1)).amax(1)


@encoder()
def sparse_embed_recomputed(self, h, attention_mask):
    """SparseEmbed: the top terms of the head, their embeddings from the hidden states."""
    pooled = (tokens(self.decoder(h)) * attention_mask.unsqueeze(-1)).amax(dim=1)
    values, terms = pooled.topk(4, dim=-1)
    attention = torch.einsum("bkd,bsd->bks", self.decoder.weight[terms], h)
    attention = attention.masked_fill(attention_mask[:, None] == 0, -1e9).softmax(-1)
    return values, attention @ h


@encoder()
def pruned_by_ratio(self, h, attention_mask):
    """OpenSearch: terms below a share of the largest are dropped."""
    values, _ = (tokens(self.decoder(h)) * attention_mask.unsqueeze(-1)).max(dim=1)
    largest, _ = values.max(dim=-1, keepdim=True)
    return values * (values > 0.1 * largest)


@encoder(
    parts={"idf": lambda: nn.Buffer(torch.linspace(0.1, 3.0, V))},
    inputs=(hidden, mask, ids),
    beside="sparse_decode",
)
def opensearch_inference_free(self, h, attention_mask, query_ids):
    """OpenSearch doc-v3: documents through the head twice-logged, queries are idf weights."""
    values, _ = torch.max(self.decoder(h) * attention_mask.unsqueeze(-1), dim=1)
    documents = torch.log(1 + torch.log(1 + torch.relu(values)))
    bag = torch.zeros(query_ids.size(0), V).scatter(1, query_ids, 1.0)
    return (bag * self.idf) @ documents.t()


@program(rewrites=2)
def two_towers_shared():
    """Query and document through one head, in-batch softmax loss, FLOPS regulariser."""

    class Model(Vocabulary):
        def encode(self, h, attention_mask):
            weights = torch.log1p(torch.relu(self.decoder(h)))
            return (weights * attention_mask.unsqueeze(-1)).max(dim=1).values

        def forward(self, query, query_mask, document, document_mask):
            q, d = self.encode(query, query_mask), self.encode(document, document_mask)
            scores = q @ d.T
            labels = torch.arange(scores.size(0), device=scores.device)
            flops = sum((x.abs().mean(dim=0) ** 2).sum() for x in (q, d))
            return F.cross_entropy(scores, labels) + 1e-2 * flops

    documents = (hidden(shape=(B, S + 2, D)) * 0.9).detach().requires_grad_()
    return Model(), (hidden(), mask(), documents, torch.ones(B, S + 2, dtype=torch.int64))


@program(modes=TRAIN, rewrites=2)
def distillation():
    """A frozen teacher under no_grad and a student in one step."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.student, self.teacher = Vocabulary(), Vocabulary(bias=False)

        def pool(self, logits, attention_mask):
            return (tokens(logits) * attention_mask.unsqueeze(-1)).amax(dim=1)

        def forward(self, h, attention_mask):
            with torch.no_grad():
                target = self.pool(self.teacher.decoder(h), attention_mask)
            return F.mse_loss(self.pool(self.student.decoder(h), attention_mask), target)

    return Model(), (hidden(), mask())


@encoder(
    "maybe",
    "packed sequences reduced by a scatter",
    INFER,
    inputs=(lambda: hidden(shape=(9, D)), lambda: torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2])),
)
def packed_by_scatter(self, flat, sequence):
    """A packed batch [T, V] reduced with scatter_reduce(amax)."""
    weights = tokens(self.decoder(flat))
    index = sequence[:, None].expand_as(weights)
    return weights.new_zeros(B, V).scatter_reduce(0, index, weights, "amax")
