"""Runs PTX on a CPU, a warp at a time: inline assembly, which Triton's interpreter does not run, and a block of a whole
kernel as Triton compiled it.

Instructions are those that the kernels here use. Between barriers a block's warps take turns at random, at every
access to memory; a branch that not all lanes of a warp take, an address outside the memory there is, or one that is not
aligned, is an error. Registers hold garbage at first.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

__all__ = ["Memory", "block", "kernel"]

_LOW = np.uint64(0xFFFFFFFF)
_LANES = np.arange(32, dtype=np.uint64)
# What a warp says before it goes on, and how many accesses a turn may last: one warp may be far ahead of another.
_ACCESS, _BARRIER, _DONE = "access", "barrier", "done"
_ACCESSES = (1, 4, 40)


_Program = list[tuple[list[str], list[str], str]]


class Memory:
    """Arrays at addresses."""

    def __init__(self) -> None:
        self._arrays: list[tuple[int, np.ndarray]] = []
        self._late: list[tuple[np.ndarray, np.ndarray]] = []

    def late(self, *arrays: np.ndarray) -> None:
        """What the kernel in front has not written before this one waits for it: garbage till then."""
        self._late += [(a, a.copy()) for a in arrays]
        for a in arrays:
            a.view(np.uint8)[...] = 0xCD

    def wait(self) -> None:
        while self._late:
            array, written = self._late.pop()
            array[...] = written

    def add(self, address: int, array: np.ndarray) -> int:
        self._arrays.append((address, array.view(np.uint8).reshape(-1)))
        return address

    def at(self, address: int, size: int) -> np.ndarray:
        """The bytes there, to read and to write."""
        for base, array in self._arrays:
            if base <= address and address + size <= base + len(array):
                return array[address - base : address - base + size]
        raise IndexError(f"no memory at {address:#x}")

    def load(self, address: int, size: int) -> int:
        return int.from_bytes(self.at(address, size).tobytes(), "little")

    def store(self, address: int, size: int, value: int) -> None:
        part = value & ((1 << 8 * size) - 1)
        self.at(address, size)[:] = np.frombuffer(part.to_bytes(size, "little"), np.uint8)


def block(
    code: str,
    inputs: Sequence[int],
    shared: Memory,
    memory: Memory,
    warps: int = 8,
    dynamic: int = 0,
) -> None:
    """Run inline assembly whose $1, $2, ... are the inputs, as a block of `warps`; `global_smem` is at `dynamic`."""
    values = {f"${i + 1}": v for i, v in enumerate(inputs)} | {"global_smem": dynamic}
    at = 1 << 30
    for name, size in re.findall(r"\.shared [^;]*?(\w+)(?:\[(\d+)\])?;", code):
        values[name] = shared.add(at, np.full(int(size or 8), 0xAB, np.uint8))
        at += 1 << 20
    for _ in _turns(*_parsed(code), values, shared, memory, warps, random.Random(0)):
        pass


def kernel(
    code: str, parameters: Sequence[int], grid: tuple[int, int], dynamic: int, memory: Memory, warps: int = 8,
    at_once: int = 1, seed: int = 0,
) -> None:  # fmt: skip
    """Run a compiled kernel, `at_once` blocks of the grid at a time, with as many bytes of shared memory besides those
    it declares as are `dynamic`."""
    program, labels, declared = _parsed_kernel(code)
    chance = random.Random(seed)
    entry = re.search(r"\.entry (\w+)", code)[1]
    values = {f"{entry}_param_{i}": v for i, v in enumerate(parameters)}
    values |= {"%nctaid.x": grid[0], "%nctaid.y": grid[1]}

    def start(x: int, y: int) -> Iterator[None]:
        shared, at, names = Memory(), 1 << 10, {}
        for name, size in {**declared, "global_smem": dynamic}.items():
            names[name] = shared.add(at, np.full(size, 0xAB, np.uint8))
            at += -(-size // 1024) * 1024
        here = {**values, **names, "%ctaid.x": x, "%ctaid.y": y}
        return _turns(program, labels, here, shared, memory, warps, chance)

    waiting = [(x, y) for y in range(grid[1]) for x in range(grid[0])]
    running: list[Iterator[None]] = []
    while waiting or running:
        while waiting and len(running) < at_once:
            running.append(start(*waiting.pop(0)))
        mine = chance.choice(running)
        if next(mine, _DONE) is _DONE:
            running.remove(mine)


def _turns(
    program: _Program, labels: dict[str, int], values: dict[str, int], shared: Memory, memory: Memory, warps: int,
    chance: random.Random,
) -> Iterator[None]:  # fmt: skip
    """Run a block, a turn of one of its warps at a time."""
    waiting = [_Warp(w, values, shared, memory).run(program, labels) for w in range(warps)]
    while waiting:
        running, waiting = waiting, []
        while running:
            warp = chance.choice(running)
            for _ in range(chance.choice(_ACCESSES)):
                said = next(warp, _DONE)
                if said != _ACCESS:
                    running.remove(warp)
                    waiting += [warp] * (said == _BARRIER)
                    break
            yield


def _parsed_kernel(code: str) -> tuple[_Program, dict[str, int], dict[str, int]]:
    """Instructions and labels of a kernel's body, and the shared memory it declares: names within braces of their own
    are made different from all others."""
    text = re.sub(r"//[^\n]*|^\s*\.(loc|pragma)[^\n]*", "", code, flags=re.M)
    declared = {n: int(s) for n, s in re.findall(r"\.shared .*?(\w+)\[(\d+)\];", text)}
    at = text.index("{", text.index(".entry"))
    body, scopes, opened = [], [0], 0
    while scopes:
        rest = text[at:].lstrip()
        at = len(text) - len(rest)
        if rest[0] in "{}":
            at += 1
            if rest[0] == "}":
                scopes.pop()
            else:
                opened += 1
                scopes.append(opened)
            if len(scopes) == 1:
                break
            continue
        label = re.match(r"[\w$]+:", rest)
        statement = label[0] if label else rest[: rest.index(";") + 1]
        at += len(statement)
        if statement.startswith("."):
            continue
        if len(scopes) > 2:
            head, _, operands = re.sub(
                r"^@(!?)(\w+)\s+", rf"@\1\2~{scopes[-1]}^", statement
            ).partition(" ")
            local = lambda m: m[0] if m[0] in declared else f"{m[0]}~{scopes[-1]}"
            operands = re.sub(r"(?<![%\w.$])[A-Za-z_]\w*", local, operands)
            statement = (
                f"{head.replace('^', ' ')} {operands}"
                if operands
                else head.replace(":", f"~{scopes[-1]}:")
            )
        body.append(statement)
    program, labels = _parsed("{" + "\n".join(body) + "}")
    return program, labels, declared


def _parsed(code: str) -> tuple[_Program, dict[str, int]]:
    """Instructions as (parts of the name, operands, predicate), and where labels are."""
    body = re.sub(r"\.(reg|shared) [^;]*;", "", code.strip()[1:-1]).replace("\n", " ")
    program: _Program = []
    labels: dict[str, int] = {}
    for statement in body.split(";"):
        rest = statement.strip()
        while (label := re.match(r"([A-Z$][\w$~]*):\s*", rest)) is not None:
            labels[label[1]] = len(program)
            rest = rest[label.end() :]
        if not rest:
            continue
        predicate = ""
        if (guard := re.match(r"@(!?[%\w~]+)\s+", rest)) is not None:
            predicate, rest = guard[1], rest[guard.end() :]
        name, _, operands = rest.partition(" ")
        program.append(
            (name.split("."), re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", operands), predicate)
        )
    return program, labels


def _signed(x: np.ndarray, bits: int = 32) -> np.ndarray:
    if bits == 64:
        return np.ascontiguousarray(x).view(np.int64)
    return (x & _LOW).astype(np.uint32).view(np.int32).astype(np.int64)


def _single(x: np.ndarray) -> np.ndarray:
    return (x & _LOW).astype(np.uint32).view(np.float32)


def _bits_of(x: np.ndarray) -> np.ndarray:
    """Of fp32 or fp64."""
    kind = np.uint32 if x.dtype == np.float32 else np.uint64
    return x.view(kind).astype(np.uint64)


def _halves(kind: str, x: np.ndarray) -> np.ndarray:
    """The bits of fp32 numbers rounded to 16."""
    if kind[0] == "f":
        return _single(x).astype(np.float16).view(np.uint16).astype(np.uint64)
    low = (x & _LOW) >> np.uint64(16) & np.uint64(1)
    return ((x & _LOW) + np.uint64(0x7FFF) + low & _LOW) >> np.uint64(16)


def _transposed(x: np.ndarray) -> np.ndarray:
    """Of 8 x 8 16-bit elements, two a lane."""
    halves = (x & _LOW).astype(np.uint32).view(np.uint16).reshape(8, 8)
    return np.ascontiguousarray(halves.T).view(np.uint32).reshape(32).astype(np.uint64)


def _looked_up(x: np.ndarray, y: np.ndarray, z: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Bits of three words by the table of their eight values."""
    found = np.zeros_like(x)
    for i in np.flatnonzero([int(table[0]) >> i & 1 for i in range(8)]):
        a, b, c = (v if i >> k & 1 else ~v for v, k in ((x, 2), (y, 1), (z, 0)))
        found |= a & b & c
    return found


