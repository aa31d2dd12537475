"""A training step of a vision transformer with entmax attention: transformers' ViT with a registered function.

python examples/vision_transformer.py        (needs transformers and entmax)
"""

from __future__ import annotations

import entmax
import torch
from side_by_side import Side, main


def entmax_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **_):
    """Compute attention with entmax; transformers calls this function in place of softmax attention."""
    scores = query @ key.transpose(2, 3) * (scaling or query.shape[-1] ** -0.5)
    weights = entmax.entmax15(scores, dim=-1)
    return (weights @ value).transpose(1, 2).contiguous(), None


def train(side: Side) -> None:
    import transformers

    transformers.AttentionInterface.register("entmax15", entmax_attention)
    size, layers, pixels = (64, 2, 64) if side.small else (192, 6, 224)
    config = transformers.ViTConfig(
        hidden_size=size, num_hidden_layers=layers, num_attention_heads=size // 64 or 1,
        intermediate_size=4 * size, image_size=pixels, patch_size=16, num_labels=10,
        attn_implementation="entmax15",
    )  # fmt: skip
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.ViTForImageClassification(config).to(device).train()
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    images = torch.randn(8, 3, pixels, pixels, device=device)
    labels = torch.arange(8, device=device) % 10

    def step() -> float:
        loss = compiled(pixel_values=images, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    side.found["first loss"] = step()
    side.found["last loss"] = side.repeat("training step", step)


if __name__ == "__main__":
    main(train)
