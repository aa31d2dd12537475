"""Where NaN and infinity differ from the unrewritten program, on purpose: documented, and never silently wrong."""

from __future__ import annotations

import torch

from corpus.splade_head.registry import Vocabulary, hidden, tokens
from support import compile_without_codegen, only_splade_head, rewrites


def _compiled(module, *inputs):
    with only_splade_head() as report:
        result = compile_without_codegen(module)(*inputs)
        assert len(rewrites(report)) == 1
    return result


def test_a_handwritten_relu_leaves_a_poisoned_token_out():
    """where(x > 0, x, 0) turns NaN into 0, unlike relu."""

    class Model(Vocabulary):
        def forward(self, h):
            logits = self.decoder(h)
            return torch.log1p(torch.where(logits > 0, logits, 0.0)).amax(dim=1)

    states = hidden().detach()
    states[0, 2] = float("nan")
    module = Model()
    expected = module(states)
    assert expected.isfinite().all() and expected[0].any()
    torch.testing.assert_close(_compiled(module, states), expected)


def test_minus_infinity_times_its_sign_is_zero():
    """x * (x > 0) is NaN at -inf; here it is what the formula means, 0."""

    class Model(Vocabulary):
        def forward(self, h, forbid):
            logits = self.decoder(h) + forbid
            return torch.log1p(logits * (logits > 0)).amax(dim=1)

    forbid = torch.zeros(37).index_fill(0, torch.arange(4), float("-inf"))
    result = _compiled(Model(), hidden().detach(), forbid)
    assert (result[:, :4] == 0).all()
    assert result.isfinite().all()


def test_a_poisoned_token_poisons_banned_terms_too():
    """A term that is filled in the logits is one whose weight is 0: 0 times NaN is NaN, like the sequence's others."""

    class Model(Vocabulary):
        def forward(self, h):
            logits = self.decoder(h)
            logits[..., [0, 3]] = -1e4
            return tokens(logits).amax(dim=1)

    states = hidden().detach()
    states[0, 2] = float("nan")
    result = _compiled(Model(), states)
    assert result[0].isnan().all()
    assert (result[1:, [0, 3]] == 0).all() and result[1:].isfinite().all()
