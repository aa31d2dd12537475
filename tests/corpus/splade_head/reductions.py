"""The activation and the max over the sequence, in the idioms of several schools."""

from __future__ import annotations

import dataclasses
import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from corpus.case import each
from corpus.splade_head.registry import (
    INFER,
    TRAIN,
    Vocabulary,
    activated,
    encoder,
    head,
    hidden,
    mask,
    pooled,
    program,
    tokens,
)


@head()
def numpy_keywords(logits, mask):
    """A NumPy port: axis=, keepdims=."""
    weights = torch.log1p(torch.clip(logits, 0, None)) * mask[:, :, None]
    return torch.squeeze(torch.amax(weights, axis=1, keepdims=True), axis=1)


@head()
def jax_port(logits, mask):
    """jnp.max(jnp.where(mask[..., None], jnp.log1p(jax.nn.relu(x)), 0), axis=1)"""
    weights = torch.log1p(F.relu(logits))
    return torch.max(torch.where(mask[..., None].bool(), weights, 0), axis=1).values


@head()
def tensorflow_port(logits, mask):
    """tf.reduce_max(tf.math.log1p(tf.nn.relu(x)) * tf.expand_dims(tf.cast(mask), -1), axis=1)"""
    cast = torch.unsqueeze(mask.type(logits.dtype), dim=-1)
    return torch.max(torch.multiply(torch.log1p(torch.relu(logits)), cast), dim=1)[0]


@head()
def onnx_flavoured(logits, mask):
    """Only ops with an ONNX counterpart, every one a torch function."""
    weights = torch.log(torch.add(F.relu(logits), 1.0))
    weights = torch.mul(weights, torch.unsqueeze(mask, 2).to(torch.float32))
    values, _ = torch.max(weights, dim=1, keepdim=False)
    return values


@head(modes=INFER)
@head("maybe", "the gradient at 0 is another than the rectifier's", TRAIN)
def rectified_by_the_absolute_value(logits, mask):
    rectified = (logits + logits.abs()) / 2
    return (torch.log1p(rectified) * mask.unsqueeze(-1)).amax(1)


@head(modes=INFER)
def in_place_chain(logits, mask):
    """Inference code that saves every temporary."""
    return logits.relu_().add_(1.0).log_().mul_(mask.unsqueeze(-1)).amax(dim=1)


@head()
def functional_in_place_relu(logits, mask):
    return (torch.log1p(F.relu_(logits)) * mask.unsqueeze(-1)).max(1).values


@head()
def clamp_min_method(logits, mask):
    return logits.clamp_min(0.0).log1p().masked_fill(mask.unsqueeze(-1) == 0, 0.0).amax(1)


each(
    activated(),
    threshold_zero=lambda z: torch.log1p(F.threshold(z, 0.0, 0.0)),
    where_positive=lambda z: torch.where(z > 0, z, torch.zeros_like(z)).log1p(),
    masked_fill_negative=lambda z: z.masked_fill(z < 0, 0.0).log1p(),
    # a constant threshold that makes terms sparser
    shifted_bias_constant=lambda z: torch.log1p(torch.relu(z - 0.5)),
)


@head()
def aten_and_special(logits, mask):
    """torch.ops.aten and torch.special, as in exported code."""
    positive = torch.ops.aten.relu.default(logits)
    weights = torch.ops.aten.mul.Tensor(torch.special.log1p(positive), mask.unsqueeze(-1))
    return torch.ops.aten.amax.default(weights, [1])


@dataclasses.dataclass
class Sparse:
    values: torch.Tensor
    active: torch.Tensor


def splade_max(*, logits, attention_mask, dim=1, eps=0.0):
    weights = torch.log1p(torch.relu(logits) + eps)
    values = (weights * attention_mask.unsqueeze(-1)).max(dim=dim).values
    return Sparse(values=values, active=(values > 0).sum(-1))


@encoder()
def keyword_helper_and_dataclass(self, h, mask):
    return splade_max(attention_mask=mask, logits=self.decoder(h))


def masked(fn):
    @functools.wraps(fn)
    def wrapper(self, h, mask):
        logits = self.decoder(h).masked_fill(mask.unsqueeze(-1) < 1, -1e5)
        return fn(self, logits)

    return wrapper


@encoder()
@masked
def masking_decorator(self, logits):
    return torch.relu(logits).log1p().amax(dim=1)


class Apply(nn.Module):
    """A function as a layer."""

    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x):
        return self.fn(x)


