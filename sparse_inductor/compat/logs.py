"""torch's counters and its structured trace."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from typing import Any

# Not "sparse" alone: a break inside a function of the user's called sparsemax names it.
_SPARSE = re.compile(r"sparse tensor|torch\.sparse|sparse_(coo|cs[rc]|bs[rc])", re.IGNORECASE)


def count(name: str, by: int = 1) -> None:
    """Add to Inductor's counters, where its own passes count their matches."""
    from torch._dynamo.utils import counters

    counters["inductor"][name] += by


def untraceable() -> Counter[str]:
    """What Dynamo could not trace in this process, and how often: it ended a graph there, or left the frame alone."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return Counter()
    kinds = [dict(utils.counters[kind]) for kind in ("graph_break", "unimplemented")]
    return sum((Counter({str(what): n for what, n in kind.items()}) for kind in kinds), Counter())


def sparse_graph_breaks() -> int:
    """How often Dynamo could not trace a torch.sparse tensor in this process."""
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
