"""Hugging Face `generate` on a Llama with ReLU feed-forward blocks, a static cache and a compiled forward.

python examples/generate.py        (needs transformers)
"""

from __future__ import annotations

import torch
from side_by_side import Side, main


def generate(side: Side) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    size, hidden, layers = (64, 256, 2) if side.small else (512, 2048, 4)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=size, intermediate_size=hidden, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, hidden_act="relu", max_position_embeddings=512,
    )  # fmt: skip
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = LlamaForCausalLM(config).to(device).eval()
    # A random model has half of its neurons active, a trained one only a few: lower the pre-activations.
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate_proj.weight -= 2.5 * layer.mlp.gate_proj.weight.abs().mean()
    model.forward = torch.compile(model.forward)
    ids = torch.randint(0, 1000, (2, 32), device=device)
    tokens = 8 if side.small else 48

    def run() -> torch.Tensor:
        return model.generate(
            ids, max_new_tokens=tokens, cache_implementation="static", do_sample=False,
            disable_compile=True, pad_token_id=0,
        )  # fmt: skip

    out = side.repeat(f"generate 2 x {tokens} tokens", run)
    side.found["sum of the tokens"] = float(out.sum())


if __name__ == "__main__":
    main(generate)
