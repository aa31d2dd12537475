"""Hugging Face Trainer on a SPLADE model, with `torch_compile=True`. The program does not refer to sparse_inductor.

python examples/trainer.py        (needs transformers, tokenizers and accelerate)
"""

from __future__ import annotations

import itertools
import tempfile

import torch
import torch.nn.functional as F
from side_by_side import Side, main, sentences, tokenizer
from torch import Tensor, nn


class Splade(nn.Module):
    """A masked-LM encoder with max pooling. It returns the loss, as Trainer requires.

    Queries and documents alternate in one batch.
    """

    def __init__(self, mlm: nn.Module) -> None:
        super().__init__()
        self.mlm = mlm

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        logits = self.mlm(input_ids=input_ids, attention_mask=attention_mask).logits
        values = (torch.log1p(torch.relu(logits)) * attention_mask.unsqueeze(-1)).amax(1)
        queries, documents = values[0::2], values[1::2]
        scores = queries @ documents.T / queries.shape[1] ** 0.5
        target = torch.arange(len(queries), device=scores.device)
        return {"loss": F.cross_entropy(scores, target) + 1e-4 * (values.mean(0) ** 2).sum()}


def train(side: Side) -> None:
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    size, layers, vocabulary, length = (64, 2, 1000, 32) if side.small else (256, 4, 30522, 128)
    lines = sentences()
    words = tokenizer(vocabulary)
    config = BertConfig(
        vocab_size=vocabulary, hidden_size=size, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=4 * size, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    data = [
        {k: v[0] for k, v in words(
            text, padding="max_length", truncation=True, max_length=length, return_tensors="pt"
        ).items() if k != "token_type_ids"}
        for pair in itertools.pairwise(lines) for text in pair
    ]  # fmt: skip
    steps, warm = 8, 2

    class Clock(TrainerCallback):
        """A callback that times the steps after the first ones, which compile."""

        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step >= warm:
                self.clock = side.clock("training step")
                self.clock.__enter__()

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step > warm:
                self.clock.__exit__(None, None, None)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=16, max_steps=steps, torch_compile=True,
            report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
            learning_rate=1e-4, seed=0, remove_unused_columns=False,
        )  # fmt: skip
        trainer = Trainer(
            Splade(BertForMaskedLM(config)), arguments, train_dataset=data, callbacks=[Clock()]
        )
        side.found["training loss"] = trainer.train().training_loss


if __name__ == "__main__":
    main(train)
