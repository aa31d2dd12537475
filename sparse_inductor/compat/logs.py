"""torch's counters and its structured trace."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from typing import Any

# Not "sparse" alone: the reason of a graph break inside a user's function sparsemax contains it.
_SPARSE = re.compile(r"sparse tensor|torch\.sparse|sparse_(coo|cs[rc]|bs[rc])", re.IGNORECASE)
# A graph that ends where it makes a sparse tensor. Compiled code that reads the tensor ends a graph of its own.
_MADE = "Attempted to wrap sparse Tensor with VariableTracker"


def count(name: str, by: int = 1) -> None:
    """Add to Inductor's counters, in which its own passes count their matches."""
    from torch._dynamo.utils import counters

    counters["inductor"][name] += by


def untraceable() -> Counter[str]:
    """Return the reasons why Dynamo ended a graph or skipped a frame in this process, with their counts."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return Counter()
    kinds = [dict(utils.counters[kind]) for kind in ("graph_break", "unimplemented")]
    return sum((Counter({str(what): n for what, n in kind.items()}) for kind in kinds), Counter())


def sparse_graph_breaks() -> int:
    """Return how often Dynamo could not trace the use of a torch.sparse tensor in this process."""
    reasons = untraceable().items()
    return sum(n for what, n in reasons if _SPARSE.search(what) and not what.startswith(_MADE))


def trace_artifact(name: str, payload: dict[str, Any]) -> None:
    """Put a JSON artifact into the structured trace (TORCH_TRACE), where tlparse shows it."""
    from torch._logging import trace_structured

    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "json"},
        payload_fn=lambda: json.dumps(payload, indent=2),
        expect_trace_id=False,
    )
