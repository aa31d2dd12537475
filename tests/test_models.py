"""Unchanged models of transformers and sentence-transformers with random weights: one rewrite, and equal results."""

from __future__ import annotations

import copy
import pickle
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from corpus.case import Case
from corpus.check import check, products
from sparse_inductor.integrations.sentence_transformers import drop_logits
from sparse_inductor.testing import assert_matches_reference
from support import compile_without_codegen, heavy, near_misses, only_splade_head, rewrites

transformers = pytest.importorskip("transformers")

B, S, V = 3, 11, 97
COMMON = {
    "vocab_size": V, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32,
}  # fmt: skip
BERT = {**COMMON, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LLAMA = {**COMMON, "num_key_value_heads": 1, "use_cache": False}
DISTILBERT = {
    "vocab_size": V, "n_layers": 1, "n_heads": 2, "dim": 16, "hidden_dim": 32, "dropout": 0.0,
    "attention_dropout": 0.0,
}  # fmt: skip
MODERNBERT = {
    **COMMON, "num_hidden_layers": 2, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1,
    "eos_token_id": 2, "global_attn_every_n_layers": 2, "local_attention": 8,
}  # fmt: skip
# name: transformers' model, its configuration, and the configuration's arguments
MODELS = {
    "bert": ("BertForMaskedLM", "BertConfig", BERT),
    "distilbert": ("DistilBertForMaskedLM", "DistilBertConfig", DISTILBERT),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", BERT),
    "xlm_roberta": ("XLMRobertaForMaskedLM", "XLMRobertaConfig", BERT),
    "modernbert": ("ModernBertForMaskedLM", "ModernBertConfig", MODERNBERT),
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**LLAMA, "tie_word_embeddings": True}),
}


class Splade(nn.Module):
    """A SPLADE encoder: max_s log(1 + relu(logits)) over the unmasked tokens."""

    def __init__(self, name: str, std: float = 0.3):
        super().__init__()
        torch.manual_seed(0)
        model, config, sizes = MODELS[name]
        self.lm = getattr(transformers, model)(getattr(transformers, config)(**sizes))
        for p in self.lm.parameters():  # the default, 0.02, would give logits near zero
            if p.dim() > 1:
                nn.init.normal_(p, std=std)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        logits = self.lm(input_ids=ids, attention_mask=mask).logits
        return torch.max(torch.log1p(torch.relu(logits)) * mask.unsqueeze(-1), dim=1).values


def tokens() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    mask = (torch.arange(S) < torch.tensor([[S], [7], [4]])).long()
    return torch.randint(5, V, (B, S)) * mask, mask


def check_head(build, training: bool, **fields) -> None:
    """Check that the program of `build()` has one rewritten head, and that no logits are left."""
    with only_splade_head():
        check(Case("", build, training=training, dense=B * S * V, **fields), how="aten")


@pytest.mark.sample(2)
@pytest.mark.parametrize("training", [heavy(False), True], ids=["infer", "train"])
@pytest.mark.parametrize("name", MODELS)
def test_head_is_rewritten(name, training):
    with torch.no_grad():
        assert Splade(name)(*tokens()).count_nonzero() > B * V / 4
    check_head(lambda: (Splade(name), tokens()), training)


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["bert", heavy("distilbert"), heavy("qwen2")])
def test_dynamic_shapes(name):
    """Dynamo may restart after it has called the backend; then the same head is rewritten twice."""
    case = Case("", lambda: (Splade(name), tokens()), "maybe", "twice", True, dynamic=True)
    with only_splade_head():
        found = check(case, how="aten")
    assert len(found.report.rewrites) == len(found.graphs)
    assert len({r.location for r in found.report.rewrites}) == 1
    assert not [product for product in products(found, V) if f", {V}] = " in product]


def test_autocast():
    """Weights are small: in bf16, a deep random network with large weights gives noise, in eager mode too."""
    check_head(lambda: (Splade("bert", std=0.1), tokens()), True, autocast=torch.bfloat16)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["bert", heavy("roberta"), "qwen2"])
