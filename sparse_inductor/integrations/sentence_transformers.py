"""Lets one sentence-transformers `SparseEncoder` keep its logits to itself.

    from sparse_inductor.integrations.sentence_transformers import drop_logits

    drop_logits(encoder)       # before its first compiled call
    encoder.compile()

The modules of a `SparseEncoder` hand a dict from one to the next, and the logits stay in it as `token_embeddings`: a
compiled encoder returns them, so they have to exist. `SparseEncoder.encode` and `SpladeLoss` never look at them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["LOGITS", "drop_logits"]

LOGITS = "token_embeddings"


def drop_logits(encoder: nn.Module) -> Callable[[], None]:
    """Has the encoder return its features without the logits, and not write into the features that it is given.

    For whoever trains with `SpladeLoss` or calls `encode`; a loss of your own that reads
    `features["token_embeddings"]`, or a forward hook that does, needs the logits. It concerns this one object, compiled
    or not, and works with and without `enable()`. The function that it returns takes it back; like this one, it has to
    be called before the encoder is compiled.
    """
    own = vars(encoder).get("forward")  # another wrapper's
    # As an attribute, which is copied and pickled with the encoder; what a forward hook takes out of
    # the features still leaves the compiled graph.
    wrapped = functools.partial(_forward, encoder, own)
    encoder.forward = wrapped

    def undo() -> None:
        if vars(encoder).get("forward") is wrapped:
            del encoder.forward
            if own is not None:
                encoder.forward = own

    return undo


def _forward(
    encoder: nn.Module, own: Callable[..., Any] | None, features: dict[str, Any], **kwargs: Any
) -> dict[str, Any]:
    forward = functools.partial(type(encoder).forward, encoder) if own is None else own
    found = forward(dict(features), **kwargs)
    return {name: value for name, value in found.items() if name != LOGITS}
