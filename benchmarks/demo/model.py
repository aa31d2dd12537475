"""The code of a SPLADE user: the encoder, its tokenizer and the loss. It does not depend on sparse_inductor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

TEXTS = Path(__file__).resolve().parent.parent / "text"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class Splade(nn.Module):
    """Max pooling over an unchanged masked-LM model, as in naver/splade."""

    def __init__(self, mlm: nn.Module) -> None:
        super().__init__()
        self.mlm = mlm

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits = self.mlm(input_ids=input_ids, attention_mask=attention_mask).logits
        weights = torch.log(1 + torch.relu(logits)) * attention_mask.unsqueeze(-1)
        values, _ = torch.max(weights, dim=1)
        return values


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The model and the sizes of the demo. `model` is a checkpoint's name or path, or None for random weights.

    `tokenizer` is the location of the tokenizer: the checkpoint, or a folder.
    """

    model: str | None
    tokenizer: str
    layers: int
    hidden: int
    vocab: int
    batch: int
    seq: int
    steps: int


def load(sizes: Sizes) -> Splade:
    """Load the encoder of a checkpoint, or make one with random weights that are the same every time."""
    if sizes.model is not None:
        from transformers import AutoModelForMaskedLM

        mlm = AutoModelForMaskedLM.from_pretrained(sizes.model, dtype=torch.float32)
    else:
        from transformers import BertConfig, BertForMaskedLM

        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=sizes.vocab,
            hidden_size=sizes.hidden,
            num_hidden_layers=sizes.layers,
            num_attention_heads=max(1, sizes.hidden // 64),
            intermediate_size=4 * sizes.hidden,
            max_position_embeddings=max(512, sizes.seq),
        )
        mlm = BertForMaskedLM(config)
    most = getattr(mlm.config, "max_position_embeddings", sizes.seq)
    if sizes.seq > most:
        raise ValueError(f"--seq: {sizes.model} takes at most {most} tokens, got {sizes.seq}")
    _without_dropout(mlm)
    return Splade(mlm)


def _without_dropout(model: nn.Module) -> None:
    """Disable dropout, so that the numbers of two runs can be compared one by one."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def sentences() -> list[str]:
    """Return the sentences of the texts in the repository."""
    lines = [
        line.strip()
        for path in sorted(TEXTS.glob("*.txt"))
        for line in path.read_text().splitlines()
    ]
    return [line for line in lines if line]


def load_tokenizer(sizes: Sizes) -> Any:
    """Load the tokenizer of the checkpoint, or the tokenizer that `train_tokenizer` built."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    kind = AutoTokenizer if sizes.model is not None else PreTrainedTokenizerFast
    return kind.from_pretrained(sizes.tokenizer)


def train_tokenizer(texts: Sequence[str], vocab: int) -> Any:
    """Build a BERT-like lower-casing WordPiece tokenizer from `texts`. Ties are broken differently in every process."""
    from tokenizers import (
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )
    from transformers import PreTrainedTokenizerFast

    piece = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    piece.normalizer = normalizers.BertNormalizer(lowercase=True)
    piece.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    piece.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab, special_tokens=list(SPECIAL), show_progress=False
    )
    piece.train_from_iterator(texts, trainer)
    ends = [(name, piece.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    piece.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    names = dict(
        zip(
            ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True
        )
    )
    return PreTrainedTokenizerFast(tokenizer_object=piece, **names)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Queries followed by equally many documents, in one padded batch: [2 * pairs, S]."""

    input_ids: Tensor
    attention_mask: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(self.input_ids.to(device), self.attention_mask.to(device))


def batches(tokenizer: Any, sizes: Sizes) -> list[Batch]:
    """Return one batch per training step. A sentence is the query; the three sentences after it are its document."""
    lines = sentences()
    made = []
    for step in range(sizes.steps):
        first = range(step * sizes.batch, (step + 1) * sizes.batch)
        queries = [lines[at % len(lines)] for at in first]
        documents = [" ".join(lines[(at + k) % len(lines)] for k in (1, 2, 3)) for at in first]
        made.append(encode(tokenizer, queries + documents, sizes.seq))
    return made


def encode(tokenizer: Any, texts: Sequence[str], seq: int) -> Batch:
    """Return the token ids and the mask of the texts, truncated and padded to `seq`."""
    out = tokenizer(
        list(texts), padding="max_length", truncation=True, max_length=seq, return_tensors="pt"
    )
    return Batch(out["input_ids"], out["attention_mask"])


def loss_of(representations: Tensor) -> Tensor:
    """Return the in-batch contrastive loss with the FLOPS regulariser of both sides (SPLADE v2, equations 5 and 6)."""
    if representations.dtype in (torch.bfloat16, torch.float16):
        representations = representations.float()
    queries, documents = representations.chunk(2)
    # Random weights give dense representations; without the scale the softmax would be saturated.
    scores = queries @ documents.T / queries.shape[1] ** 0.5
    target = torch.arange(len(queries), device=scores.device)
    flops = [(side.mean(0) ** 2).sum() for side in (queries, documents)]
    return nn.functional.cross_entropy(scores, target) + 3e-4 * flops[0] + 1e-4 * flops[1]


def top_terms(values: Tensor, tokenizer: Any, count: int) -> list[tuple[str, float]]:
    """Return the largest entries of one representation [V], among those for which the tokenizer has a word."""
    known = values[: len(tokenizer)].float()
    best = known.topk(min(count, len(known)))
    words = [tokenizer.decode([at]).strip() for at in best.indices.tolist()]
    return list(zip(words, best.values.tolist(), strict=True))