@program()
def sequential_modules():
    pool = Apply(lambda x: x.max(dim=1).values)
    layers = Vocabulary().decoder, nn.ReLU(inplace=True), Apply(torch.log1p), pool
    return nn.Sequential(*layers), (hidden(),)


@encoder(parts={"dropout": lambda: nn.Dropout(0.0)})
def dropout_that_is_off(self, h, mask):
    """nn.Dropout(0.0) on the logits, left over from an experiment."""
    return (tokens(self.dropout(self.decoder(h))) * mask.unsqueeze(-1)).amax(1)


each(
    pooled(),
    movedim_first=lambda w: w.movedim(1, 0).amax(0),
    permute_then_last_dim=lambda w: w.permute(0, 2, 1).contiguous().max(-1)[0],
    keepdim_then_index=lambda w: torch.max(w, dim=1, keepdim=True)[0][:, 0],
    # A leading head dimension that the pooling carries along, as in multi-head code.
    unsqueeze_before=lambda w: w.unsqueeze(1).max(dim=2).values.squeeze(1),
    sorted_first=lambda w: torch.sort(w, dim=1, descending=True).values[:, 0],
    # a quantile's way of taking the maximum
    last_of_a_sort=lambda w: torch.sort(w, dim=1).values[:, -1],
    # back where they were
    stack_of_unbound=lambda w: torch.stack(w.unbind(1), dim=1).amax(1),
    gathered_where_largest=lambda w: w.gather(1, w.argmax(dim=1, keepdim=True)).squeeze(1),
)


@head()
def swapaxes_and_matrix_transpose(logits, mask):
    weights = tokens(logits.swapaxes(1, 2)) * mask.unsqueeze(1)
    return weights.mT.amax(dim=-2)


@head()
def einops_like(logits, mask):
    """What einops.reduce(x, 'b s v -> b v', 'max') does: reshape, then amax over a tuple."""
    weights = tokens(logits) * mask.reshape(mask.shape[0], mask.shape[1], 1)
    return weights.reshape(weights.shape).amax(dim=(1,))


@head()
def flatten_and_unflatten(logits, mask):
    flat = tokens(logits.flatten(0, 1)) * mask.flatten().unsqueeze(-1)
    return flat.unflatten(0, mask.shape).max(dim=1).values


@head()
def pruned_after_pooling(logits, mask):
    """Weights below 0.2 dropped after the max, and the count of the rest."""
    pooled = (tokens(logits) * mask.unsqueeze(-1)).max(dim=1).values
    pooled = torch.where(pooled > 0.2, pooled, 0.0)
    return pooled, (pooled > 0).sum(dim=-1)


@head()
def top_terms_kept(logits, mask):
    """top-k pruning: everything but the k best terms set to 0."""
    pooled = (tokens(logits) * mask.unsqueeze(-1)).amax(dim=1)
    values, index = pooled.topk(6, dim=-1)
    return torch.zeros_like(pooled).scatter(-1, index, values)


@head()
def shape_readers(logits, mask):
    """Reads the logits' shape, dtype and device, not their values."""
    assert logits.dim() == 3
    batch, length, vocabulary = logits.shape
    keep = mask.view(batch, length, 1).to(device=logits.device, dtype=logits.dtype)
    pooled = (tokens(logits) * keep).max(dim=1).values
    return pooled.view(batch, vocabulary) / length


@encoder(modes=TRAIN)
def checkpointed_head(self, h, mask):
    """torch.utils.checkpoint around the head: memory was the problem all along."""

    def pool(h, mask):
        return (tokens(self.decoder(h)) * mask.unsqueeze(-1)).max(dim=1).values

    return checkpoint(pool, h, mask, use_reentrant=False)


@program(modes=INFER)
def functional_call():
    class Model(Vocabulary):
        def forward(self, h, mask):
            return (tokens(self.decoder(h)) * mask.unsqueeze(-1)).max(dim=1).values

    module = Model()
    parameters = {k: v.detach().clone() for k, v in module.named_parameters()}

    def call(parameters, h, mask):
        return torch.func.functional_call(module, parameters, (h, mask))

    return call, (parameters, hidden(), mask())


@encoder(dynamic=True)
def symbolic_sizes(self, h, mask):
    batch, length, _ = h.shape
    keep = mask.view(batch, length, 1)
    return (tokens(self.decoder(h)) * keep).max(dim=1).values


@encoder(dynamic=True)
def symbolic_sizes_flattened(self, h, mask):
    batch, length, width = h.size()
    logits = self.decoder(h.reshape(batch * length, width)).view(batch, length, -1)
    return torch.log1p(torch.relu(logits - (1 - mask[..., None]) * 1e6)).amax(1)


