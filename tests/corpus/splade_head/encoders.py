"""Whole encoders: sparse retrieval models, servers and training steps around the head."""

from __future__ import annotations

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
    hidden,
    ids,
    mask,
    program,
    tokens,
)


@encoder(bias=False, inputs=(hidden, mask, lambda: torch.tensor([3, 2, 1])))
def mistral_splade_echo(self, h, attention_mask, second_start):
    """Mistral-Splade with echo embeddings: the text twice, only the second copy is pooled."""
    position = torch.arange(h.shape[1], device=h.device)
    second = position[None, :] >= second_start[:, None]
    pool_mask = (attention_mask * second).unsqueeze(-1)
    return torch.max(torch.log(1 + torch.relu(self.decoder(h))) * pool_mask, dim=1).values


@encoder(bias=False)
def csplade(self, h, attention_mask):
    """CSPLADE: a causal LM; bidirectional layers, logits / sqrt(d), -inf on padding."""
    logits = self.decoder(h) / D**0.5
    padding = attention_mask.unsqueeze(-1).expand_as(logits) == 0
    logits = logits.masked_fill(padding, torch.finfo(logits.dtype).min)
    return torch.log1p(F.relu(torch.max(logits, dim=1)[0]))


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


@encoder(parts={"idf": lambda: nn.Buffer(torch.linspace(0.1, 3.0, V))}, inputs=(hidden, mask, ids))
def opensearch_inference_free(self, h, attention_mask, query_ids):
    """OpenSearch doc-v3: documents through the head twice-logged, queries are idf weights."""
    values, _ = torch.max(self.decoder(h) * attention_mask.unsqueeze(-1), dim=1)
    documents = torch.log(1 + torch.log(1 + torch.relu(values)))
    bag = torch.zeros(query_ids.size(0), V).scatter(1, query_ids, 1.0)
    return (bag * self.idf) @ documents.t()


@encoder(inputs=(lambda: {"hidden_states": hidden(), "attention_mask": mask()},))
def text_embeddings_server(self, batch):
    """A Python port of a Rust server: (1 + relu).log(), mask broadcast, max over dim 1."""
    logits = self.decoder(batch["hidden_states"])
    attention = batch["attention_mask"].unsqueeze(-1).broadcast_to(logits.shape)
    weights = (1.0 + logits.relu()).log() * attention.to(logits)
    return {"embeddings": weights.max(1).values}


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


@program(rewrites=2)
def two_encoders():
    """Separate query and document encoders with heads of their own."""

    class Tower(Vocabulary):
        def forward(self, h, attention_mask):
            h = h + torch.tanh(h)
            return tokens(self.decoder(h) * attention_mask[..., None]).max(1).values

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.document = Tower(), Tower()

        def forward(self, query, document, attention_mask):
            return (
                self.query(query, attention_mask) * self.document(document, attention_mask)
            ).sum(-1)

    return Model(), (hidden(), hidden(), mask())


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


@program()
def triplets_flattened():
    """[B, 3, S, D] query, positive, negative: flattened for the head, unflattened after it."""

    class Model(Vocabulary):
        def forward(self, h, attention_mask):
            batch, group, length, width = h.shape
            logits = self.decoder(h.view(batch * group, length, width))
            keep = attention_mask.view(batch * group, length, 1)
            pooled = (tokens(logits) * keep).max(dim=1).values.view(batch, group, -1)
            q, p, n = pooled.unbind(dim=1)
            return ((q * n).sum(-1) - (q * p).sum(-1)).relu()

    attention_mask = torch.stack([mask(), mask(lengths=(3, 7, 5)), mask(lengths=(6, 1, 7))], dim=1)
    return Model(), (hidden(shape=(B, 3, S, D)), attention_mask)


@encoder()
def dense_and_sparse(self, h, attention_mask):
    """Hybrid encoders: the normalised [CLS] vector and the sparse one from the same states."""
    dense = F.normalize(h[:, 0], dim=-1)
    sparse = (tokens(self.decoder(h)) * attention_mask.unsqueeze(-1)).max(dim=1).values
    return {"dense_vecs": dense, "lexical_weights": sparse, "last_hidden_state": h}


@program()
def rms_norm_then_tied_head():
    """A decoder-only LM: the final RMSNorm, then the tied head, then the pooling."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(31)
            self.embed_tokens = nn.Embedding(V, D)
            self.norm = nn.RMSNorm(D, eps=1e-6)
            self.lm_head = nn.Linear(D, V, bias=False)
            self.lm_head.weight = self.embed_tokens.weight

        def forward(self, input_ids, attention_mask):
            h = self.embed_tokens(input_ids)
            h = self.norm(h + h.cumsum(dim=1) / input_ids.size(1))
            logits = self.lm_head(h)
            logits = logits + (1.0 - attention_mask.to(logits.dtype)).unsqueeze(-1) * -1e9
            return torch.log(1 + torch.relu(torch.max(logits, dim=1).values))

    return Model(), (ids(), mask())


@encoder(inputs=(hidden, hidden, mask, ids))
def mlm_on_other_states(self, clean, corrupted, attention_mask, labels):
    """Multi-task: MLM logits of corrupted states, the SPLADE head on clean ones."""
    pooled = (tokens(self.decoder(clean)) * attention_mask.unsqueeze(-1)).amax(1)
    loss = F.cross_entropy(self.decoder(corrupted[:, 0]), labels[:, 0])
    return pooled, loss


@encoder()
def regularised_batch(self, h, attention_mask):
    """L1, FLOPS and anti-zero penalties computed on the pooled vectors."""
    reps = (tokens(self.decoder(h)) * attention_mask.unsqueeze(-1)).max(dim=1).values
    l1 = reps.abs().sum(dim=-1).mean()
    flops = (reps.mean(dim=0) ** 2).sum()
    anti_zero = 1.0 / (reps.sum(dim=-1) ** 2 + 1e-3)
    return reps, l1 + flops + anti_zero.mean()


@program()
def transformer_encoder_in_front():
    """nn.TransformerEncoder with a padding mask, then the head."""

    class Model(Vocabulary):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(D, 2, 16, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

        def forward(self, h, attention_mask):
            h = self.encoder(h, src_key_padding_mask=attention_mask == 0)
            return (tokens(self.decoder(h)) * attention_mask.unsqueeze(-1)).max(dim=1).values

    return Model(), (hidden(), mask())


@encoder(modes=TRAIN)
def dropout_before_the_decoder(self, h, attention_mask):
    """Active dropout on the hidden states: upstream of the head."""
    h = F.dropout(h, p=0.2, training=self.training)
    return (tokens(self.decoder(h)) * attention_mask.unsqueeze(-1)).amax(dim=1)


@encoder(modes=TRAIN)
def negatives_detached(self, h, attention_mask):
    """Documents of the other side detached after the head."""
    reps = (tokens(self.decoder(h)) * attention_mask.unsqueeze(-1)).max(dim=1).values
    return reps @ reps.detach().T


@encoder(
    "maybe",
    "one head a sequence, each [S, V] without a batch",
    INFER,
    inputs=(lambda: [hidden(shape=(n, D)) for n in (7, 4, 2)],),
)
def server_with_ragged_requests(self, requests):
    """A server that gets a list of requests of different lengths."""
    return [tokens(self.decoder(h)).amax(dim=0) for h in requests]


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
