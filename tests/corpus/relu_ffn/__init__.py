"""Spellings of the ReLU feed-forward block written before its recogniser, and near misses.

`rewrite` means that a user would expect the rewrite and that it is exact: two linear maps with an
activation between them that is zero for most inputs, and no other reader of the activations than a
sparsity statistic. `no_rewrite` means that the program is not such a block, or that it uses the
dense activations.
"""
