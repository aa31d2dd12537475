"""An indexing job: encode lines of text with a SPLADE model, keep the largest terms of each line, and search them.

python examples/index.py        (needs transformers; the texts are in benchmarks/text)
"""

from __future__ import annotations

import torch
from side_by_side import Side, main, sentences, tokenizer
from torch import Tensor, nn


class Encoder(nn.Module):
    """A masked-LM model with max pooling."""

    def __init__(self, mlm: nn.Module) -> None:
        super().__init__()
        self.mlm = mlm

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits = self.mlm(input_ids=input_ids, attention_mask=attention_mask).logits
        return (torch.log1p(torch.relu(logits)) * attention_mask.unsqueeze(-1)).amax(1)


def search(query: Tensor, ids: Tensor, values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k best documents of each query: query [B, V], terms and weights of the documents [N, T]."""
    scores = (query[:, ids] * values).sum(-1)
    return torch.topk(scores, k)


@torch.no_grad()
def job(side: Side) -> None:
    from transformers import BertConfig, BertForMaskedLM

    size, layers, vocabulary, terms = (64, 2, 500, 16) if side.small else (256, 4, 30522, 64)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = BertConfig(
        vocab_size=vocabulary, hidden_size=size, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=4 * size,
    )  # fmt: skip
    encoder = torch.compile(Encoder(BertForMaskedLM(config)).to(device).eval())
    words, lines = tokenizer(vocabulary), sentences()

    def encode(texts: list[str]) -> Tensor:
        batch = words(
            texts, padding="max_length", truncation=True, max_length=64, return_tensors="pt"
        )
        return encoder(batch["input_ids"].to(device), batch["attention_mask"].to(device))

    def encode_all() -> Tensor:
        return torch.cat([encode(lines[at : at + 28]) for at in range(0, len(lines), 28)])

    encoded = side.repeat(f"encode {len(lines)} lines", encode_all, 3)
    values, ids = encoded.topk(terms)
    find = torch.compile(search)
    best = side.repeat("search 28 queries", lambda: find(encoded[:28], ids, values, 5))
    # The terms of a line should find that line.
    right = (best[1] == torch.arange(28, device=device).unsqueeze(1)).any(1).float().mean()
    side.found["queries that find themselves"] = right.item()


if __name__ == "__main__":
    main(job)
