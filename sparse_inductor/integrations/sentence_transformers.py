"""Removes the logits from the results of a sentence-transformers `SparseEncoder`, so that they need not exist.

    from sparse_inductor.integrations.sentence_transformers import drop_logits

    drop_logits(encoder)       # before its first compiled call
    encoder.compile()

The modules of a `SparseEncoder` pass a dict of features from one to the next, and the logits remain in it as
`token_embeddings`. A compiled encoder returns them and therefore has to materialise them, although
`SparseEncoder.encode` and `SpladeLoss` do not use them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["LOGITS", "drop_logits"]

LOGITS = "token_embeddings"


def drop_logits(encoder: nn.Module) -> Callable[[], None]:
    """Make the encoder return its features without the logits, and leave the dict of input features unmodified.

    Use it for training with `SpladeLoss` and for `encode`, but not with a custom loss or a forward hook that reads
    `features["token_embeddings"]`. It affects this object only, compiled or not, with or without `enable()`. Returns a
    function that undoes the change. Call both functions before the encoder is compiled.
    """
    own = vars(encoder).get("forward")  # set by another wrapper
    # An attribute is copied and pickled with the encoder. A forward hook would not help: logits that it removes are
    # still outputs of the compiled graph.
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
