"""Spellings of the SPLADE head that the recogniser's authors had not seen, and near misses.

`rewrite` means that a user would expect the rewrite and that it is exact: an elementwise program
with row masks over one vocabulary projection, then the maximum over the sequence, and no other
reader of the logits. `maybe` allows either decision, also for functions that are not monotone: an
operator that evaluates them per token is exact, one that takes the maximum first is not, and the
comparison of results shows which it is. `no_rewrite` means that the program is not a SPLADE head.
"""
