"""The ReLU feed-forward block."""
