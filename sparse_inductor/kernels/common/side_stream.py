"""A second stream beside the current one."""

from __future__ import annotations

import contextlib
import functools

import torch

from .launch import note_event


class SideStream:
    """A second stream, which begins where the current one is now.

    Used as `with SideStream(device) as side`: the current stream goes on behind the block, which may end by an error,
    when all of the second one is done. So tensors that are read and written there are allocated on the current stream
    and live as long as the block. On a CPU there is no second stream.

    urgent: blocks of its kernels are scheduled before those of the current stream that do not run yet.
    """

    def __init__(self, device: torch.device, urgent: bool = False) -> None:
        self._main = self._side = None
        if device.type == "cuda":
            self._main = torch.cuda.current_stream(device)
            self._side = _side_stream(device, urgent)
            _wait(self._side, _record(self._main))

    def __enter__(self) -> SideStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait(self.mark())

    def beside(self) -> contextlib.AbstractContextManager[object]:
        """What is launched within goes to the second stream."""
        return contextlib.nullcontext() if self._side is None else torch.cuda.stream(self._side)

    def mark(self) -> torch.cuda.Event | None:
        """What was launched on the second stream so far."""
        return None if self._side is None else _record(self._side)

    def wait(self, mark: torch.cuda.Event | None) -> None:
        """Have the stream that is current here, one of the two, go on when that is done."""
        if self._main is not None and mark is not None:
            _wait(torch.cuda.current_stream(self._main.device), mark)


def _record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = stream.record_event()
    note_event("record", stream, event)
    return event


def _wait(stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
    stream.wait_event(event)
    note_event("wait", stream, event)


@functools.cache
def _side_stream(device: torch.device, urgent: bool) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-urgent)
