"""sentence-transformers: a SparseEncoder trained with SpladeLoss, then `encode`.

One line refers to sparse_inductor: `drop_logits` declares that the logits in the encoder's output are not used.

python examples/sparse_encoder.py        (needs sentence-transformers)
"""

from __future__ import annotations

import itertools
import tempfile

import torch
from side_by_side import Side, main, sentences, tokenizer

from sparse_inductor.integrations.sentence_transformers import drop_logits


def train_and_encode(side: Side) -> None:
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sparse_encoder.losses import (
        SparseMultipleNegativesRankingLoss,
        SpladeLoss,
    )
    from sentence_transformers.sparse_encoder.modules import SpladePooling
    from transformers import BertConfig, BertForMaskedLM

    size, layers, vocabulary, length = (64, 2, 1000, 32) if side.small else (256, 4, 30522, 128)
    lines = sentences()
    config = BertConfig(
        vocab_size=vocabulary, hidden_size=size, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=4 * size, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        BertForMaskedLM(config).save_pretrained(folder)
        tokenizer(vocabulary).save_pretrained(folder)
        backbone = Transformer(folder, transformer_task="fill-mask")
    model = SparseEncoder(modules=[backbone, SpladePooling("max")])
    model.max_seq_length = length
    ranking = SparseMultipleNegativesRankingLoss(model)
    loss = SpladeLoss(
        model, ranking, query_regularizer_weight=5e-5, document_regularizer_weight=3e-5
    )
    drop_logits(model)
    model.compile(dynamic=True)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model.train()

    def step(at: int) -> float:
        queries, documents = lines[at : at + 16], lines[at + 1 : at + 17]
        features = [
            {k: v.to(model.device) if torch.is_tensor(v) else v for k, v in batch.items()}
            for batch in map(model.preprocess, (queries, documents))
        ]
        total = sum(loss(features, None).values())
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        return total.item()

    places = itertools.count(0, 16)
    side.found["loss"] = side.repeat("training step", lambda: step(next(places)))
    encoded = side.repeat(
        f"encode {len(lines)} sentences",
        lambda: model.encode(lines, convert_to_sparse_tensor=False),
        3,
    )
    side.found["sum of the representations"] = float(encoded.sum())


if __name__ == "__main__":
    main(train_and_encode)
