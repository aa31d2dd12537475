"""ReLU feed-forward blocks as public repositories and libraries write them, each with its source.

The library clients (`lib_*`) are tiny models with random weights.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from corpus.case import Group, each
from corpus.relu_ffn.registry import BOTH, INFER, TRAIN, B, Block, K, N, S, block, program, tokens

inference = functools.partial(block, modes=INFER)
miss = functools.partial(block, "no_rewrite", modes=INFER)


each(
    inference(),
    threshold_at_zero=lambda x, m: m.down(F.threshold(m.gate(x), 0.0, 0.0) * m.up(x)),
    cubed=lambda x, m: m.down(F.relu(m.up(x)) ** 3),
    # ResNet-like: linear, relu, linear, relu
    relu_after_it_too=lambda x, m: F.relu(m.down(F.relu(m.up(x)))),
)


@inference(bias=True)
def square_with_dropouts(x, m):
    """dropouts in eval around a squared gate"""
    h = F.dropout(F.relu(m.gate(x)).square() * m.up(x), 0.1, m.training)
    return F.dropout(m.down(h), 0.1, m.training)


@program(modes=INFER)
def decoder_layer_in_eval():
    """torch.nn.TransformerDecoderLayer"""
    return nn.TransformerDecoderLayer(K, 2, N, 0.1, batch_first=True), (tokens(), tokens())


@miss("relu after the product of two", at="F.relu(m.gate(x) * m.up(x))")
def relu_of_the_product(x, m):
    return m.down(F.relu(m.gate(x) * m.up(x)))


@miss("of every token", at="[..., :1]")
def scalar_gate(x, m):
    """one gate for all neurons"""
    return m.down(F.relu(m.gate(x)[..., :1]) * m.up(x))


@miss("there is no down projection")
def no_down_projection(x, m):
    """a classifier's trunk"""
    return F.relu(m.gate(x)) * m.up(x)


SIZE = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "use_cache": False,
}  # fmt: skip
RELU = {**SIZE, "hidden_act": "relu"}
OPT = {
    "vocab_size": 64, "hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "max_position_embeddings": 64, "word_embed_proj_dim": 16, "use_cache": False, "dropout": 0.0,
}  # fmt: skip
T5 = {
    "vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0,
}  # fmt: skip
GPT2 = {
    "vocab_size": 64, "n_embd": 16, "n_inner": 32, "n_layer": 1, "n_head": 2, "n_positions": 64,
    "activation_function": "relu", "use_cache": False,
}  # fmt: skip
# kind: transformers' model, its configuration, and the configuration's arguments
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", RELU),
    "nemotron": ("NemotronForCausalLM", "NemotronConfig", SIZE),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**RELU, "pad_token_id": 0}),
    "opt": ("OPTForCausalLM", "OPTConfig", OPT),
    "t5": ("T5EncoderModel", "T5Config", T5),
    "t5_gated": ("T5EncoderModel", "T5Config", {**T5, "feed_forward_proj": "gated-relu"}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "bitnet": ("BitNetForCausalLM", "BitNetConfig", SIZE),
}


class LanguageModel(nn.Module):
    """A tiny transformers model with random weights; returns its first output."""

    def __init__(self, kind: str):
        super().__init__()
        import transformers

        torch.manual_seed(0)
        model, config, sizes = MODELS[kind]
        self.model = getattr(transformers, model)(getattr(transformers, config)(**sizes))

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids)[0]


def token_ids() -> Tensor:
    torch.manual_seed(3)
    return torch.randint(5, 60, (B, S))


# A model has other products as large as its hidden activations.
CLIENTS = Group("relu_ffn", pattern="relu_ffn", requires=("transformers",))
for kind in MODELS:

    def client(kind=kind):
        return LanguageModel(kind), (token_ids(),)

    client.__name__ = f"lib_{kind}"
    if kind == "bitnet":
        # a norm, written out in the module
        CLIENTS.program("no_rewrite", "of every token", INFER, at="torch.rsqrt(")(client)
    else:
        both = kind in ("llama", "opt", "t5")
        CLIENTS.program(modes=(False, True) if both else INFER)(client)


@program(modes=TRAIN)
def checkpointed():
    def forward(x, m):
        def ffn(h):
            return m.down(F.relu(m.gate(h)) * m.up(h))

        return x + checkpoint(ffn, x, use_reentrant=False)

    return Block(forward), (tokens(),)


@program(rewrites=2, modes=BOTH)
def two_layers():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            first = lambda x, m: x + m.down(F.relu(m.gate(m.norm(x))) * m.up(m.norm(x)))
            self.a, self.b = Block(first), Block(lambda x, m: m.down(F.relu(m.up(x))), bias=True)

        def forward(self, x):
            return self.b(self.a(x))

    return Model(), (tokens(),)
