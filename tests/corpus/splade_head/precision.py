"""Mixed precision: where people cast."""

from __future__ import annotations

import torch

from corpus.splade_head.registry import (
    INFER,
    V,
    encoder,
    head,
    hidden,
    mask,
    tokens,
)

BF16 = torch.bfloat16


@head(dtype=BF16, precision=BF16)
def bf16_model(logits, mask):
    return (tokens(logits) * mask.unsqueeze(-1).to(logits.dtype)).amax(dim=1)


@head(dtype=BF16, precision=BF16)
def upcast_before_pooling(logits, mask):
    """logits.float(): the LM in bf16, the pooling in fp32."""
    logits = logits.float()
    return torch.max(torch.log1p(torch.relu(logits)) * mask.unsqueeze(-1), dim=1).values


@head(dtype=BF16, precision=BF16)
def upcast_before_log(logits, mask):
    """relu and mask in bf16, the log in fp32."""
    positive = torch.relu(logits) * mask.unsqueeze(-1)
    return torch.log1p(positive.to(torch.float32)).amax(1)


@head(dtype=BF16, precision=BF16)
def upcast_after_the_max(logits, mask):
    best = logits.masked_fill(mask.unsqueeze(-1) == 0, torch.finfo(logits.dtype).min).amax(dim=1)
    return torch.log1p(torch.relu(best.float()))


@head(dtype=BF16, precision=BF16, mask_dtype=torch.float32)
def float_mask_promotes(logits, mask):
    """A float32 mask times bf16 activations: the result is float32."""
    return (tokens(logits) * mask.unsqueeze(-1)).max(dim=1).values


@head(dtype=torch.float16, precision=torch.float16, modes=INFER)
def half_precision(logits, mask):
    """fp16 with the -1e4 that people use because -1e9 overflows."""
    return tokens(logits + (1 - mask.unsqueeze(-1)) * -1e4).max(dim=1).values


@encoder(precision=BF16, dtype=BF16)
def bf16_head_on_fp32_states(self, h, mask):
    """hidden.to(lm_head.weight.dtype), then back to fp32."""
    logits = self.decoder(h.to(self.decoder.weight.dtype)).float()
    return (tokens(logits) * mask.unsqueeze(-1)).max(dim=1).values


@encoder(precision=BF16, inputs=(lambda: hidden(BF16), mask))
def fp32_head_on_bf16_states(self, h, mask):
    """lm_head kept in fp32, the states upcast: nothing is lost in the matmul."""
    logits = self.decoder(h.to(self.decoder.weight.dtype))
    return (tokens(logits) * mask.unsqueeze(-1)).max(dim=1).values


@encoder(precision=BF16)
def autocast_region_around_the_model(self, h, mask):
    """autocast inside forward around the LM only; the pooling sees bf16 logits."""
    with torch.autocast("cpu", dtype=BF16):
        logits = self.decoder(h)
    return (tokens(logits.float()) * mask.unsqueeze(-1)).amax(dim=1)


@encoder(precision=BF16, autocast=BF16)
def autocast_off_for_the_head(self, h, mask):
    """Autocast outside, switched off around the head."""
    with torch.autocast("cpu", enabled=False):
        logits = self.decoder(h.to(self.decoder.weight.dtype))
        return (tokens(logits) * mask.unsqueeze(-1)).max(dim=1).values


@encoder(
    precision=BF16,
    autocast=BF16,
    bias=False,
    parts={"bias": lambda: torch.nn.Parameter(torch.linspace(-0.5, 0.5, V) / 3)},
)
def bias_added_in_fp32(self, h, mask):
    """A tied decoder with a separate bias, as in older BERTs: autocast does not cast the sum, which is fp32."""
    logits = self.decoder(h) + self.bias
    return torch.relu((logits + (1 - mask[..., None]) * -1e4).amax(dim=1))


@head("maybe", "the logits are rounded to bf16 before the max", modes=INFER, precision=BF16)
def rounded_to_bf16_for_memory(logits, mask):
    """fp32 matmul, logits stored in bf16 to halve them."""
    return (tokens(logits.to(BF16)) * mask.unsqueeze(-1)).max(dim=1).values
