"""Diagnosis of this machine: what sparse_inductor can do on it, obstacles, and a test of every operator."""

from __future__ import annotations

import dataclasses
import os
import platform
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from . import __version__, compat, layers, ops
from .explanation.explain import explained
from .index import SparseIndex
from .kernels.common.arch import compute_capability
from .notices import described
from .pattern import Pattern, registered
from .reporting.console import print_table, print_text
from .selection import SKIP_VARIABLE

# The oldest and the newest version that the tests run with; test_versions.py compares the other places that name them.
TESTED_TORCH = ((2, 11), (2, 14))
TESTED_TRITON = ((3, 6), (3, 9))


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the diagnosis."""

    group: str
    name: str
    value: str
    status: str = "ok"
    """"ok"; "note" (worth knowing); "warn" (something will be slower or missing); "fail"."""
    advice: str = ""


def diagnose(operators: bool = True) -> list[Finding]:
    """Return all findings about this machine; with `operators`, also run an example of each operator and check it."""
    found = [*_versions(), *_devices(), *_compilers(), *_caches(), *_environment()]
    patterns, findings = _patterns()
    found += findings
    if operators:
        found += [_path(p, torch.device(_device())) for p in _PROBES]
        one_for_each = {p.op: p for p in reversed(patterns.values()) if p.examples}
        found += [_operator(p, _device()) for p in reversed(one_for_each.values())]
    return found


def show(findings: Sequence[Finding]) -> int:
    """Print the findings, then the advice; returns the exit status."""
    marks = {"ok": "ok", "note": "ok", "warn": "!", "fail": "FAIL"}
    for group in dict.fromkeys(f.group for f in findings):
        mine = [f for f in findings if f.group == group]
        print_table(
            ("", "", ""),
            [(marks[f.status], f.name, f.value) for f in mine],
            group,
            ["" if f.status in ("ok", "note") else f.status for f in mine],
        )
        print_text("")
    todo = [f for f in findings if f.advice]
    if todo:
        print_table(
            ("", ""), [(f.name, f.advice) for f in todo], "what to do", [f.status for f in todo]
        )
    else:
        print_text("nothing to do", "ok")
    return status(findings)


def status(findings: Sequence[Finding]) -> int:
    """The exit status: 1 if anything fails."""
    return int(any(f.status == "fail" for f in findings))


# --- Versions -------------------------------------------------------------------------------------


def _versions() -> Iterator[Finding]:
    yield Finding("versions", "sparse_inductor", f"{__version__}, {Path(__file__).parent}")
    yield Finding("versions", "Python", f"{platform.python_version()}, {platform.platform()}")
    if sys.platform != "linux":
        yield Finding(
            "versions", "system", sys.platform, "fail", "Linux is needed: Triton runs nowhere else"
        )
    yield _version("torch", torch.__version__, TESTED_TORCH)
    try:
        yield _version("triton", metadata.version("triton"), TESTED_TRITON)
    except metadata.PackageNotFoundError:
        status = "fail" if torch.cuda.is_available() else "note"
        advice = "pip install triton" if status == "fail" else ""
        yield Finding("versions", "triton", "not installed", status, advice)


def _version(name: str, version: str, tested: tuple[tuple[int, int], tuple[int, int]]) -> Finding:
    oldest, newest = (".".join(map(str, v)) for v in tested)
    known = f"tested: {oldest} to {newest}"
    at = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if at < tested[0]:
        advice = f'older than anything that was tested: pip install "{name}>={oldest}"'
        return Finding("versions", name, f"{version} ({known})", "fail", advice)
    if at > tested[1]:
        advice = f"newer than what was tested; if something is odd, try {name} {newest}"
        return Finding("versions", name, f"{version} ({known})", "warn", advice)
    return Finding("versions", name, f"{version} ({known})")


# --- Devices --------------------------------------------------------------------------------------


def _devices() -> Iterator[Finding]:
    threads = f"{torch.get_num_threads()} of {os.cpu_count()} cores"
    yield Finding("devices", "CPU", f"{threads}; operators run in chunked ATen")
    interprets = os.environ.get("TRITON_INTERPRET") == "1"
    if not torch.cuda.is_available():
        built = "this torch is built without CUDA" if torch.version.cuda is None else "none found"
        yield Finding("devices", "GPU", built, "note")
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        yield _gpu(index)
    if not interprets:
        yield Finding("devices", "Triton interpreter", "off", "note")
    elif torch.cuda.is_available():
        advice = "unset TRITON_INTERPRET: kernels run in Python, not on the GPU"
        yield Finding("devices", "Triton interpreter", "on", "warn", advice)
    else:
        yield Finding("devices", "Triton interpreter", "on, for tests of the kernels", "note")


def _gpu(index: int) -> Finding:
    about = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    value = f"{about.name}, compute capability {about.major}.{about.minor}, {_gib(free)} of {_gib(total)} free"
    name = f"GPU {index}"
    if about.major < 8:
        advice = "Ampere or newer is needed for bf16 and for asynchronous copies"
        return Finding("devices", name, value, "warn", advice)
    kernels = "Hopper's kernels" if about.major == 9 else "portable kernels"
    return Finding("devices", name, f"{value}; {kernels}")


def _gib(number: int) -> str:
    return f"{number / 2**30:.1f} GiB"


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


# --- What torch.compile needs ---------------------------------------------------------------------


def _compilers() -> Iterator[Finding]:
    wanted = os.environ.get("CXX"), "g++", "clang++"
    found = next((path for name in wanted if name and (path := shutil.which(name))), None)
    if found is not None:
        yield Finding("torch.compile", "C++ compiler", found)
        return
    status = "warn" if torch.cuda.is_available() else "fail"
    advice = "torch.compile on a CPU needs one: apt-get install g++ (or set CXX)"
    yield Finding("torch.compile", "C++ compiler", "not found", status, advice)


def _caches() -> Iterator[Finding]:
    folders = {
        "Inductor's cache": compat.inductor_cache_folder(),
        "Triton's cache": os.environ.get("TRITON_CACHE_DIR") or os.path.expanduser("~/.triton"),
    }
    for name, folder in folders.items():
        problem = _write_problem(folder)
        if problem:
            variable = "TRITON_CACHE_DIR" if "Triton" in name else "TORCHINDUCTOR_CACHE_DIR"
            advice = f"set {variable} to a folder that can be written to"
            yield Finding("torch.compile", name, f"{folder}: {problem}", "fail", advice)
            continue
        free = shutil.disk_usage(_existing(folder)).free
        low = free < 2**30
        advice = "less than 1 GiB is free on its disk" if low else ""
        value = f"{folder}, {_gib(free)} free"
        yield Finding("torch.compile", name, value, "warn" if low else "ok", advice)


def _existing(folder: str) -> Path:
    path = Path(folder).absolute()
    return next(p for p in (path, *path.parents) if p.exists())


def _write_problem(folder: str) -> str:
    try:
        with tempfile.TemporaryFile(dir=_existing(folder)):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _environment() -> Iterator[Finding]:
    for name in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"):
        if os.environ.get(name) == "1":
            advice = f"unset {name}: torch.compile does nothing"
            yield Finding("torch.compile", name, "1", "fail", advice)
    if not compat.runs_pre_grad_passes():
        advice = "set torch._inductor.config.use_pre_grad_passes = True: nothing is rewritten"
        yield Finding("torch.compile", "use_pre_grad_passes", "False", "fail", advice)
    for name, value in sorted(os.environ.items()):
        if name.startswith("SPARSE_INDUCTOR_"):
            advice = "some patterns are left out" if name == SKIP_VARIABLE and value else ""
            yield Finding("torch.compile", name, value, "note", advice)


# --- Kernels --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Probe:
    """A call of a family's operator, at a size for which it has all its kernels.

    own: the compute capabilities that some of these kernels are written for, from the first up to, but excluding, the
    second; None if all kernels are portable.
    """

    operator: str
    call: Callable[[torch.device], object]
    own: tuple[tuple[int, int], tuple[int, int]] | None


def _draw(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16) / 16


def _search(device: torch.device) -> object:
    documents = (torch.rand(20_000, 64) - 0.9).clamp_min(0)
    index = SparseIndex.build(documents, num_terms=64, device=device)
    return index.search(documents[:4].to(device), 10)


_HOPPER = (9, 0), (10, 0)
_PROBES = (
    _Probe(
        "splade_head",
        lambda d: ops.splade_head(_draw(d, 8, 128, 128), _draw(d, 32768, 128)),
        _HOPPER,
    ),
    _Probe(
        "relu_ffn",
        lambda d: ops.relu_ffn(
            _draw(d, 2048, 256), _draw(d, 8192, 256), _draw(d, 256, 8192), _draw(d, 8192, 256)
        ),
        _HOPPER,
    ),
    _Probe(
        "entmax_attention", lambda d: ops.entmax_attention(*_draw(d, 3, 1, 2, 1024, 64)), _HOPPER
    ),
    _Probe("entmax", lambda d: ops.entmax(_draw(d, 64, 1000)), None),
    _Probe(
        "sparse_scores_topk",
        lambda d: ops.sparse_scores(
            _draw(d, 4, 100), torch.randint(100, (1000, 16), device=d), _draw(d, 1000, 16), k=10
        ),
        None,
    ),
    _Probe("index_search", _search, ((7, 0), (99, 0))),
)


def _path(probe: _Probe, device: torch.device) -> Finding:
    """Run a probe and report the layer that computed its operator."""
    group, name = f"kernels, on {device}", probe.operator
    if device.type not in layers.DEVICES:
        return Finding(group, name, "ATen: kernels are for GPUs")
    started = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", layers.KernelWarning)
            probe.call(device)
    except Exception as error:
        return Finding(group, name, described(error), "fail", "please report this")
    took = f"{time.perf_counter() - started:.2f} s"
    fallen = [f for f in layers.fallbacks() if f.operator == probe.operator]
    if fallen:
        path = {layers.Layer.PORTABLE: "portable Triton kernels", layers.Layer.ATEN: "ATen"}
        return Finding(group, name, f"{path[fallen[-1].layer]} ({took})", "warn", str(fallen[-1]))
    own = probe.own is not None and probe.own[0] <= compute_capability(device) < probe.own[1]
    kernels = "kernels of this architecture" if own else "portable Triton kernels"
    return Finding(group, name, f"{kernels} ({took})")


# --- Patterns and operators -----------------------------------------------------------------------


def _patterns() -> tuple[dict[str, Pattern], list[Finding]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            patterns = registered()
        except Exception as error:
            finding = Finding("patterns", "patterns", str(error), "fail", "repair or uninstall it")
            return {}, [finding]
    found = [Finding("patterns", f"{len(patterns)} patterns", ", ".join(patterns))]
    for warning in caught:
        if "sparse_inductor" in str(warning.message):
            advice = "repair or uninstall the package that it comes from"
            found.append(Finding("patterns", "entry point", str(warning.message), "warn", advice))
    return patterns, found


def _operator(pattern: Pattern, device: str) -> Finding:
    """Rewrite an example of the pattern, with gradients if there is one, run it, and compare it with a reference."""
    group = f"operators, on {device}"
    started = time.perf_counter()
    example = next((e for e in pattern.examples if e.training), pattern.examples[0])
    advice = f"please report this; SPARSE_INDUCTOR_SKIP={pattern.name} leaves it out"
    try:
        fn, args = _moved(*example.build(), device)
        with torch.set_grad_enabled(example.training):
            explanation = explained(fn, tuple(args), {}, verify=True, policy="always")
    except Exception as error:
        return Finding(group, pattern.op, described(error), "fail", advice)
    took = f"{time.perf_counter() - started:.2f} s"
    mine = [c for c in explanation.report.checks if c.pattern == pattern.name]
    if mine and all(c.verdict == "agrees" for c in mine):
        return Finding(group, pattern.op, f"{mine[0].detail} ({took})")
    reasons = [c.detail for c in mine] or [m.reason for m in explanation.report.near_misses]
    text = reasons[0] if reasons else "its example was not rewritten"
    return Finding(group, pattern.op, text, "fail", advice)


def _moved(fn: Any, args: tuple[Any, ...], device: str) -> tuple[Any, tuple[Any, ...]]:
    def move(t: torch.Tensor) -> torch.Tensor:
        return t.detach().to(device).requires_grad_(t.requires_grad)

    fn = fn.to(device) if isinstance(fn, nn.Module) else fn
    return fn, pytree.tree_map_only(torch.Tensor, move, args)