each(
    pooled("maybe", "other operations that take a maximum"),
    topk_one=lambda w: w.topk(1, dim=1).values.squeeze(1),
    adaptive_max_pool=lambda w: F.adaptive_max_pool1d(w.transpose(1, 2), 1).squeeze(-1),
    max_pool_of_full_width=lambda w: F.max_pool1d(w.mT, kernel_size=w.size(1)).squeeze(-1),
    negative_min=lambda w: -torch.min(-w, dim=1).values,
)


def aminmax_without_gradient() -> str:
    """torch 2.11 has none."""
    x = torch.zeros(2, requires_grad=True)
    try:
        torch.autograd.grad(torch.aminmax(x).max, x)
    except RuntimeError as error:
        return str(error)
    return ""


@head("maybe", "aminmax computes both ends", INFER)
@head("maybe", "aminmax computes both ends", TRAIN, unsupported=aminmax_without_gradient)
def aminmax_upper(logits, mask):
    return torch.aminmax(tokens(logits) * mask.unsqueeze(-1), dim=1).max


@head()
@head(dynamic=True, prefix="any_size_")
def stack_of_tokens(logits, mask):
    weights = tokens(logits) * mask.unsqueeze(-1)
    return torch.stack([weights[:, i] for i in range(weights.size(1))]).max(0).values


@head(modes=INFER)
@head("no_rewrite", "unequal parts of the gradient", TRAIN, at="functools.reduce(torch.maximum")
def reduce_maximum(logits, mask):
    weights = tokens(logits) * mask.unsqueeze(-1)
    return functools.reduce(torch.maximum, weights.unbind(1))


@head(modes=INFER, dynamic=True)
def loop_from_zeros(logits, mask):
    """best starts as zeros, so that empty sequences have them; the mask is -inf before"""
    logits = logits.masked_fill(mask.unsqueeze(-1) == 0, -torch.inf)
    best = torch.zeros_like(logits[:, 0])
    for i in range(logits.size(1)):
        best = torch.maximum(best, logits[:, i])
    return best.log1p()


@head(modes=INFER)
def loop_from_the_first(logits, mask):
    weights = tokens(logits) * mask.unsqueeze(-1)
    best = weights[:, 0]
    for i in range(weights.size(1) - 1, 0, -1):
        best = torch.max(weights[:, i], best)
    return best


@head("maybe", "the argmax is used too; where every weight is 0 it depends on the order of the max")
def term_attribution(logits, mask):
    """Which token gave a term its weight: values and indices."""
    pooled = (tokens(logits) * mask.unsqueeze(-1)).max(dim=1)
    return pooled.values, pooled.indices


each(
    activated("maybe", "another monotone activation, or relu for finite numbers"),
    relu6_and_sqrt=lambda z: F.relu6(z).sqrt(),
    # no exact zeros, but no dead terms
    softplus_head=lambda z: torch.log1p(F.softplus(z)),
    multiplied_by_its_sign=lambda z: torch.log1p(z * (z > 0)),
)


@head("maybe", "another monotone activation", INFER)
def soft_capped_in_place(logits, mask):
    """Gemma's soft cap, in place."""
    logits = logits.div_(5.0).tanh_().mul_(5.0)
    return (tokens(logits) * mask.unsqueeze(-1)).amax(1)


@head("maybe", "a threshold per token, before the max")
def thresholded_tokens(logits, mask):
    weights = tokens(logits)
    weights = torch.where(weights > 0.3, weights, 0.0)
    return (weights * mask.unsqueeze(-1)).amax(1)


@encoder("maybe", "vmap hides the batch dimension", INFER)
def vmapped_head(self, h, mask):
    def one(h, mask):
        return (tokens(self.decoder(h)) * mask.unsqueeze(-1)).amax(0)

    return torch.vmap(one)(h, mask)


@encoder("maybe", "one logits tensor reduced in slices of the sequence")
def running_maximum_over_windows(self, h, mask):
    """The running maximum over windows of the logits, initialised with zeros."""
    weights = tokens(self.decoder(h)) * mask.unsqueeze(-1)
    best = torch.zeros_like(weights[:, 0])
    for window in weights.split(3, dim=1):
        best = torch.maximum(best, window.amax(dim=1))
    return best


@head()
def taken_along_where_largest(logits, mask):
    """the same with an index that gets its axis back"""
    weights = tokens(logits).masked_fill(mask.unsqueeze(-1) == 0, 0.0)
    return torch.take_along_dim(weights, weights.argmax(1)[:, None], dim=1)[:, 0]
