"""Mixed precision: where people cast."""

from __future__ import annotations

import torch

from corpus.splade_head.registry import (
    BOTH,
    INFER,
    TRAIN,
    V,
    Vocabulary,
    encoder,
    head,
    hidden,
    mask,
    program,
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


@head(dtype=BF16, precision=BF16)
def downcast_result(logits, mask):
    pooled = (tokens(logits.float()) * mask.unsqueeze(-1).float()).amax(dim=1)
    return pooled.to(logits.dtype)


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
    modes=TRAIN, precision=BF16, autocast=BF16, parts={"dense": lambda: torch.nn.Linear(12, 12)}
)
def autocast_training_step(self, h, mask):
    """Autocast around a whole training step with matmul, head and scores."""
    logits = self.decoder(torch.tanh(self.dense(h)))
    reps = torch.log1p(torch.relu(logits * mask.unsqueeze(-1))).amax(dim=1)
    return reps @ reps.T


@encoder(
    precision=BF16,
    autocast=BF16,
    bias=False,
    parts={"bias": lambda: torch.nn.Parameter(torch.linspace(-0.5, 0.5, V) / 3)},
)
def bias_added_in_fp32(self, h, mask):
    """A tied decoder and a bias of its own, as older BERTs have: autocast leaves the sum alone, which is fp32."""
    logits = self.decoder(h) + self.bias
    return torch.relu((logits + (1 - mask[..., None]) * -1e4).amax(dim=1))


@head(dtype=torch.float64, precision=torch.float64)
def double_precision(logits, mask):
    return (tokens(logits) * mask.unsqueeze(-1)).max(dim=1).values


@head("maybe", "the logits are rounded to bf16 before the max", modes=INFER, precision=BF16)
def rounded_to_bf16_for_memory(logits, mask):
    """fp32 matmul, logits stored in bf16 to halve them."""
    return (tokens(logits.to(BF16)) * mask.unsqueeze(-1)).max(dim=1).values


@encoder("maybe", "a float8-like fake quantisation between matmul and max", INFER, precision=BF16)
def fake_quantised_logits(self, h, mask):
    """Logits rounded to multiples of 1/8."""
    logits = (self.decoder(h) * 8).round() / 8
    return (tokens(logits) * mask.unsqueeze(-1)).max(dim=1).values


class WholeNumbers(Vocabulary):
    """Logits that are multiples of 1/2, so that many are equal to a threshold."""

    def __init__(self, rectify):
        super().__init__(bias=False)
        with torch.no_grad():
            self.decoder.weight.copy_(self.decoder.weight.mul(8).round() / 2)
        self.rectify = rectify

    def forward(self, h, mask):
        return (self.rectify(self.decoder(h)) * mask.unsqueeze(-1)).max(dim=1).values


def _assigned(x):
    x = x.clone()
    x[x < 1.5] = 0
    return x


RECTIFIERS = {
    "multiplied_from_it_on": lambda x: x * (x >= 1.5),
    "multiplied_as_numbers": lambda x: x * (x >= 1.5).float(),
    "kept_from_it_on": lambda x: torch.where(x >= 1.5, x, 0.0),
    "filled_below_it": lambda x: x.masked_fill(x < 1.5, 0.0),
    "filled_not_from_it_on": lambda x: x.masked_fill(~(x >= 1.5), 0.0),
    "assigned_below_it": _assigned,
    "kept_beyond_it": lambda x: torch.where(x > 1.5, x, 0.0),
    "filled_up_to_it": lambda x: x.masked_fill(x <= 1.5, 0.0),
    "at_zero": lambda x: torch.where(x >= 0, x, 0.0),
}
for name, rectify in RECTIFIERS.items():

    def build(rectify=rectify):
        """A threshold that logits are equal to counts on the side where it was written."""
        return WholeNumbers(rectify), (hidden().detach().round().requires_grad_(), mask())

    build.__name__ = f"threshold_{name}"
    # Where all are 0 the maximum is at any of them, and not all have a gradient there.
    program(modes=INFER if name == "at_zero" else BOTH)(build)
