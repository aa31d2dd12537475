"""A SparseEncoder's documents and queries in an index, with the results and metrics of sentence-transformers itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from sparse_inductor import SparseIndex

pytest.importorskip("sentence_transformers")
EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def encoder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling
    from side_by_side import sentences, tokenizer
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=500, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained(tmp_path)
    tokenizer(500).save_pretrained(tmp_path)
    backbone = Transformer(str(tmp_path), transformer_task="fill-mask")
    model = SparseEncoder(
        modules=[backbone, SpladePooling("max")], device="cpu", max_active_dims=40
    )
    return model, sentences()[:60]


def test_what_sentence_transformers_finds_and_measures(encoder):
    from sentence_transformers.sparse_encoder.evaluation import SparseInformationRetrievalEvaluator
    from sentence_transformers.util import semantic_search

    model, lines = encoder
    asked = [" ".join(line.split()[:5]) for line in lines[:20]]
    documents, queries = model.encode_document(lines), model.encode_query(asked)
    assert documents.layout == torch.sparse_coo
    index = SparseIndex.build(documents)
    scores, ids = index.search(queries, 10)
    theirs = semantic_search(queries, documents, top_k=10, score_function=model.similarity)
    torch.testing.assert_close(
        scores, torch.tensor([[hit["score"] for hit in hits] for hits in theirs])
    )
    torch.testing.assert_close(
        index.scores(queries, [[h["corpus_id"] for h in hits] for hits in theirs]), scores
    )

    names = [f"d{i}" for i in range(len(lines))]
    evaluator = SparseInformationRetrievalEvaluator(
        dict(zip(map(str, range(20)), asked)), dict(zip(names, lines)),
        {str(i): {names[i]} for i in range(20)}, mrr_at_k=[10], ndcg_at_k=[10], accuracy_at_k=[1, 5],
        precision_recall_at_k=[5], map_at_k=[10], write_csv=False,
    )  # fmt: skip
    want = evaluator(model)
    found = [
        [{"corpus_id": names[i], "score": s} for i, s in zip(*both)]
        for both in zip(ids.tolist(), scores.tolist())
    ]
    metrics = evaluator.compute_metrics(found)
    assert 0 < metrics["ndcg@k"][10] <= 1
    for kind, short in (("ndcg@k", "ndcg@10"), ("mrr@k", "mrr@10"), ("map@k", "map@10")):
        (theirs,) = (value for name, value in want.items() if name.endswith(short))
        assert metrics[kind][10] == pytest.approx(theirs)
