"""The operator: the mean of the tokens that a mask keeps, as one product, without a masked copy of the hidden states.

out[b, d] = sum_s mask[b, s] * hidden[b, s, d] / max(sum_s mask[b, s], eps)
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("masked_mean::pool", mutates_args=())
def pool(hidden: Tensor, mask: Tensor, eps: float) -> Tensor:
    """Pool hidden [B, S, D] with mask [B, S] (any real or bool dtype); return [B, D] in the dtype of `hidden`."""
    weights = _weights(hidden, mask, eps)
    return torch.bmm(weights.unsqueeze(1), hidden).squeeze(1)


def _weights(hidden: Tensor, mask: Tensor, eps: float) -> Tensor:
    mask = mask.to(hidden.dtype)
    return mask / mask.sum(1, keepdim=True).clamp(min=eps)


@pool.register_fake
def _(hidden: Tensor, mask: Tensor, eps: float) -> Tensor:
    return hidden.new_empty(hidden.shape[0], hidden.shape[2])


def _setup(ctx, inputs, output) -> None:
    hidden, mask, eps = inputs
    ctx.save_for_backward(_weights(hidden, mask, eps))


def _backward(ctx, grad):
    (weights,) = ctx.saved_tensors
    return weights.unsqueeze(2) * grad.unsqueeze(1), None, None


pool.register_autograd(_backward, setup_context=_setup)