def test_a_tied_decoder_gets_the_gradients_of_both_uses(name):
    """The embedding matrix is the decoder's weight: one parameter that a gather and the operator read."""
    model = Splade(name).train()
    table = model.lm.get_input_embeddings().weight
    assert model.lm.get_output_embeddings().weight is table
    ids, mask = tokens()
    model(ids, mask).sum().backward()
    expected, table.grad = table.grad, None
    with only_splade_head() as report:
        compile_without_codegen(model)(ids, mask).sum().backward()
        assert len(rewrites(report)) == 1
    torch.testing.assert_close(table.grad, expected, rtol=1e-4, atol=1e-5)
    assert table.grad[ids[0, 0]].any()


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["bert", heavy("distilbert"), heavy("modernbert"), "llama"])
def test_gradient_checkpointing(name):
    def checkpointed():
        model = Splade(name)
        # If it stays on, transformers logs a warning in forward, and Dynamo breaks the graph there.
        model.lm.config.use_cache = False
        model.lm.gradient_checkpointing_enable({"use_reentrant": False})
        return model, tokens()

    check_head(checkpointed, True)


def test_logits_for_a_loss_as_well_are_left_alone():
    """A masked-LM loss beside the pooling needs every logit."""

    class WithLoss(Splade):
        def forward(self, ids, mask):
            out = self.lm(input_ids=ids, attention_mask=mask, labels=ids)
            return (torch.log1p(torch.relu(out.logits)) * mask.unsqueeze(-1)).amax(1), out.loss

    with only_splade_head():
        found = assert_matches_reference(
            WithLoss("bert").train(), tokens(), inference=False, vary=0, must_rewrite=False
        )
    assert not found.report.rewrites
    assert any("also read by" in m.reason for m in found.report.near_misses)


def test_only_the_backbone_is_compiled():
    """The graph returns the logits, and the pooling is outside of it."""
    model = Splade("bert").eval()
    with only_splade_head() as report, torch.no_grad():
        expected = model(*tokens())
        model.lm.compile(backend=compile_without_codegen(model.lm)._backend)
        torch.testing.assert_close(model(*tokens()), expected)
        assert not report.rewrites


# --- sentence-transformers ------------------------------------------------------------------------

SENTENCES = ["w1 w2 w3", "w4 w5 w6 w7 w8 w9", "w10"]


@pytest.fixture(scope="module")
def checkpoint():
    """A folder with a tiny BertForMaskedLM and a tokenizer."""
    folder = tempfile.TemporaryDirectory()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] + [f"w{i}" for i in range(V - 5)]
    vocab = Path(folder.name, "vocab.txt")
    vocab.write_text("\n".join(words))
    Splade("bert").lm.save_pretrained(folder.name)
    transformers.BertTokenizerFast(vocab_file=str(vocab)).save_pretrained(folder.name)
    with folder:
        yield folder.name


def sparse_encoder(checkpoint, **pooling):
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    backbone = Transformer(checkpoint, transformer_task="fill-mask")
    return SparseEncoder(modules=[backbone, SpladePooling("max", **pooling)], device="cpu")


@pytest.fixture
def encoder(checkpoint):
    return sparse_encoder(checkpoint)


