"""Safetensors files with a checksum for each tensor, replaced atomically and read by memory mapping.

The container is the public safetensors format (8 bytes of header length, JSON header, data), so other tools can read
the tensors. Its metadata hold the checksums, and the name and the version of the index format.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import math
import mmap
import os
import re
import secrets
import stat
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

try:
    import fcntl
except ImportError:  # without file locks, temporary files of killed processes are not removed
    fcntl = None  # type: ignore[assignment]

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LARGEST_HEADER = 100 << 20  # the limit of the safetensors format
_PART = 64 << 20  # bytes per checksum update


class IndexFileError(ValueError):
    """The error for a file that cannot be loaded; the message states the reason."""


# Writing


class PendingFile:
    """A complete temporary file in the folder of the file that it will replace.

    `commit` puts it in place atomically, so that a reader opens either the old file or the new one; `discard` removes
    it. As with `open(path, "w")`, a symbolic link is followed, an existing file keeps its mode and owner, and the mode
    of a new file follows the umask.
    """

    def __init__(self, path: str | os.PathLike[str], write: Callable[[BinaryIO], object]) -> None:
        """`write` writes the contents to the open file and leaves it open."""
        self._target = Path(os.path.realpath(path))
        old = _replaceable(self._target)
        _remove_abandoned(self._target)
        self._file, self._part = _create_part(self._target)
        try:
            if old is not None:
                os.chmod(self._part, stat.S_IMODE(old.st_mode))
                if hasattr(os, "chown"):
                    with contextlib.suppress(OSError):
                        os.chown(self._part, old.st_uid, old.st_gid)
            write(self._file)
            self._file.flush()
            os.fsync(self._file.fileno())
        except BaseException:
            self.discard()
            raise

    def commit(self) -> None:
        """Put the file in place."""
        try:
            os.replace(self._part, self._target)
        except BaseException:
            self.discard()
            raise
        self._file.close()
        _sync_folder(self._target.parent)

    def discard(self) -> None:
        """Remove the file."""
        self._part.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # on a full disk, flushing the buffers fails again
            self._file.close()


def _replaceable(target: Path) -> os.stat_result | None:
    """Return the status of the file that will be replaced, or None if there is none.

    Raises OSError if `open(target, "w")` would, or if the target is not a regular file.
    """
    try:
        old = os.stat(target)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(old.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    if not stat.S_ISREG(old.st_mode):
        raise OSError(errno.EINVAL, "an index can be written to a regular file only", str(target))
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target))
    return old


def _create_part(target: Path) -> tuple[BinaryIO, Path]:
    """Create a file in the target's folder, locked for as long as it is open."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    while True:
        part = target.with_name(f"{target.name}.{secrets.token_hex(4)}.part")
        try:
            file = os.fdopen(os.open(part, flags, 0o666), "wb")
        except FileExistsError:
            continue
        _lock(file.fileno(), wait=True)
        if _is_at(file.fileno(), part):
            return file, part
        file.close()  # another process removed it as abandoned before it was locked


def _remove_abandoned(target: Path) -> None:
    """Remove temporary files of processes that were killed while they saved to this target: their locks are free."""
    if fcntl is None:
        return
    name = re.compile(re.escape(target.name) + r"\.[a-z0-9_]{8}\.part")
    with contextlib.suppress(OSError):  # a folder that cannot be listed
        for entry in os.scandir(target.parent):
            if not name.fullmatch(entry.name):
                continue
            with contextlib.suppress(OSError):
                handle = os.open(entry.path, os.O_WRONLY)
                try:
                    if _lock(handle, wait=False) and _is_at(handle, Path(entry.path)):
                        os.unlink(entry.path)
                finally:
                    os.close(handle)


