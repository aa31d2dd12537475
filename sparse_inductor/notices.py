"""Messages to people: warnings that never raise, errors described in one line, numbers with their units."""

from __future__ import annotations

import logging
import warnings
from typing import Any

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


def count_text(what: Any, noun: str) -> str:
    """Return a number, or the size of a collection, with its noun: "2 rewrites"."""
    number = what if isinstance(what, int) else len(what)
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number} {noun if number == 1 else plural}"


def bytes_text(number: int) -> str:
    """Return a number of bytes in a suitable unit."""
    value = float(number)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return (
                f"{value:.0f} {unit}" if unit == "bytes" or value >= 100 else f"{value:.1f} {unit}"
            )
        value /= 1024
    return f"{value:.1f} TiB"
