"""What a program is told: warnings that never end it, and errors in one line."""

from __future__ import annotations

import logging
import warnings

log = logging.getLogger("sparse_inductor")


def warn(message: str, category: type[Warning] = UserWarning, stacklevel: int = 1) -> None:
    """Warns the caller; where warnings are errors the message is logged, and the program goes on."""
    try:
        warnings.warn(message, category, stacklevel=stacklevel + 1)
    except category:
        log.warning("%s", message)


def described(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
