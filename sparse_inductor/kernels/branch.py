"""A second line of kernels beside the current stream."""

from __future__ import annotations

import contextlib
import functools

import torch

from .launch import note

__all__ = ["Branch"]


class Branch:
    """A second line of kernels, which begins where the current stream is now.

    Used as `with Branch(device) as branch`: the current stream goes on behind the block, which may end by an error,
    when all of the second line is done. So tensors that it reads and writes are allocated on the current stream and
    live as long as the block. On a CPU both lines are one.

    urgent: its kernels' blocks go in front of those of the current stream that do not run yet. second: it is not the
    line of another branch, urgent as this one, that has not ended.
    """

    def __init__(self, device: torch.device, urgent: bool = False, second: bool = False) -> None:
        self._main = self._side = None
        if device.type == "cuda":
            self._main = torch.cuda.current_stream(device)
            self._side = _side_stream(device, urgent, second)
            self.follow()

    def follow(self) -> None:
        """Have the second line go on when all is done that is on the current stream now."""
        if self._main is not None and self._side is not None:
            _wait(self._side, _record(self._main))

    def __enter__(self) -> Branch:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait(self.mark())

    def beside(self) -> contextlib.AbstractContextManager[object]:
        """What is launched within goes to the second line."""
        return contextlib.nullcontext() if self._side is None else torch.cuda.stream(self._side)

    def mark(self) -> torch.cuda.Event | None:
        """What was launched on the second line so far."""
        return None if self._side is None else _record(self._side)

    def wait(self, mark: torch.cuda.Event | None) -> None:
        """Have the stream that is current here, of one of the two lines, go on when that is done."""
        if self._main is not None and mark is not None:
            _wait(torch.cuda.current_stream(self._main.device), mark)


def _record(line: torch.cuda.Stream) -> torch.cuda.Event:
    event = line.record_event()
    note("record", line, event)
    return event


def _wait(line: torch.cuda.Stream, event: torch.cuda.Event) -> None:
    line.wait_event(event)
    note("wait", line, event)


@functools.cache
def _side_stream(device: torch.device, urgent: bool, second: bool) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-urgent)
