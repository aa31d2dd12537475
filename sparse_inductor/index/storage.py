"""Tensors in a safetensors file with a checksum each, written through a temporary file and read by memory map.

The container is the public safetensors format (8 bytes of header length, JSON header, data), so other tools can read
the tensors; the checksums and the format's name and version are in its metadata.
"""

from __future__ import annotations

import ctypes
import json
import os
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["IndexFileError", "read", "write"]

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LARGEST_HEADER = 100 << 20  # the format's own limit
_PART = 64 << 20  # bytes checked at a time


class IndexFileError(ValueError):
    """A file that cannot be loaded, and why."""


def write(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], kind: str, version: int, facts: Any
) -> None:
    """Write tensors (copied to the CPU one at a time) and JSON-able facts; the file appears only when complete."""
    # Wide elements first: every tensor is then aligned to its element size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {}
    sums: dict[str, str] = {}
    end = 0
    for name in order:
        t = tensors[name]
        size = t.numel() * t.element_size()
        header[name] = {
            "dtype": _NAMES[t.dtype],
            "shape": list(t.shape),
            "data_offsets": [end, end + size],
        }
        sums[name] = f"{_checksum(_on_cpu(t)):08x}"
        end += size
    header["__metadata__"] = {
        "format": kind,
        "version": str(version),
        "facts": json.dumps(facts),
        "crc32": json.dumps(sums),
    }
    header["__metadata__"]["header_crc32"] = _header_checksum(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    target = Path(path)
    handle, temporary = tempfile.mkstemp(
        dir=target.parent, prefix=target.name + ".", suffix=".part"
    )
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            for name in order:
                t = _on_cpu(tensors[name])
                if t.numel():
                    file.write(_bytes(t))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read(
    path: str | os.PathLike[str], kind: str, version: int, verify: bool = True
) -> tuple[dict[str, Tensor], Any]:
    """The tensors, memory-mapped (copy on write), and the facts. Without `verify` checksums are not looked at.

    Raises FileNotFoundError, and IndexFileError for a file of another kind or a newer version, a truncated or a
    changed one.
    """
    path = Path(path)
    size = path.stat().st_size
    header, start = _header(path, size, kind)
    metadata = header["__metadata__"]
    written_by = int(metadata["version"])
    if written_by > version:
        raise IndexFileError(
            f"{path} was written by a newer version (file format {written_by}, this one reads up to {version})"
        )
    del header["__metadata__"]
    needed = start + max((h["data_offsets"][1] for h in header.values()), default=0)
    if size != needed:
        what = "truncated" if size < needed else "longer than it says"
        raise IndexFileError(f"{path} is {what}: {size} bytes, {needed} expected")
    data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    sums = json.loads(metadata["crc32"])
    tensors = {}
    for name, h in header.items():
        low, high = h["data_offsets"]
        t = data[start + low : start + high]
        if verify and f"{_checksum(t):08x}" != sums[name]:
            raise IndexFileError(f"{path} is damaged: the checksum of {name!r} does not fit")
        dtype, shape = _DTYPES[h["dtype"]], h["shape"]
        tensors[name] = t.view(dtype).view(shape) if t.numel() else torch.empty(shape, dtype=dtype)
    return tensors, json.loads(metadata["facts"])


def _header(path: Path, size: int, kind: str) -> tuple[dict[str, Any], int]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little") if size >= 8 else -1
        if not 2 <= length <= _LARGEST_HEADER:
            raise IndexFileError(
                f"{path} is no {kind} file: it does not begin with a safetensors header"
            )
        text = file.read(length)
    if len(text) < length:
        # A foreign file also looks so: its first bytes are then no plausible start of a header.
        cut = text[:1] == b"{"
        why = f"truncated: its header of {length} bytes is cut off" if cut else f"no {kind} file"
        raise IndexFileError(f"{path} is {why}")
    try:
        header = json.loads(text)
        metadata = header.get("__metadata__", {})
        found = metadata.get("format")
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise IndexFileError(
            f"{path} is no {kind} file, or its header is damaged: it cannot be read"
        ) from None
    if found != kind:
        what = f"of the kind {found!r}" if found else "a safetensors file of something else"
        raise IndexFileError(f"{path} is no {kind} file: it is {what}")
    if metadata.pop("header_crc32", None) != _header_checksum(header):
        raise IndexFileError(f"{path} is damaged: the checksum of its header does not fit")
    return header, 8 + length


def _header_checksum(header: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(header, sort_keys=True).encode()):08x}"


def _on_cpu(t: Tensor) -> Tensor:
    return t.detach().cpu().contiguous()


def _bytes(t: Tensor) -> Any:
    return (ctypes.c_char * (t.numel() * t.element_size())).from_address(t.data_ptr())


def _checksum(t: Tensor) -> int:
    if not t.numel():
        return 0
    view, total = memoryview(_bytes(t)), 0
    for at in range(0, len(view), _PART):
        total = zlib.crc32(view[at : at + _PART], total)
    return total
