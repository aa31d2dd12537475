"""Messages to the program: warnings that never raise, and errors described in one line."""

from __future__ import annotations

import logging
import warnings

log = logging.getLogger("sparse_inductor")


def warn(message: str, category: type[Warning] = UserWarning, stacklevel: int = 1) -> None:
    """Warn the caller. If warnings are errors, log the message instead, so that the program continues."""
    try:
        warnings.warn(message, category, stacklevel=stacklevel + 1)
    except category:
        log.warning("%s", message)


def described(error: BaseException) -> str:
    """Describe an error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
