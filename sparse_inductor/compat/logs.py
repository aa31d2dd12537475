"""torch's counters and its structured trace."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

# Not "sparse" alone: a break inside a function of the user's called sparsemax names it.
_SPARSE = re.compile(r"sparse tensor|torch\.sparse|sparse_(coo|cs[rc]|bs[rc])", re.IGNORECASE)


def count(name: str, by: int = 1) -> None:
    """Add to Inductor's counters, where its own passes count their matches."""
    from torch._dynamo.utils import counters

    counters["inductor"][name] += by


def sparse_graph_breaks() -> int:
    """How often Dynamo has ended a graph, or left a whole frame alone, because of a torch.sparse tensor."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return 0
    kinds = [dict(utils.counters[kind]) for kind in ("graph_break", "unimplemented")]
    found = ((reason, times) for kind in kinds for reason, times in kind.items())
    return sum(times for reason, times in found if _SPARSE.search(str(reason)))


def trace_artifact(name: str, payload: dict[str, Any]) -> None:
    """Put a JSON artifact into the structured trace (TORCH_TRACE), where tlparse shows it."""
    from torch._logging import trace_structured

    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "json"},
        payload_fn=lambda: json.dumps(payload, indent=2),
        expect_trace_id=False,
    )
