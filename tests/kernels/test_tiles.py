"""The table of tiles: each row applies somewhere, and a row for an architecture applies to that one alone."""

from __future__ import annotations

import itertools

import pytest
import torch

from sparse_inductor.kernels.common import tiles

DEVICE = torch.device("cuda")
GPUS = {"sm80": 163, "sm89": 99, "sm90": 227, "sm120": 99}
FACTS = (("fp32",), ("ieee",), ("steps",), ("busy", "not busy"), ("alpha",))


@pytest.fixture
def on(monkeypatch):
    """Returns a function that sets the architecture for which tiles are chosen."""

    def switch(arch: str) -> None:
        tiles.row_of.cache_clear()
        monkeypatch.setattr(tiles, "shared_memory", lambda device: GPUS[arch] * 1024)
        monkeypatch.setattr(tiles, "compute_capability", lambda device: divmod(int(arch[2:]), 10))

    yield switch
    tiles.row_of.cache_clear()


def test_every_row_can_be_reached(on):
    kernels = {row.kernel for row in tiles.TILES}
    widths = {row.width for row in tiles.TILES} - {None} | {10**6}
    some = [[*f, None] for f in FACTS]
    reached = []
    for arch in GPUS:
        on(arch)
        for kernel, width, facts in itertools.product(kernels, widths, itertools.product(*some)):
            try:
                reached.append(tiles.row_of(kernel, DEVICE, width, *filter(None, facts)))
            except KeyError:
                continue
    assert [row for row in tiles.TILES if not any(row is r for r in reached)] == []


def test_a_row_of_an_architecture_decides_there_alone(on, monkeypatch):
    mine = tiles.Row("relu_ffn", {"BM": 64}, "measured", arch="sm120")
    on("sm89")
    before = tiles.sizes_of("relu_ffn", DEVICE)
    monkeypatch.setattr(tiles, "TILES", (mine, *tiles.TILES))
    on("sm89")
    assert tiles.sizes_of("relu_ffn", DEVICE) == before
    on("sm120")
    assert tiles.sizes_of("relu_ffn", DEVICE) == {"BM": 64}


def test_a_kernel_without_a_row_is_named(on):
    on("sm89")
    with pytest.raises(KeyError, match="no tile of gemv fits 99 KiB"):
        tiles.sizes_of("gemv", DEVICE)
