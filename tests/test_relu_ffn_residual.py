"""The residual to which a single token's block is added: when the operator adds it, and when it is left as written."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from support import compile_without_codegen, only, rewrites

K, N = 16, 48


class Layer(nn.Module):
    """A pre-norm transformer block; `end` combines the residual and the block's result."""

    def __init__(self, end):
        super().__init__()
        self.gate, self.up = nn.Linear(K, N, bias=False), nn.Linear(K, N, bias=False)
        self.down, self.end = nn.Linear(N, K), end

    def forward(self, x):
        h = F.layer_norm(x, (K,))
        return self.end(x, self.down(F.relu(self.gate(h)) * self.up(h)))


def written(x, y):
    y += x
    return y


def also_read(x, y):
    return x + y, y.amax()


def changed_before(x, y):
    x = x.clone()
    total = x + y
    return x.mul_(2), total


def changed_between(x, y):
    x = x * 1
    x.mul_(2)
    return x + y


TAKEN = {
    "residual first": lambda x, y: x + y,
    "residual last": lambda x, y: y + x,
    "torch.add": lambda x, y: torch.add(x, y),
    "method": lambda x, y: x.add(y),
    "then a norm": lambda x, y: F.layer_norm(x + y, (K,)),
    "changed in place before": changed_between,
    "changed in place after": changed_before,
}
LEFT = {
    "scaled": lambda x, y: torch.add(x, y, alpha=0.5),
    "a number": lambda x, y: y + 1.0,
    "twice itself": lambda x, y: y + y,
    "broadcast": lambda x, y: x[..., :1] + y,
    "spread": lambda x, y: x.expand(3, *x.shape[1:]) + y,
    "another dtype": lambda x, y: x.double() + y,
    "in place": written,
    "also read": also_read,
    "returned as it is": lambda x, y: y,
    "subtracted": lambda x, y: x - y,
}


def _noted(layer, x, training=False, **how):
    """Compare results with the layer's, and return whether the rewrite's note mentions the residual."""
    with torch.set_grad_enabled(training), only("relu_ffn") as report:
        got = compile_without_codegen(layer, **how)(x.clone())
        (rewrite,) = rewrites(report, "relu_ffn")
        torch.testing.assert_close(got, layer(x.clone()))
    return "residual" in rewrite.note


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("lead", [(1, 1), (1,)])
def test_taken(name, lead):
    torch.manual_seed(0)
    assert _noted(Layer(TAKEN[name]), torch.randn(*lead, K))


@pytest.mark.parametrize("name", LEFT)
def test_left(name):
    torch.manual_seed(0)
    assert not _noted(Layer(LEFT[name]), torch.randn(1, 1, K))


def test_not_of_several_tokens_nor_of_a_number_of_them_that_varies():
    layer, x = Layer(TAKEN["residual first"]), torch.randn(1, 3, K)
    assert not _noted(layer, x)
    assert not _noted(layer, x, dynamic=True)


def test_not_in_training():
    layer = Layer(TAKEN["residual first"])
    assert not _noted(layer, torch.randn(1, 1, K), training=True)


def test_two_blocks_of_one_sum_are_both_rewritten():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = (Layer(lambda x, y: y) for _ in range(2))

        def forward(self, x):
            return self.left(x) + self.right(x)

    two, x = Two(), torch.randn(1, 1, K)
    with torch.no_grad(), only("relu_ffn") as report:
        torch.testing.assert_close(compile_without_codegen(two)(x), two(x))
        assert len(rewrites(report, "relu_ffn")) == 2


def test_layers_in_a_row_hand_on_their_sums():
    layers = nn.Sequential(*(Layer(TAKEN["residual first"]) for _ in range(3)))
    x = torch.randn(1, 1, K)
    with torch.no_grad(), only("relu_ffn") as report:
        torch.testing.assert_close(compile_without_codegen(layers)(x), layers(x))
        assert ["residual" in r.note for r in rewrites(report, "relu_ffn")] == [True] * 3
