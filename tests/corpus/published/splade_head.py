"""SPLADE heads as public repositories and libraries write them, and their near misses.

Written anew from the op sequence seen in the named source; nothing is copied. B=2, S=6, D=8, V=40;
the library clients (`lib_*`) are tiny models with random weights and a vocabulary of 64.
"""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.case import Group

B, S, D, V = 2, 6, 8, 40
GROUP = Group("published.splade_head", dense=B * S * V)


def _mask(dtype: torch.dtype = torch.int64) -> Tensor:
    mask = torch.ones(B, S, dtype=torch.int64)
    mask[0, 4:] = 0
    return mask.to(dtype)


def _hidden(requires_grad: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(B, S, D, dtype=dtype, requires_grad=requires_grad)


class Head(nn.Module):
    """A vocabulary projection and a pooling closure `pool(logits, mask)`."""

    def __init__(self, pool: Callable, bias: bool = True, dtype: torch.dtype = torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.decoder = nn.Linear(D, V, bias=bias, dtype=dtype)
        self.pool = pool

    def forward(self, hidden: Tensor, mask: Tensor) -> Any:
        return self.pool(self.decoder(hidden), mask)


def pooling(
    source: str,
    name: str | None = None,
    *,
    bias: bool = True,
    dtype: torch.dtype = torch.float32,
    mask_dtype: torch.dtype = torch.int64,
    both: bool = False,
    **fields: Any,
) -> Callable[[Callable], Callable]:
    """Register `pool(logits, mask)` as a case, in inference or (`both`) also in training."""

    def register(pool: Callable) -> Callable:
        label = name or pool.__name__
        for training in (False, True) if both else (False,):

            def build(training: bool = training) -> tuple:
                return Head(pool, bias, dtype), (_hidden(training, dtype), _mask(mask_dtype))

            suffix = ("__train" if training else "__infer") if both else ""
            GROUP.add(label + suffix, source, build, training=training, **fields)
        return pool

    return register


@pooling("naver/splade models/transformer_rep.py (Splade.encode)", both=True)
def naver_log1plus_mul_maxdim(logits, mask):
    return torch.max(torch.log(1 + torch.relu(logits)) * mask.unsqueeze(-1), dim=1)[0]


@pooling("public code", both=True)
def log1p_relu_mul_maxvalues_floatmask(logits, mask):
    weights = torch.log1p(torch.relu(logits)) * mask.unsqueeze(-1).to(logits.dtype)
    return weights.max(dim=1).values


@pooling("HansiZeng/scaling-retriever (log(relu+1))")
def relu_plus_one_order(logits, mask):
    return torch.max(torch.log(torch.relu(logits) + 1) * mask.unsqueeze(-1), dim=1).values


@pooling("public code, ONNX-export wrapper that returns topk(k)")
def mask_first_amax_topk(logits, mask):
    pooled = (logits * mask.unsqueeze(-1).to(logits.dtype)).relu().log1p().amax(dim=1)
    return pooled.topk(5, dim=1, largest=True, sorted=True)


@pooling("DylanJoo/examine-domain-mismatch models/_splade.py")
def maskedfill0_then_naver(logits, mask):
    logits = logits.masked_fill(~mask[..., None].bool(), 0.0)
    return torch.max(torch.log(1 + torch.relu(logits)), dim=1)[0]


@pooling("webis-de/lightning-ir (relu_2xlog)")
def lightning_ir_2xlog(logits, mask):
    weights = torch.log1p(torch.log1p(torch.relu(logits)))
    weights = weights.masked_fill(~mask.bool().unsqueeze(-1), float("-inf"))
    return weights.amax(dim=1, keepdim=True)


@pooling("torch.where on the logits, activation after the max")
def where_neginf_logits(logits, mask):
    kept = torch.where(mask.bool().unsqueeze(-1), logits, torch.full_like(logits, float("-inf")))
    return torch.log1p(torch.relu(kept.max(dim=1).values))


@pooling(
    "HansiZeng/scaling-retriever modeling/llm_encoder.py (DecoderOnlyBiSparse.encode)",
    bias=False,
    both=True,
)
def scaling_retriever_inplace_scale(logits, mask):
    logits *= D ** (-0.25)
    pooled = torch.max(logits + (1 - mask.unsqueeze(-1)) * -1000000.0, dim=1)[0]
    return torch.log(torch.relu(pooled) + 1)


@pooling("opensearch-project model card / langchain-milvus default sparse encoder")
def opensearch_special_ids_zeroed(logits, mask):
    values, _ = torch.max(logits * mask.unsqueeze(-1), dim=1)
    values = torch.log(1 + torch.relu(values))
    values[:, [0, 1, 2]] = 0
    return values


@pooling("experimaestro/experimaestro-ir xpmir/neural/splade.py (MaxAggregation)", both=True)
def xpmir_relu_mul_max_clamp_log1p(logits, mask):
    values, _ = torch.max(torch.relu(logits) * mask.to(logits.device).unsqueeze(-1), dim=1)
    return torch.log1p(values.clamp(min=0))


@pooling("DamirBogdan39/huberman_rag src/splade_embeddings.py")
def single_query_squeeze(logits, mask):
    return torch.max(torch.log(1 + torch.relu(logits)) * mask.unsqueeze(-1), dim=1)[0].squeeze()


@pooling("clamp(min=0) for relu", both=True)
def clamp_min0_for_relu(logits, mask):
    return (torch.log1p(logits.clamp(min=0)) * mask.unsqueeze(-1)).amax(1)


@pooling("a margin that is cut to whole numbers on the way")
def margin_of_integers(logits, mask):
    margin = torch.full((1,), 0.7).long()
    return (torch.log1p(torch.relu(logits - margin)) * mask.unsqueeze(-1)).amax(1)


@pooling("torch.maximum with zeros for relu")
def maximum_zero(logits, mask):
    positive = torch.maximum(logits, torch.zeros_like(logits))
    return (torch.log1p(positive) * mask.unsqueeze(-1)).amax(1)


@pooling("special terms dropped from every token, then the mask", both=True)
def special_terms_before_the_mask(logits, mask):
    special = torch.arange(V) < 3
    weights = torch.log1p(torch.relu(logits)).masked_fill(special, 0.0)
    return (weights * mask.unsqueeze(-1)).amax(1)


@pooling(
    "bf16 model, int64 mask multiplied directly",
    dtype=torch.bfloat16,
    bias=False,
    precision=torch.bfloat16,
)
def intmask_bf16_logits(logits, mask):
    return torch.max(torch.log(1 + torch.relu(logits)) * mask.unsqueeze(-1), dim=1).values


@pooling("transposed before the reduction")
def transpose_max_last(logits, mask):
    weights = torch.log1p(torch.relu(logits)) * mask.unsqueeze(-1)
    return torch.max(weights.transpose(1, 2), dim=-1).values


@pooling("mask[:, :, None] for unsqueeze")
def mul_mask_none_index(logits, mask):
    return (torch.log1p(torch.relu(logits)) * mask[:, :, None]).amax(dim=1)


@pooling(
    "naver/splade with fp16=True: autocast around encode",
    both=True,
    autocast=torch.bfloat16,
    precision=torch.bfloat16,
)
def naver_autocast_bf16(logits, mask):
    return torch.max(torch.log(1 + torch.relu(logits)) * mask.unsqueeze(-1), dim=1)[0]


@pooling("autocast and log1p", autocast=torch.bfloat16, precision=torch.bfloat16)
def log1p_autocast_bf16(logits, mask):
    return torch.max(torch.log1p(torch.relu(logits)) * mask.unsqueeze(-1), dim=1)[0]


@pooling(
    "logits[~mask] = -inf",
    both=True,
    expect="maybe",
    why="the mask is an index_put with a boolean [B, S] index, not where or mul",
)
def index_put_bool_neginf(logits, mask):
    logits = logits.clone()
    logits[~mask.bool()] = float("-inf")
    return torch.log1p(torch.relu(logits.max(dim=1).values))


@pooling(
    "Gemma final_logit_softcapping before pooling",
    bias=False,
    expect="maybe",
    why="monotone soft-cap between matmul and relu: needs an epilogue that has tanh",
)
def softcap_tanh_gemma2(logits, mask):
    capped = torch.tanh(logits / 30.0) * 30.0
    return torch.log1p(torch.relu(capped + (1 - mask.unsqueeze(-1)) * -10000.0)).amax(1)


@pooling("Granite, Cohere: logits / logits_scaling", bias=False)
def granite_logits_scaling(logits, mask):
    return (torch.log1p(torch.relu(logits / 8.0)) * mask.unsqueeze(-1)).amax(1)


@pooling("naver cosine=True: normalised representations", both=True)
def l2_normalised_reps(logits, mask):
    pooled = (torch.log1p(torch.relu(logits)) * mask.unsqueeze(-1)).amax(1)
    return F.normalize(pooled, p=2, dim=-1)


class Projection(nn.Module):
    """The vocabulary matmul written in several ways, with the plain pooling after it."""

    def __init__(self, how: str):
        super().__init__()
        torch.manual_seed(0)
        self.E = nn.Parameter(torch.randn(V, D))
        self.b = nn.Parameter(torch.randn(V))
        self.how = how

    def logits(self, h: Tensor) -> Tensor:
        if self.how == "einsum":
            return torch.einsum("bsd,vd->bsv", h, self.E) + self.b
        if self.how == "at_nobias":
            return h @ self.E.T
        if self.how == "bmm_expand":
            return torch.bmm(h, self.E.t().unsqueeze(0).expand(h.size(0), -1, -1)) + self.b
        assert self.how == "linear_scaled"
        return F.linear(h, self.E, self.b) / math.sqrt(D)

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        return (torch.log1p(torch.relu(self.logits(h))) * mask.unsqueeze(-1)).amax(1)


for _how, _source, _training in (
    ("einsum", "SparseEmbed and CSPLADE heads", False),
    ("at_nobias", "decoder-only LM head h @ E.T", False),
    ("bmm_expand", "batched matmul with an expanded weight", False),
    ("linear_scaled", "T5-style logit scaling", False),
    ("einsum", "SparseEmbed and CSPLADE heads", True),
    ("at_nobias", "decoder-only LM head h @ E.T", True),
):
    GROUP.add(
        f"proj_{_how}" + ("__train" if _training else ""),
        _source,
        lambda how=_how, training=_training: (Projection(how), (_hidden(training), _mask())),
        training=_training,
    )


class STPool(nn.Module):
    """SpladePooling: a running max (or sum) over chunks of the sequence, in place in inference."""

    def __init__(self, strategy: str = "max", act: str = "relu", chunk: int | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.decoder = nn.Linear(D, V)
        self.strategy, self.act, self.chunk = strategy, act, chunk

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        logits = self.decoder(h)
        mask = mask.unsqueeze(-1).to(logits.dtype)
        b, s, v = logits.shape
        start = float("-inf") if self.strategy == "max" else 0.0
        pooled = torch.full((b, v), start, dtype=logits.dtype)
        step = self.chunk or s
        for i in range(0, s, step):
            t = (logits[:, i : i + step] * mask[:, i : i + step]).relu_()
            t = t.log1p() if self.training else t.log1p_()
            if self.act == "log1p_relu":
                t = t.log1p() if self.training else t.log1p_()
            if self.strategy == "max":
                pooled = torch.maximum(pooled, torch.max(t, dim=1)[0])
            else:
                pooled += torch.sum(t, dim=1)
        return pooled


_ST = "huggingface/sentence-transformers sparse_encoder/modules/splade_pooling.py"
for _training in (False, True):
    _suffix = "__train" if _training else "__infer"
    for _name, _kwargs, _fields in (
        ("st_max", {}, {}),
        (
            "st_max_chunk2",
            {"chunk": 2},
            {"expect": "maybe", "why": "three slices of one linear, chained by maximum()"},
        ),
        ("st_max_2xlog", {"act": "log1p_relu"}, {}),
        (
            "st_sum",
            {"strategy": "sum"},
            {"expect": "no_rewrite", "why": "sum pooling is not a max"},
        ),
    ):
        GROUP.add(
            _name + _suffix,
            _ST,
            lambda kwargs=_kwargs, training=_training: (
                STPool(**kwargs),
                (_hidden(training), _mask()),
            ),
            training=_training,
            **_fields,
        )


class Packed(nn.Module):
    """Tokens of all sequences in one flat tensor, one slice reduced per sequence."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.dense, self.ln, self.decoder = nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, V)

    def forward(self, flat: Tensor) -> Tensor:
        tokens = torch.log1p(F.relu(self.decoder(self.ln(F.gelu(self.dense(flat))))))
        pooled, start = [], 0
        for length in (4, 6):
            pooled.append(tokens[start : start + length].max(dim=0).values)
            start += length
        return torch.stack(pooled)


def _packed() -> tuple:
    torch.manual_seed(2)
    return Packed(), (torch.randn(10, D),)


GROUP.add(
    "kernelswift_packed_static",
    "public code KernelSwift task-04 reference",
    _packed,
    expect="maybe",
    why="one linear, several slices reduced over dim 0: needs a segmented kernel",
)


class LsrMlm(nn.Module):
    """logits * mask * (1 - special) * importance, relu, log1p, max, times a document quality."""

    def __init__(self, epic: bool):
        super().__init__()
        torch.manual_seed(0)
        self.decoder = nn.Linear(D, V)
        self.importance, self.quality, self.epic = nn.Linear(D, 1), nn.Linear(D, 1), epic

    def forward(self, h: Tensor, mask: Tensor, special: Tensor) -> Tensor:
        weight = torch.log1p(F.softplus(self.importance(h))) if self.epic else 1.0
        quality = torch.sigmoid(self.quality(h[:, 0])) if self.epic else 1.0
        logits = self.decoder(h) * mask.unsqueeze(-1) * (1 - special).unsqueeze(-1) * weight
        return torch.max(torch.log1p(F.relu(logits)), dim=1).values * quality


def _special() -> Tensor:
    special = torch.zeros(B, S, dtype=torch.int64)
    special[:, 0] = 1
    return special


for _training in (False, True):
    _suffix = "__train" if _training else "__infer"
    GROUP.add(
        "lsr_mlm_two_masks" + _suffix,
        "thongnt99/learned-sparse-retrieval lsr/models/mlm.py",
        lambda training=_training: (LsrMlm(False), (_hidden(training), _mask(), _special())),
        training=_training,
    )
    GROUP.add(
        "lsr_epic_term_importance" + _suffix,
        "thongnt99/learned-sparse-retrieval lsr/models/mlm.py (EPIC)",
        lambda training=_training: (LsrMlm(True), (_hidden(training), _mask(), _special())),
        training=_training,
        expect="maybe",
        why="the row multiplier is real-valued and needs its own gradient",
    )


def _tokens(logits: Tensor) -> Tensor:
    return torch.log1p(torch.relu(logits))


near_miss = functools.partial(pooling, expect="no_rewrite")


@near_miss("texttron/tevatron pooling 'mean'", why="mean pooling")
def nm_mean_pool(logits, mask):
    total = (_tokens(logits) * mask.unsqueeze(-1)).sum(1)
    return total / mask.unsqueeze(-1).sum(1).clamp(min=1)


@near_miss("PromptReps, tevatron pooling 'last'", why="gathers one token")
def nm_last_token(logits, mask):
    return _tokens(logits[torch.arange(logits.size(0)), mask.sum(1) - 1])


@near_miss("max over the batch", why="max over the batch")
def nm_max_over_batch(logits, mask):
    return (_tokens(logits) * mask.unsqueeze(-1)).amax(dim=0)


@near_miss(
    "MLM and SPLADE multi-task, logits returned too",
    why="the logits must be materialised anyway",
    both=True,
)
def nm_logits_returned(logits, mask):
    return (_tokens(logits) * mask.unsqueeze(-1)).amax(1), logits


@near_miss(
    "hyukkyukang/SPLADE pooling_mode blend",
    why="the same activations are also sum-pooled",
)
def nm_activations_reused_sum(logits, mask):
    tokens, keep = _tokens(logits), mask.unsqueeze(-1).to(logits.dtype)
    total = (tokens * keep).sum(1)
    largest = tokens.masked_fill(keep == 0, float("-inf")).max(1).values.clamp(min=0)
    return total + (largest - total) * 1.0


@near_miss("terms filled with 1, then the mask", why="0 and 1 in turn")
def nm_filled_before_the_mask(logits, mask):
    weights = _tokens(logits).masked_fill(torch.arange(V) < 3, 1.0)
    return (weights * mask.unsqueeze(-1)).amax(1)


@near_miss("leaky_relu for relu", expect="maybe", why="leaky_relu: exact where it can be evaluated")
def nm_leaky(logits, mask):
    return (torch.log1p(F.leaky_relu(logits, 0.01)) * mask.unsqueeze(-1)).amax(1)


@near_miss("thongnt99/lsr AbsPool", expect="maybe", why="gather at the argmax of |x|")
def nm_abs_pool(logits, mask):
    x = _tokens(logits) * mask.unsqueeze(-1)
    return x.gather(1, x.abs().argmax(1, keepdim=True)).squeeze(1)


@near_miss("log2 for log", expect="maybe", why="log2: valid with a scale factor")
def nm_log2(logits, mask):
    return (torch.log2(1 + torch.relu(logits)) * mask.unsqueeze(-1)).amax(1)


@near_miss("log(2 + relu)", expect="maybe", why="the constant is 2, not 1: a masked token is not 0")
def nm_log_two_plus(logits, mask):
    return (torch.log(2 + torch.relu(logits)) * mask.unsqueeze(-1)).amax(1)


@near_miss("a sine before relu", why="not monotone, so the max may not come first")
def nm_sine_between(logits, mask):
    return (torch.log1p(torch.relu(torch.sin(logits))) * mask.unsqueeze(-1)).amax(1)


@near_miss("min pooling", why="min pooling")
def nm_min_pool(logits, mask):
    return (_tokens(logits) * mask.unsqueeze(-1)).amin(1)


@near_miss("soft-max pooling", why="a smooth max")
def nm_logsumexp_pool(logits, mask):
    return torch.logsumexp(_tokens(logits) * mask.unsqueeze(-1), dim=1)


@near_miss("lightning-ir 'relu', BGE-like", expect="maybe", why="no log: valid without log1p")
def nm_relu_no_log(logits, mask):
    return (torch.relu(logits) * mask.unsqueeze(-1)).amax(1)


class LearnedMask(nn.Module):
    """Token gates multiplied after the activation."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.decoder = nn.Linear(D, V)

    def forward(self, h: Tensor, gate: Tensor) -> Tensor:
        return (torch.log1p(torch.relu(self.decoder(h))) * gate.unsqueeze(-1)).amax(1)


def _learned_mask() -> tuple:
    hidden = _hidden(True)
    return LearnedMask(), (hidden, torch.rand(B, S, requires_grad=True))


GROUP.add(
    "nm_mask_requires_grad",
    "learned token gates",
    _learned_mask,
    training=True,
    expect="maybe",
    why="the mask is real-valued and needs a gradient",
)


class TimesBagOfWords(nn.Module):
    """A head whose pooled [B, V] is multiplied by a bag of words."""

    def __init__(self, head: nn.Module):
        super().__init__()
        self.head = head

    def forward(self, h: Tensor, mask: Tensor, bow: Tensor) -> Tensor:
        return self.head(h, mask) * bow


def _bag_of_words() -> tuple:
    head = Head(lambda logits, mask: _tokens(logits).amax(1))
    return TimesBagOfWords(head), (_hidden(), _mask(), torch.randint(0, 2, (B, V)))


GROUP.add("nm_mask_per_vocab_BV", "bow, SpladeLexical: the product stays outside", _bag_of_words)


class TokenScatter(nn.Module):
    """One weight a token, scattered to the vocabulary by token id."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(D, 1)

    def forward(self, h: Tensor, ids: Tensor) -> Tensor:
        weight = torch.relu(self.lin(h))
        tokens = torch.zeros(h.size(0), h.size(1), V, dtype=weight.dtype)
        return torch.scatter(tokens, -1, ids.unsqueeze(-1), weight).max(dim=1).values


def _token_scatter() -> tuple:
    hidden = _hidden(True)
    return TokenScatter(), (hidden, torch.randint(0, V, (B, S)))


GROUP.add(
    "nm_bge_m3_scatter_max",
    "FlagOpen/FlagEmbedding m3 (_sparse_embedding), tevatron unicoil",
    _token_scatter,
    training=True,
    expect="no_rewrite",
    why="one scalar a token scattered by token id: there is no vocabulary matmul",
)


class SharedPositionMask(nn.Module):
    """A mask of positions that all sequences share, [1, S, 1]."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.decoder = nn.Linear(D, V)

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        return (torch.log1p(torch.relu(self.decoder(h))) * mask.view(1, -1, 1)).amax(1)


GROUP.add(
    "mask_shape_1S1",
    "shared position mask",
    lambda: (SharedPositionMask(), (_hidden(), torch.tensor([1, 1, 1, 0, 1, 0]))),
    expect="maybe",
    why="the mask is broadcast over the batch",
)


@functools.cache
def _bert_folder() -> tempfile.TemporaryDirectory:
    """A tiny random BertForMaskedLM and a WordPiece tokenizer, saved once a process."""
    from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast

    folder = tempfile.TemporaryDirectory(prefix="sparse_inductor_bert_")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] + [f"w{i}" for i in range(59)]
    vocab = Path(folder.name, "vocab.txt")
    vocab.write_text("\n".join(words))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        hidden_size=16,
        intermediate_size=32,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertForMaskedLM(config).save_pretrained(folder.name)
    BertTokenizerFast(vocab_file=str(vocab)).save_pretrained(folder.name)
    return folder


def _bert() -> nn.Module:
    from transformers import BertForMaskedLM

    return BertForMaskedLM.from_pretrained(_bert_folder().name)


def _ids() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    ids = torch.randint(5, 60, (B, S))
    ids[:, 0] = 2
    mask = _mask()
    return ids * mask, mask


class NaverOnBert(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlm = _bert()

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        logits = self.mlm(input_ids=ids, attention_mask=mask).logits
        return torch.max(torch.log(1 + torch.relu(logits)) * mask.unsqueeze(-1), dim=1)[0]


class SparseEncoderOnBert(nn.Module):
    def __init__(self, activation: str = "relu"):
        super().__init__()
        from sentence_transformers import SparseEncoder
        from sentence_transformers.base.modules import Transformer
        from sentence_transformers.sparse_encoder.modules import SpladePooling

        backbone = Transformer(_bert_folder().name, transformer_task="fill-mask")
        pooling = SpladePooling(pooling_strategy="max", activation_function=activation)
        self.encoder = SparseEncoder(modules=[backbone, pooling], device="cpu")

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.encoder({"input_ids": ids, "attention_mask": mask})["sentence_embedding"]


class OnlyBackbone(nn.Module):
    """The pooling stays eager: `model[0].auto_model = torch.compile(model[0].auto_model)`."""

    def __init__(self):
        super().__init__()
        self.mlm = _bert()

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.mlm(input_ids=ids, attention_mask=mask).logits


class SpladeOnLlama(nn.Module):
    def __init__(self):
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            use_cache=False,
        )
        self.lm = LlamaForCausalLM(config)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        logits = self.lm(input_ids=ids, attention_mask=mask).logits
        pooled, _ = torch.max(logits + (1 - mask.unsqueeze(-1)) * -10000.0, dim=1)
        return torch.log1p(torch.relu(pooled))


_HF, _ST_CLIENT = ("transformers",), ("transformers", "sentence_transformers")
CLIENTS = Group("published.splade_head", dense=B * S * 64)
for _name, _source, _client, _needs in (
    ("naver_on_hf_bert", "naver/splade pooling on BertForMaskedLM", NaverOnBert, _HF),
    ("st_sparseencoder_bert", "SparseEncoder with SpladePooling", SparseEncoderOnBert, _ST_CLIENT),
):
    for _training in (False, True):
        CLIENTS.add(
            f"lib_{_name}" + ("__train" if _training else ""), _source,
            lambda client=_client: (client(), _ids()), training=_training, requires=_needs,
        )  # fmt: skip
CLIENTS.add(
    "lib_st_sparseencoder_bert_2xlog",
    "SparseEncoder with activation log1p_relu",
    lambda: (SparseEncoderOnBert("log1p_relu"), _ids()),
    requires=_ST_CLIENT,
)
CLIENTS.add(
    "lib_only_backbone_compiled",
    "only the model is compiled: the logits leave the graph",
    lambda: (OnlyBackbone(), _ids()),
    expect="out_of_graph",
    why="the pooling is not inside the compiled region",
    requires=_HF,
)
CLIENTS.add(
    "lib_tevatron_llama",
    "texttron/tevatron SpladeModelForCausalLM on a tiny Llama",
    lambda: (SpladeOnLlama(), _ids()),
    requires=_HF,
)