def _lock(handle: int, wait: bool) -> bool:
    """Lock an open file. Returns False if it cannot be locked; some network file systems do not support locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def _is_at(handle: int, path: Path) -> bool:
    """Whether the path still refers to the open file."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _sync_folder(folder: Path) -> None:
    """Make a new name durable across a power failure, if the system can synchronise folders."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_tensors(
    file: BinaryIO,
    tensors: Mapping[str, Tensor],
    kind: str,
    version: int,
    facts: Any,
    seen: Callable[[int], object],
) -> None:
    """Write tensors, copied to the CPU one at a time, and facts, which JSON must support. `seen` is called with the
    number of bytes of each tensor written."""
    # Tensors with wide elements come first, so that every tensor is aligned to its element size.
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
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for name in order:
        t = _on_cpu(tensors[name])
        if t.numel():
            file.write(_bytes(t))
            seen(t.numel() * t.element_size())


# Reading


def read(
    path: str | os.PathLike[str], kind: str, version: int, verify: bool = True
) -> tuple[dict[str, Tensor], Any]:
    """Return the tensors, memory-mapped (copy on write), and the facts. `verify=False` skips the checksums of tensors.

    The file is opened once: if another process replaces it meanwhile, the old file is read to the end.

    Raises FileNotFoundError, and IndexFileError for a file that is of another kind or a newer version, truncated or
    modified.
    """
    path = Path(path)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        header, start = _header(file, path, size, kind)
        metadata = header.pop("__metadata__")
        written_by = int(metadata["version"])
        if written_by > version:
            raise IndexFileError(
                f"{path} was written by a newer version (file format {written_by}, this one reads up to {version})"
            )
        needed = start + max((h["data_offsets"][1] for h in header.values()), default=0)
        if size != needed:
            what = "truncated" if size < needed else "longer than it says"
            raise IndexFileError(f"{path} is {what}: {size} bytes, {needed} expected")
        mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    data = torch.frombuffer(mapped, dtype=torch.uint8)
    sums = json.loads(metadata["crc32"])
    tensors = {}
    for name, h in header.items():
        dtype, shape = _DTYPES.get(h["dtype"]), h["shape"]
        low, high = h["data_offsets"]
        if (
            dtype is None
            or not 0 <= low <= high
            or high - low != math.prod(shape) * dtype.itemsize
            or (start + low) % dtype.itemsize
        ):
            raise IndexFileError(f"{path} is damaged: its header describes {name!r} as {h}")
        t = data[start + low : start + high]
        if verify and f"{_checksum(t):08x}" != sums.get(name):
            raise IndexFileError(f"{path} is damaged: the checksum of {name!r} does not match")
        tensors[name] = (
            t.view(dtype).view(shape)
            if t.numel()
            else torch.empty(shape, dtype=dtype, device="cpu")
        )
    return tensors, json.loads(metadata["facts"])


def _header(file: BinaryIO, path: Path, size: int, kind: str) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(file.read(8), "little") if size >= 8 else -1
    if not 2 <= length <= _LARGEST_HEADER:
        raise IndexFileError(
            f"{path} is not a {kind} file: it does not begin with a safetensors header"
        )
    text = file.read(length)
    if len(text) < length:
        # A file of another format may also be shorter than its first 8 bytes imply; its text does not start like JSON.
        cut = text[:1] == b"{"
        why = f"truncated: its header of {length} bytes is cut off" if cut else f"not a {kind} file"
        raise IndexFileError(f"{path} is {why}")
    try:
        header = json.loads(text)
        metadata = header.get("__metadata__", {})
        found = metadata.get("format")
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise IndexFileError(
            f"{path} is not a {kind} file, or its header is damaged: it cannot be read"
        ) from None
    if found != kind:
        what = f"of the kind {found!r}" if found else "a safetensors file of something else"
        raise IndexFileError(f"{path} is not a {kind} file: it is {what}")
    if metadata.pop("header_crc32", None) != _header_checksum(header):
        raise IndexFileError(f"{path} is damaged: the checksum of its header does not match")
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
