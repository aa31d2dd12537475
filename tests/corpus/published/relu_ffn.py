"""ReLU feed-forward blocks as public repositories and libraries write them, and their near misses.

Written anew from the op sequence seen in the named source; nothing is copied. x is [2, 5, 8], 32 neurons; the library
clients (`lib_*`) are tiny models with random weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from corpus.case import Group

B, S, K, N = 2, 5, 8, 32
GROUP = Group("published.relu_ffn", pattern="relu_ffn", dense=B * S * N)


def _x(dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(B, S, K, dtype=dtype, requires_grad=requires_grad)


class Block(nn.Module):
    """Three projections and a closure `forward(m, x)`."""

    def __init__(self, forward: Callable, bias: bool = False, dtype: torch.dtype = torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(K, N, bias=bias, dtype=dtype)
        self.up = nn.Linear(K, N, bias=bias, dtype=dtype)
        self.down = nn.Linear(N, K, bias=bias, dtype=dtype)
        self.act = nn.ReLU()
        self._forward = forward

    def forward(self, x: Tensor) -> Any:
        return self._forward(self, x)


def block(
    source: str,
    name: str | None = None,
    *,
    bias: bool = False,
    dtype: torch.dtype = torch.float32,
    both: bool = False,
    training: bool = False,
    **fields: Any,
) -> Callable[[Callable], Callable]:
    """Register `forward(m, x)` as a case, in inference or training, or (`both`) in both."""

    def register(forward: Callable) -> Callable:
        own = name or forward.__name__
        for mode in (False, True) if both else (training,):
            GROUP.add(
                own + ("__train" if mode else "__infer" if both else ""),
                source,
                lambda mode=mode: (Block(forward, bias, dtype), (_x(dtype, mode),)),
                training=mode,
                **fields,
            )
        return forward

    return register


@block("transformers LlamaMLP with hidden_act='relu'", both=True)
def llama_relu(m, x):
    return m.down(m.act(m.gate(x)) * m.up(x))


@block("x-transformers GLU, ReGLU order", both=True)
def up_times_relu(m, x):
    return m.down(m.up(x) * F.relu(m.gate(x)))


@block("handwritten, product in place")
def product_in_place(m, x):
    return m.down(torch.relu(m.gate(x)).mul_(m.up(x)))


@block("handwritten torch.where", both=True)
def where(m, x):
    g = m.gate(x)
    return m.down(torch.where(g > 0, g, torch.zeros_like(g)) * m.up(x))


@block("F.threshold(g, 0, 0)")
def threshold_at_zero(m, x):
    return m.down(F.threshold(m.gate(x), 0.0, 0.0) * m.up(x))


@block("sparser-faster-llms, inference: gate and up first")
def gate_and_up_first(m, x):
    g, u = m.gate(x), m.up(x)
    return m.down(m.act(g) * u)


@block("sparser-faster-llms, training: |activation| and its support are tracked", training=True)
def statistics(m, x):
    a = F.relu(m.gate(x)) * m.up(x)
    return m.down(a), a.abs().mean(), (a != 0).float().sum(-1).mean()


@block("TurboSparse: both branches rectified", both=True)
def drelu(m, x):
    return m.down(F.relu(m.gate(x)) * F.relu(m.up(x)))


@block("FATReLU")
def fatrelu(m, x):
    return m.down(F.threshold(m.gate(x), 0.01, 0.0) * m.up(x))


@block("OPT, M2M100, DETR, BART", both=True, bias=True)
def plain(m, x):
    return m.down(F.relu(m.up(x)))


@block("transformers T5DenseActDense, dropout_rate=0", both=True)
def t5_without_dropout(m, x):
    return m.down(F.dropout(F.relu(m.up(x)), 0.0, m.training))


@block("transformers ReLUSquaredActivation (Nemotron)", both=True)
def nemotron(m, x):
    return m.down(torch.square(F.relu(m.up(x))))


@block("Megatron-LM squared_relu")
def megatron(m, x):
    return m.down(torch.pow(F.relu(m.up(x)), 2))


@block("a float exponent")
def pow_float(m, x):
    return m.down(F.relu(m.up(x)).pow(2.0))


@block("squared gate, as in BitNet without its norm", both=True)
def gated_square(m, x):
    return m.down(F.relu(m.gate(x)).pow(2) * m.up(x))


@block("bf16 weights", dtype=torch.bfloat16, precision=torch.bfloat16)
def nemotron_bf16(m, x):
    return m.down(torch.square(F.relu(m.up(x))))


@block("fp32 weights under autocast", both=True, autocast=torch.bfloat16, precision=torch.bfloat16)
def llama_autocast(m, x):
    return m.down(F.relu(m.gate(x)) * m.up(x))


@block("dynamic shapes", both=True, dynamic=True)
def llama_dynamic(m, x):
    return m.down(F.relu(m.gate(x)) * m.up(x))


@block("gradient checkpointing around the block", training=True)
def llama_checkpointed(m, x):
    inner = lambda h: m.down(F.relu(m.gate(h)) * m.up(h))
    return checkpoint(inner, x, use_reentrant=False)


@block("dropouts in eval around a squared gate", bias=True)
def square_with_dropouts(m, x):
    h = F.dropout(F.relu(m.gate(x)).square() * m.up(x), 0.1, m.training)
    return F.dropout(m.down(h), 0.1, m.training)


@block("ResNet-like: linear, relu, linear, relu")
def relu_after_it_too(m, x):
    return F.relu(m.down(F.relu(m.up(x))))


@block("a cube instead of the square")
def cubed(m, x):
    return m.down(F.relu(m.up(x)) ** 3)


class FusedProjection(nn.Module):
    """One wide projection, taken apart by `split`."""

    def __init__(self, split: Callable):
        super().__init__()
        torch.manual_seed(0)
        self.wi, self.wo = nn.Linear(K, 2 * N, bias=False), nn.Linear(N, K, bias=False)
        self.split = split

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.split(self.wi(x))
        return self.wo(F.relu(gate) * up)


for _name, _source, _split in (
    ("fused_reglu", "rtdl ReGLU", lambda h: h.chunk(2, dim=-1)[::-1]),
    ("fused_split", "vLLM, Megatron merged columns", lambda h: torch.split(h, N, dim=-1)),
    ("fused_unbind", "einops (two h)", lambda h: h.view(*h.shape[:-1], 2, N).unbind(-2)),
    ("fused_columns", "interleaved columns", lambda h: (h[..., ::2], h[..., 1::2])),
):
    GROUP.add(_name, _source, lambda s=_split: (FusedProjection(s), (_x(),)))


def _program(source: str, **fields: Any) -> Callable[[Callable], Callable]:
    def register(build: Callable) -> Callable:
        GROUP.add(build.__name__, source, build, **fields)
        return build

    return register


@_program("transformers Conv1D (GPT-2): addmm with [in, out] weights")
def conv1d():
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(*s)) for s in ((K, N), (N,), (N, K), (K,))]

    def ffn(x, w1, b1, w2, b2):
        h = F.relu(torch.addmm(b1, x.reshape(-1, K), w1))
        return torch.addmm(b2, h, w2).view(B, S, K)

    return ffn, (_x(), *parameters)


@_program("FastSpeech, VITS: convolutions of width 1")
def convolutions():
    class Convolutions(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.c1, self.c2 = nn.Conv1d(K, N, 1), nn.Conv1d(N, K, 1)

        def forward(self, x):
            return self.c2(F.relu(self.c1(x.transpose(1, 2)))).transpose(1, 2)

    return Convolutions(), (_x(),)


@_program("torch.nn.Sequential")
def sequential():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, K)), (_x(),)


@_program("torch.nn.TransformerEncoderLayer, norm first, eval")
def encoder_layer():
    return nn.TransformerEncoderLayer(K, 2, N, 0.1, batch_first=True, norm_first=True), (_x(),)


@_program("torch.nn.TransformerDecoderLayer, eval")
def decoder_layer():
    return nn.TransformerDecoderLayer(K, 2, N, 0.1, batch_first=True), (_x(), _x())


@_program(
    "torch.nn.TransformerEncoderLayer, training",
    training=True,
    expect="no_rewrite",
    why="dropout between relu and linear2",
)
def encoder_layer_with_dropout():
    return nn.TransformerEncoderLayer(K, 2, N, 0.1, batch_first=True), (_x(requires_grad=True),)


def miss(source: str, why: str, **fields: Any) -> Callable[[Callable], Callable]:
    return block(source, expect="no_rewrite", why=why, **fields)


@miss("BERT, GPT-2", "gelu is nowhere zero")
def gelu(m, x):
    return m.down(F.gelu(m.up(x)))


@miss("handwritten", "relu of the product is no product of functions")
def relu_of_the_product(m, x):
    return m.down(F.relu(m.gate(x) * m.up(x)))


@miss("activations for a log", "the activations are an output")
def activations_returned(m, x):
    h = F.relu(m.gate(x)) * m.up(x)
    return m.down(h), h


@miss("transformers BitNetMLP", "a norm between product and down projection")
def sub_norm(m, x):
    return m.down(F.rms_norm(F.relu(m.gate(x)).square() * m.up(x), (N,)))


@miss("leaky_relu", "leaky")
def leaky(m, x):
    return m.down(F.leaky_relu(m.up(x)))


@miss("a residual inside", "a sum, no product")
def residual_inside(m, x):
    return m.down(F.relu(m.up(x)) + m.gate(x))


@miss("one gate for all neurons", "the gate is broadcast over the neurons")
def scalar_gate(m, x):
    return m.down(F.relu(m.gate(x)[..., :1]) * m.up(x))


@miss("a classifier's trunk", "there is no down projection")
def no_down_projection(m, x):
    return F.relu(m.gate(x)) * m.up(x)


@miss("quantisation-aware training", "fake quantisation between")
def fake_quantised(m, x):
    return m.down(torch.fake_quantize_per_tensor_affine(F.relu(m.up(x)), 0.1, 0, 0, 255))


class LanguageModel(nn.Module):
    """A tiny transformers model with random weights; returns its first output."""

    def __init__(self, kind: str):
        super().__init__()
        import transformers as tr

        torch.manual_seed(0)
        size = {
            "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "use_cache": False,
        }  # fmt: skip
        t5 = {
            "vocab_size": 64,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 32,
            "num_layers": 1,
            "num_heads": 2,
        }
        self.model = {
            "llama": lambda: tr.LlamaForCausalLM(tr.LlamaConfig(**size, hidden_act="relu")),
            "mistral": lambda: tr.MistralForCausalLM(tr.MistralConfig(**size, hidden_act="relu")),
            "nemotron": lambda: tr.NemotronForCausalLM(tr.NemotronConfig(**size)),
            "phi3": lambda: tr.Phi3ForCausalLM(
                tr.Phi3Config(**size, hidden_act="relu", pad_token_id=0)
            ),
            "opt": lambda: tr.OPTForCausalLM(
                tr.OPTConfig(
                    vocab_size=64, hidden_size=16, ffn_dim=32, num_hidden_layers=1, num_attention_heads=2,
                    max_position_embeddings=64, word_embed_proj_dim=16, use_cache=False, dropout=0.0,
                )
            ),
            "t5": lambda: tr.T5EncoderModel(tr.T5Config(**t5, dropout_rate=0.0)),
            "t5_gated": lambda: tr.T5EncoderModel(
                tr.T5Config(**t5, dropout_rate=0.0, feed_forward_proj="gated-relu")
            ),
            "gpt2": lambda: tr.GPT2LMHeadModel(
                tr.GPT2Config(
                    vocab_size=64, n_embd=16, n_inner=32, n_layer=1, n_head=2, n_positions=64,
                    activation_function="relu", use_cache=False,
                )
            ),
            "bitnet": lambda: tr.BitNetForCausalLM(tr.BitNetConfig(**size)),
        }[kind]()  # fmt: skip

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids)[0]


def _ids() -> Tensor:
    torch.manual_seed(3)
    return torch.randint(5, 60, (B, S))


# A model has other products as large as its hidden activations.
CLIENTS = Group("published.relu_ffn", pattern="relu_ffn")
for _kind in ("llama", "mistral", "nemotron", "phi3", "opt", "t5", "t5_gated", "gpt2"):
    for _training in (False, True) if _kind in ("llama", "opt", "t5") else (False,):
        CLIENTS.add(
            f"lib_{_kind}" + ("__train" if _training else ""),
            f"transformers {_kind}",
            lambda k=_kind: (LanguageModel(k), (_ids(),)),
            training=_training,
            requires=("transformers",),
        )
CLIENTS.add(
    "lib_bitnet",
    "transformers BitNet",
    lambda: (LanguageModel("bitnet"), (_ids(),)),
    "no_rewrite",
    "a norm between product and down projection",
    requires=("transformers",),
)