def _each(function: Any, x: np.ndarray) -> np.ndarray:
    return np.array([function(int(v)) for v in x], dtype=np.uint64)


class _Warp:
    def __init__(self, number: int, values: dict[str, int], shared: Memory, memory: Memory) -> None:
        self.shared, self.memory = shared, memory
        self.values = {n: np.full(32, v & (2**64 - 1), np.uint64) for n, v in values.items()}
        self.values["%laneid"] = _LANES
        self.values["%tid.x"] = _LANES + np.uint64(32 * number)
        self.values["%lanemask_lt"] = (np.uint64(1) << _LANES) - np.uint64(1)

    def value(self, operand: str) -> np.ndarray:
        if operand in self.values:
            return self.values[operand]
        base = 16 if operand[:2] in ("0f", "0d", "0F", "0D") else 0
        number = int(operand[2:] if base else operand.rstrip("U"), base)
        return np.full(32, number & (2**64 - 1), np.uint64)

    def set(self, register: str, value: Any, active: np.ndarray, bits: int = 32) -> None:
        new = np.asarray(value)
        new = new.astype(np.int64).view(np.uint64) if new.dtype.kind == "i" else new
        new = new.astype(np.uint64) & (_LOW if bits == 32 else ~np.uint64(0))
        before = self.values.get(register, np.full(32, 0xDEADBEEF, np.uint64))
        self.values[register] = np.where(active, new, before)

    def run(self, program: Any, labels: dict[str, int]) -> Iterator[str]:
        at = 0
        while at < len(program):
            (name, operands, predicate) = program[at]
            at += 1
            active = np.ones(32, bool)
            if predicate:
                active = self.values[predicate.lstrip("!")].astype(bool) ^ (predicate[0] == "!")
            if name[0] == "bra":
                assert active.all() or not active.any(), f"lanes part at {operands[0]}"
                at = labels[operands[0]] if active.all() else at
            elif name[0] == "ret":
                return
            elif name[0] == "griddepcontrol":
                if name[1] == "wait":
                    self.memory.wait()
            elif name[0] == "membar":  # memory is one
                pass
            elif name[0] == "bar":
                if name[1] == "sync":  # lanes of a warp are in step
                    yield _BARRIER
            elif name[:2] == ["ld", "param"]:
                self.set(operands[0], self.value(operands[1].strip("[]")), active, 64)
            elif name[0] in ("ldmatrix", "stmatrix"):
                yield _ACCESS
                self.matrices(name, operands)
            elif name[0] in ("ld", "st", "red", "atom"):
                yield _ACCESS
                self.access(name, operands, active)
            elif name[0] in ("shfl", "vote", "match", "redux"):
                self.exchange(name, operands, active)
            elif name[0] == "mma":
                self.multiply(name, operands)
            elif name[0] == "mov" and "{" in "".join(operands):
                self.split_or_join(operands, active)
            else:
                self.compute(name, operands, active)

    def access(self, name: list[str], operands: list[str], active: np.ndarray) -> None:
        memory = self.shared if name[1].startswith("shared") else self.memory  # or shared::cta
        size = int(name[-1][1:]) // 8
        place, register = operands[0], operands[-1]
        if name[0] in ("ld", "atom"):
            place, register = operands[1], operands[0]
        base, _, offset = place[1:-1].partition("+")
        addresses = [int(x) + int(offset or 0) for x in self.value(base.strip())]
        registers = [r.strip() for r in register.strip("{}").split(",")]
        found = [np.zeros(32, np.uint64) for _ in registers]
        for lane in np.flatnonzero(active):
            address = addresses[lane]
            assert address % (size * len(registers)) == 0, f"{'.'.join(name)} of {address:#x}"
            for i, r in enumerate(registers):
                there = address + size * i
                if name[0] in ("ld", "atom"):
                    found[i][lane] = memory.load(there, size)
                if name[0] == "atom":
                    old, new = int(found[i][lane]), int(self.value(operands[2])[lane])
                    memory.store(there, size, max(old, new) if name[-2] == "max" else old + new)
                if name[0] in ("st", "red"):
                    new = int(self.value(r)[lane])
                    if name[0] == "red":
                        old = memory.load(there, size)
                        new = new + old if name[-2] == "add" else new | old
                    memory.store(there, size, new)
        if name[0] in ("ld", "atom"):
            for r, new in zip(registers, found, strict=True):
                self.set(r, new, active, 64)

    def matrices(self, name: list[str], operands: list[str]) -> None:
        """8 x 8 of 16 bits each: a lane has two elements of a row of each, another the row's address."""
        registers, place = operands if name[0] == "ldmatrix" else operands[::-1]
        base, _, offset = place[1:-1].partition("+")
        for i, r in enumerate(registers.strip("{} ").split(",")):
            rows = [int(a) + int(offset or 0) for a in self.value(base.strip())[8 * i : 8 * i + 8]]
            assert all(a % 16 == 0 for a in rows), f"{'.'.join(name)} of {rows}"
            at = [(rows[lane // 4] + 4 * (lane % 4)) for lane in range(32)]
            if name[0] == "ldmatrix":
                found = np.array([self.shared.load(a, 4) for a in at], np.uint64)
                found = _transposed(found) if "trans" in name else found
                self.set(r.strip(), found, np.ones(32, bool))
            else:
                for a, x in zip(at, self.value(r.strip()), strict=True):
                    self.shared.store(a, 4, int(x))

    def multiply(self, name: list[str], operands: list[str]) -> None:
        """mma.m16n8k16: where the 16-bit elements of a lane's registers, and its sums, are in the matrices."""
        assert name[3:6] == ["m16n8k16", "row", "col"]
        each = [r.strip("{} ").split(", ") for r in operands]
        row, q = np.divmod(np.arange(32), 4)
        a, b, c = np.zeros((16, 16), "f4"), np.zeros((16, 8), "f4"), np.zeros((16, 8), "f4")

        def halves(register: str) -> list[np.ndarray]:
            bits = self.value(register)
            parts = [(bits >> np.uint64(16 * i)).astype(np.uint16) for i in range(2)]
            if name[-2] == "f16":
                return [p.view(np.float16).astype("f4") for p in parts]
            return [(p.astype(np.uint32) << 16).view(np.float32) for p in parts]

        for i, r in enumerate(each[1]):
            for j, half in enumerate(halves(r)):
                a[row + i % 2 * 8, 2 * q + i // 2 * 8 + j] = half
        for i, r in enumerate(each[2]):
            for j, half in enumerate(halves(r)):
                b[2 * q + 8 * i + j, row] = half
        for i, r in enumerate(each[3]):
            c[row + i // 2 * 8, 2 * q + i % 2] = _single(self.value(r))
        total = a @ b + c
        for i, r in enumerate(each[0]):
            found = _bits_of(np.ascontiguousarray(total[row + i // 2 * 8, 2 * q + i % 2]))
            self.set(r, found, np.ones(32, bool))

    def exchange(self, name: list[str], operands: list[str], active: np.ndarray) -> None:
        target, x = operands[0], self.value(operands[1])
        if name[0] == "shfl":
            n = self.value(operands[2]).astype(int)
            lanes = np.arange(32)
            source = {"bfly": lanes ^ n, "idx": n & 31, "up": lanes - n}[name[2]]
            inside = source >= 0
            target, _, whether = target.partition("|")
            self.set(target, np.where(inside, x[source], x), active)
            if whether:
                self.set(whether, inside.astype(np.uint64), active)
        elif name[0] == "vote":
            said = x.astype(bool) & active
            ballot = sum(1 << i for i in range(32) if said[i])
            self.set(target, np.full(32, int(said.any()) if name[2] == "any" else ballot), active)
        elif name[0] == "match":
            self.set(target, [sum(1 << j for j in range(32) if x[j] == v) for v in x], active)
        else:
            found = getattr(_signed(x), {"add": "sum"}.get(name[2], name[2]))()
            self.set(target, np.full(32, found), active)

    def split_or_join(self, operands: list[str], active: np.ndarray) -> None:
        target, given = operands
        if target[0] == "{":
            low, high = (r.strip() for r in target[1:-1].split(","))
            self.set(low, self.value(given), active)
            self.set(high, self.value(given) >> np.uint64(32), active)
        else:
            low, high = (self.value(r.strip()) & _LOW for r in given[1:-1].split(","))
            self.set(target, low | (high << np.uint64(32)), active, 64)

    def compute(self, name: list[str], operands: list[str], active: np.ndarray) -> None:
        kind = name[-1]
        bits = 64 if kind.endswith("64") else 32
        target = operands[0]
        if name[0] == "setp":
            self.compare(name, operands, active)
            return
        if name[0] == "selp":
            chosen = self.value(operands[3]).astype(bool)
            picked = np.where(chosen, self.value(operands[1]), self.value(operands[2]))
            self.set(target, picked, active, bits)
            return
        if name[0] == "lop3":
            self.set(target, _looked_up(*(self.value(o) for o in operands[1:])), active)
            return
        x, y, z = ([self.value(o) for o in operands[1:]] + [_LANES] * 3)[:3]
        if kind in ("f32", "f64") and name[0] in ("add", "sub", "mul", "fma"):
            a, b, c = ((_single(v) if kind == "f32" else v.view(np.float64)) for v in (x, y, z))
            with np.errstate(invalid="ignore"):
                done = {"add": a + b, "sub": a - b, "mul": a * b, "fma": a * b + c}[name[0]]
            self.set(target, _bits_of(done), active, bits)
            return
        if name[0] == "cvt":
            bits = 64 if name[-2].endswith("64") else 32
        if name[1:2] == ["wide"]:
            bits = 64
        self.set(target, self.integer(name, x, y, z), active, bits)

    def integer(self, name: list[str], x: Any, y: Any, z: Any) -> Any:
        kind = name[-1]
        bits = 64 if kind.endswith("64") else 32
        amount = np.minimum(y & _LOW, np.uint64(63))
        within = (y & _LOW) < bits
        match name[0]:
            case "mov":
                return x
            case "add":
                return x + y
            case "sub":
                return x - y
            case "mul" | "mad":
                if name[1] == "wide":
                    x, y = (
                        _signed(v).view(np.uint64) if kind == "s32" else v & _LOW for v in (x, y)
                    )
                return x * y + (z if name[0] == "mad" else np.uint64(0))
            case "div":
                x, y = _signed(x), _signed(y)
                return np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y))
            case "rem":
                return (x & _LOW) % (y & _LOW)
            case "bfe":
                return (x & _LOW) >> y & ((np.uint64(1) << z) - np.uint64(1))
            case "set":  # which halves of x are not those of y, of 16-bit numbers
                assert name[1:3] == ["neu", "u32"] and not y.any()
                magnitude = np.uint64(0x7FFF7FFF)
                return sum(
                    np.where(x & magnitude & m != 0, m, np.uint64(0))
                    for m in (np.uint64(0xFFFF), np.uint64(0xFFFF0000))
                )
            case "and":
                return x & y
            case "or":
                return x | y
            case "xor":
                return x ^ y
            case "neg":
                return np.uint64(0) - x
            case "not":
                return x ^ np.uint64(1) if kind == "pred" else ~x
            case "max" | "min":
                read = (
                    (lambda v: _signed(v, int(kind[1:])))
                    if kind[0] == "s"
                    else (lambda v: v & _LOW)
                )
                return (np.maximum if name[0] == "max" else np.minimum)(read(x), read(y))
            case "shl":
                return np.where(within, x << amount, np.uint64(0))
            case "shr":
                if kind[0] == "s":
                    return _signed(x, bits) >> np.minimum(y & _LOW, bits - 1).astype(np.int64)
                return np.where(within, (x if bits == 64 else x & _LOW) >> amount, np.uint64(0))
            case "prmt":
                both = (y << np.uint64(32)) | (x & _LOW)
                nibble = [(z >> np.uint64(4 * i)) & np.uint64(15) for i in range(4)]
                byte = [
                    (both >> ((n & np.uint64(7)) * np.uint64(8))) & np.uint64(255) for n in nibble
                ]
                sign = [(b >> np.uint64(7)) * np.uint64(255) for b in byte]
                byte = [np.where(n > 7, s, b) for n, s, b in zip(nibble, sign, byte)]
                return sum(b << np.uint64(8 * i) for i, b in enumerate(byte))
            case "shf":
                assert name[1:3] == ["r", "wrap"]
                return (((y & _LOW) << np.uint64(32)) | (x & _LOW)) >> (z & np.uint64(31))
            case "bmsk":
                low, wide = (np.minimum(v & _LOW, np.uint64(32)) for v in (x, y))
                return ((np.uint64(1) << wide) - np.uint64(1)) << low
            case "dp4a":
                byte = [(v >> np.uint64(8 * i)) & np.uint64(255) for v in (x, y) for i in range(4)]
                return z + sum(byte[i] * byte[4 + i] for i in range(4))
            case "bfind":
                return _each(lambda v: v.bit_length() - 1 if v else 0xFFFFFFFF, x & _LOW)
            case "popc":
                return _each(int.bit_count, x & _LOW)
            case "brev":
                return _each(lambda v: int(f"{v:032b}"[::-1], 2), x & _LOW)
            case "clz":
                return _each(lambda v: bits - v.bit_length(), x if bits == 64 else x & _LOW)
            case "cvt" if name[-2] in ("f16x2", "bf16x2"):
                return _halves(name[-2], x) << np.uint64(16) | _halves(name[-2], y)
            case "cvt":
                return self.converted(name[-2], kind, x)
        raise NotImplementedError(".".join(name))

    @staticmethod
    def converted(to: str, kind: str, x: np.ndarray) -> np.ndarray:
        if kind == "bf16":
            return (x & np.uint64(0xFFFF)) << np.uint64(16)
        if kind == "f16":
            return _bits_of((x & np.uint64(0xFFFF)).astype(np.uint16).view(np.float16).astype("f4"))
        if to == "f64":
            return _bits_of(_single(x).astype(np.float64))
        if kind == "f64":
            return _bits_of(x.view(np.float64).astype(np.float32))
        if to == "f32" and kind == "s64":
            return _bits_of(_signed(x, 64).astype(np.float32))
        if to == "f32":
            return _bits_of((x & _LOW).astype(np.float32))
        if to == "s64":
            return _signed(x)
        return x & np.uint64(0xFFFF if "u16" in (to, kind) else 0xFFFFFFFF)

    def compare(self, name: list[str], operands: list[str], active: np.ndarray) -> None:
        kind = name[-1]
        x, y = self.value(operands[1]), self.value(operands[2])
        if kind[0] == "s":
            x, y = (_signed(v, int(kind[1:])) for v in (x, y))
        elif kind[1:] != "64":
            x, y = (v & np.uint64((1 << int(kind[1:])) - 1) for v in (x, y))
        said = {
            "eq": x == y,
            "ne": x != y,
            "lt": x < y,
            "le": x <= y,
            "gt": x > y,
            "ge": x >= y,
        }[name[1]]
        if len(operands) == 4:
            said = said & self.value(operands[3]).astype(bool)
        self.set(operands[0], said.astype(np.uint64), active)