class Embed(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, ids, mask):
        return self.encoder({"input_ids": ids, "attention_mask": mask})["sentence_embedding"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("training", [False, True], ids=["infer", "train"])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_sparse_encoder(checkpoint, training, activation):
    encoder = sparse_encoder(checkpoint, activation_function=activation)
    check_head(lambda: (Embed(encoder), tokens()), training)


@pytest.mark.sample(1)
@pytest.mark.parametrize("training", [False, True], ids=["infer", "train"])
def test_chunked_pooling_of_a_sparse_encoder(checkpoint, training):
    encoder = sparse_encoder(checkpoint, chunk_size=4)
    check_head(lambda: (Embed(encoder), tokens()), training, rewrites=3)


def encode(encoder) -> Tensor:
    return encoder.encode(SENTENCES, convert_to_sparse_tensor=False)


def test_encode_of_a_compiled_sparse_encoder_is_rewritten(encoder):
    with only_splade_head() as report:
        expected = encode(encoder)
        drop_logits(encoder)
        assert expected.shape == (3, V) and expected.count_nonzero() > V / 4
        spy = compile_without_codegen(encoder)
        encoder.compile(backend=spy._backend)
        torch.testing.assert_close(encode(encoder), expected)
        assert spy.dynamo_graphs == 1
        assert len(rewrites(report)) == 1, near_misses(report)
        assert near_misses(report) == []


def features(mask: Tensor | None = None) -> dict[str, Tensor]:
    ids, ones = tokens()
    return {"input_ids": ids, "attention_mask": ones if mask is None else mask}


def test_enable_takes_no_logits_from_anybody(encoder):
    """Callers and losses still get the logits, compiled or not."""
    from sentence_transformers.sparse_encoder.losses import SpladeLoss

    before = dict(vars(type(encoder))), dict(vars(SpladeLoss)), list(sys.meta_path)
    encoder.eval()
    with torch.no_grad():
        expected = encoder(features())
    with only_splade_head(), torch.no_grad():
        assert (dict(vars(type(encoder))), dict(vars(SpladeLoss)), sys.meta_path) == before
        for backend in (None, "eager"):
            if backend:
                encoder.compile(backend=backend)
            given = features()
            encode(encoder)
            found = encoder(given)
            torch.testing.assert_close(found["token_embeddings"], expected["token_embeddings"])
            assert given.keys() == found.keys() == expected.keys()
            columns = [features(), features()]
            splade_loss(encoder)(columns, None)
            assert all("token_embeddings" in column for column in columns)


def test_dropping_logits_concerns_one_encoder_until_it_is_undone(encoder):
    other = copy.deepcopy(encoder)
    undo = drop_logits(encoder)
    given = features()
    found = encoder(given)
    assert "token_embeddings" not in found and "sentence_embedding" in found
    assert given.keys() == features().keys()
    for again in (copy.deepcopy(encoder), pickle.loads(pickle.dumps(encoder))):
        assert "token_embeddings" not in again(features())
        assert again.forward.args[0] is again
    assert "token_embeddings" in other(features())
    undo()
    assert "token_embeddings" in encoder(features())
    assert "forward" not in vars(encoder)


def splade_loss(encoder, name: str = "SpladeLoss"):
    from sentence_transformers.sparse_encoder import losses

    ranking = losses.SparseMultipleNegativesRankingLoss(encoder)
    weights = {"document_regularizer_weight": 3e-2, "query_regularizer_weight": 5e-2}
    return getattr(losses, name)(encoder, ranking, **weights)


@pytest.mark.parametrize("name", ["SpladeLoss", heavy("CachedSpladeLoss")])
def test_a_loss_on_a_compiled_sparse_encoder_is_rewritten(checkpoint, name):
    """Training code is unchanged, and gradients are those of the uncompiled encoder.

    The cached loss embeds without gradients first, and again with gradients once those of the embeddings are known.
    """
    plain = sparse_encoder(checkpoint).train()
    ours = copy.deepcopy(plain)
    texts = [["w1 w2 w3", "w4 w5"], ["w6 w7 w8 w9", "w1 w2"]]

    def gradients(model):
        batch = [model.preprocess(column) for column in texts]
        losses = splade_loss(model, name)([dict(b) for b in batch], torch.arange(2))
        sum(losses.values()).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    expected = gradients(plain)
    drop_logits(ours)
    with only_splade_head() as report:
        ours.compile(backend=compile_without_codegen(ours)._backend, dynamic=True)
        found = gradients(ours)
        assert rewrites(report), near_misses(report)
        assert near_misses(report) == []
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=3e-5)


@pytest.mark.heavy
def test_sparse_encoder_with_inductor(encoder):
    model = Embed(encoder).eval()
    with only_splade_head() as report, torch.no_grad():
        compiled = torch.compile(model)
        torch.testing.assert_close(compiled(*tokens()), model(*tokens()), rtol=1e-4, atol=1e-5)
        assert len(rewrites(report)) == 1


# --- A training step with code generation ---------------------------------------------------------


def training_steps(model: nn.Module, forward) -> list[Tensor]:
    """Train with a contrastive loss of a query and two passages and a FLOPS regulariser, and return the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(2):
        query, positive, negative = forward(*tokens())
        contrast = torch.stack([query @ positive, query @ negative]).log_softmax(0)[0]
        flops = torch.stack([query, positive, negative]).mean(0).square().sum()
        loss = -contrast + 0.1 * flops
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.heavy
def test_training_with_inductor_is_training_with_eager():
    eager = Splade("bert").train()
    ours = copy.deepcopy(eager)
    expected = training_steps(eager, eager)
    with only_splade_head() as report:
        losses = training_steps(ours, torch.compile(ours))
        assert len(rewrites(report)) == 1
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    for (name, p), q in zip(ours.named_parameters(), eager.parameters(), strict=True):
        # AdamW's first steps depend on the signs of gradients alone, so compare the gradients of the last step.
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-2, atol=1e-4, msg=name)
