"""Classes of operations, shared by all patterns: copies, views that move axes, selections of a part, comparisons.

The names are the canonical ones of `names`. To add a spelling of a function in these sets, add an alias there. To add a
new kind of copy or view, add its name to one of these sets: every pattern then follows it.
"""

from __future__ import annotations

# The result has the values and dtype of the argument, and passes its gradient on.
COPIES = frozenset("contiguous clone alias lift_fresh positive".split())

# The result has the same values, perhaps rounded or cut off from the gradient.
SAME_VALUES = COPIES | {"cast", "detach"}

# All elements, each once: their axes in another order (`shapes.order_of` says which) ...
REORDERS = frozenset("permute transpose movedim T mT t".split())
# ... or other axes of the same elements in the same order.
REGROUPS = frozenset("view view_as flatten unflatten unsqueeze squeeze".split())
SPREADS = frozenset("expand expand_as".split())
# Some of the elements. A getitem may also select one result of a call that splits a tensor.
PICKS = frozenset("narrow select slice index_select getitem".split())
PARTS = frozenset("split chunk tensor_split unbind".split())

VIEWS = REORDERS | REGROUPS | SPREADS | {"getitem"}
SHAPE_OPS = REORDERS | REGROUPS | SPREADS | PICKS

COMPARISONS = frozenset("gt ge lt le".split())
NEGATIONS = frozenset("invert logical_not".split())
