"""Spellings of the SPLADE head that the recogniser's authors had not seen, and near misses.

`rewrite` means that a user of this library would be disappointed without the rewrite, and that it
is exact: an elementwise program with row masks over one vocabulary projection, then the maximum
over the sequence, and nothing else that reads the logits. `maybe` leaves the decision open, for
functions that are not monotone too: an operator that evaluates them per token is exact, one that
takes the maximum first is not, and the numbers tell. `no_rewrite` has no such program.
"""
