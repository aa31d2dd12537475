"""A compiled TopK autoencoder, trained on the activations of a small transformer; its losses on both sides.

python examples/train_sae.py        (needs only torch)
"""

from __future__ import annotations

import torch
from side_by_side import Side, main, sentences
from torch import Tensor, nn


class Bytes(nn.Module):
    """A causal transformer that reads bytes and returns its hidden states."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers)

    def forward(self, ids: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        return self.layers(self.embedding(ids), mask=causal, is_causal=True)


class TopK(nn.Module):
    """An autoencoder that reconstructs the input from the k neurons with the largest pre-activations."""

    def __init__(self, width: int, neurons: int, k: int) -> None:
        super().__init__()
        self.k = k
        directions = nn.functional.normalize(torch.randn(neurons, width), dim=1)
        self.W_enc, self.W_dec = nn.Parameter(directions.T.clone()), nn.Parameter(directions)
        self.b_enc, self.b_dec = (nn.Parameter(torch.zeros(n)) for n in (neurons, width))

    def forward(self, x: Tensor) -> Tensor:
        pre = (x - self.b_dec) @ self.W_enc + self.b_enc
        values, indices = pre.topk(self.k, dim=-1, sorted=False)
        f = torch.zeros_like(pre).scatter_(-1, indices, values.relu())
        return f @ self.W_dec + self.b_dec


def train(side: Side) -> None:
    width, neurons, k, batch, steps = (
        (32, 512, 8, 8, 20) if side.small else (256, 8192, 16, 16, 200)
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = torch.tensor(list("\n".join(sentences()).encode()), device=device)
    transformer = Bytes(width, 2).to(device).eval()
    model = TopK(width, neurons, k).to(device)
    compiled = torch.compile(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    starts = torch.randint(len(text) - 128, (steps, batch), device=device)
    positions = torch.arange(128, device=device)

    def step(at: int) -> float:
        with torch.no_grad():
            x = transformer(text[starts[at, :, None] + positions]).flatten(0, 1)
        loss = (compiled(x) - x).square().sum(-1).mean() / x.var(0).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    warm = 3
    for at in range(steps):
        if at < warm:
            loss = step(at)
        else:
            with side.clock("training step"):
                loss = step(at)
        if at % (steps // 10) == 0 or at == steps - 1:
            side.found[f"unexplained variance, step {at}"] = loss


if __name__ == "__main__":
    main(train)
