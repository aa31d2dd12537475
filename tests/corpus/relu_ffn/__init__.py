"""Spellings of the ReLU feed-forward block written before its recogniser, and near misses.

`rewrite` means that a user would be disappointed without it and that it is exact: two linear maps
with an activation between them that is zero for most inputs, and nothing else that reads it but a
sparsity statistic. `no_rewrite` is not such a block, or somebody needs the dense activations.
"""
