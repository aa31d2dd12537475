"""torch's counters and its structured trace."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from typing import Any

# Not "sparse" alone: the reason of a graph break inside a user's function sparsemax contains it.
_SPARSE = re.compile(r"sparse tensor|torch\.sparse|sparse_(coo|cs[rc]|bs[rc])", re.IGNORECASE)


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
    """Return how often Dynamo could not trace a torch.sparse tensor in this process."""
    return sum(times for what, times in untraceable().items() if _SPARSE.search(what))


def trace_artifact(name: str, payload: dict[str, Any]) -> None:
    """Put a JSON artifact into the structured trace (TORCH_TRACE), where tlparse shows it."""
    from torch._logging import trace_structured

    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "json"},
        payload_fn=lambda: json.dumps(payload, indent=2),
        expect_trace_id=False,
    )
