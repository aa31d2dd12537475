"""What operations have in common, for every pattern: which copy, which move axes, which take a part, which compare.

The names are the canonical ones of `names`. A new spelling of something that is here is an alias there; a new kind of
copy or view is a name in one of these sets, and every family follows it.
"""

from __future__ import annotations

# The argument's own values in its dtype, with its gradient.
COPIES = frozenset("contiguous clone alias lift_fresh positive".split())

# All elements, each once: their axes in another order (`shapes.order_of` says which) ...
REORDERS = frozenset("permute transpose movedim T mT t".split())
# ... or other axes of the same elements in the same order.
REGROUPS = frozenset("view view_as flatten unflatten unsqueeze squeeze".split())
SPREADS = frozenset("expand expand_as".split())
# Some of the elements; a getitem may also be one of the results of what takes a tensor apart.
PICKS = frozenset("narrow select slice index_select getitem".split())
PARTS = frozenset("split chunk tensor_split unbind".split())

VIEWS = REORDERS | REGROUPS | SPREADS | {"getitem"}
SHAPE_OPS = REORDERS | REGROUPS | SPREADS | PICKS

COMPARISONS = frozenset("gt ge lt le".split())
NEGATIONS = frozenset("invert logical_not".split())
