"""An index in a file: readers find the old index or the new one, complete, even if a writer fails or is killed."""

from __future__ import annotations

import base64
import os
import random
import signal
import stat
import sys
import time
import zlib
from pathlib import Path

import pytest
import torch

from processes import threads
from sparse_inductor import SparseIndex
from sparse_inductor.index import IndexFileError, files, storage

V = 20
KILLS = int(os.environ.get("KILLS", "25"))


def index_of(n: int, seed: int = 0) -> SparseIndex:
    g = torch.Generator().manual_seed(seed)
    index = SparseIndex.build(torch.rand(n, V, generator=g) * (torch.rand(n, V, generator=g) < 0.4))
    index.delete([0])
    return index


def same(a: SparseIndex, b: SparseIndex) -> bool:
    return len(a) == len(b) and torch.equal(a.scores(torch.eye(V)), b.scores(torch.eye(V)))


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.skipif(os.name != "posix", reason="POSIX modes")
@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077, 0o000])
def test_a_file_has_the_mode_that_open_gives(tmp_path, umask):
    before = os.umask(umask)
    try:
        index_of(3).save(tmp_path / "x")
        (tmp_path / "y").write_text("")
    finally:
        os.umask(before)
    assert mode(tmp_path / "x") == mode(tmp_path / "y") == 0o666 & ~umask
    (tmp_path / "x").chmod(0o640)
    index_of(4).save(tmp_path / "x")
    assert mode(tmp_path / "x") == 0o640, "as open() keeps that of a file that exists"


@pytest.mark.parametrize("dangling", [False, True])
def test_a_symbolic_link_stays_one(tmp_path, dangling):
    (tmp_path / "data").mkdir()
    real, link = tmp_path / "data" / "real", tmp_path / "link"
    if not dangling:
        index_of(2).save(real)
    link.symlink_to(Path("data") / "real")
    index_of(5).save(link)
    assert link.is_symlink() and not real.is_symlink() and len(SparseIndex.load(real)) == 5
    assert names(tmp_path) == ["data", "link"] and names(tmp_path / "data") == ["real"]


def test_a_path_may_be_a_string_or_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    index_of(3).save("x")
    index_of(4).save(Path("x"))
    assert len(SparseIndex.load("x")) == len(SparseIndex.load(tmp_path / "x")) == 4


def test_an_index_may_be_saved_over_the_file_it_is_mapped_from(tmp_path):
    index = index_of(50)
    index.save(tmp_path / "x")
    for verify in (True, False):
        loaded = SparseIndex.load(tmp_path / "x", verify=verify)
        loaded.append(torch.eye(V))
        loaded.save(tmp_path / "x")
        loaded.vacuum()
        again = SparseIndex.load(tmp_path / "x")
        assert same(loaded, again)


def test_only_a_regular_file_is_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        index_of(2).save(tmp_path / "folder")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="regular file"):
        index_of(2).save(tmp_path / "pipe")
    with pytest.raises(FileNotFoundError):
        index_of(2).save(tmp_path / "none" / "x")
    assert names(tmp_path) == ["folder", "pipe"]
    with pytest.raises(IsADirectoryError):
        SparseIndex.load(tmp_path)


@pytest.mark.skipif(os.name != "posix" or os.getuid() == 0, reason="root may write everywhere")
def test_a_file_or_folder_that_may_not_be_written_stays(tmp_path):
    path = tmp_path / "x"
    index_of(3).save(path)
    path.chmod(0o444)
    with pytest.raises(PermissionError):
        index_of(4).save(path)
    path.chmod(0o644)
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(PermissionError):
            index_of(4).save(path)
    finally:
        tmp_path.chmod(0o755)
    assert len(SparseIndex.load(path)) == 3 and names(tmp_path) == ["x"]


@pytest.mark.parametrize("after", [0, 1, 3, "all"])
def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch, after):
    """The error occurs after some writes, or in fsync."""
    path = tmp_path / "x"
    index_of(3).save(path)
    before = path.read_bytes()
    create, written = storage._create_part, []

    def full(*_):
        raise OSError(28, "No space left on device")

    class Full:
        def __init__(self, file):
            self._file = file

        def write(self, data):
            if len(written) == after:
                full()
            written.append(len(data))
            return self._file.write(data)

        def __getattr__(self, name):
            return getattr(self._file, name)

    def created(target):
        file, part = create(target)
        return Full(file), part

    monkeypatch.setattr(storage, "_create_part", created)
    if after == "all":
        monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        index_of(5).save(path)
    assert len(written) == after or after == "all"
    assert path.read_bytes() == before and names(tmp_path) == ["x"]


def test_what_a_killed_process_left_is_removed_but_not_what_another_writes(tmp_path):
    pytest.importorskip("fcntl")
    path = tmp_path / "x"
    for name in ("x.0123abcd.part", "x.abc_def0.part"):
        (tmp_path / name).write_bytes(b"half of it")
    others = ["x.notes.part", "y.0123abcd.part", "x.0123abcd.part.bak"]
    for name in others:
        (tmp_path / name).write_text("mine")
    longer = index_of(4)
    writing = files.pending(path, longer._contents, longer.weights)
    index_of(3).save(path)
    assert len(names(tmp_path)) == len(others) + 2
    writing.commit()
    assert names(tmp_path) == sorted([*others, "x"]) and len(SparseIndex.load(path)) == 4


# Damage that checksums do not detect: files with wrong contents made by the package's own writer


def damaged(path, change, **facts):
    """Write an index after changing some of its tensors."""
    index = index_of(6)
    write = storage.write_tensors
    with pytest.MonkeyPatch.context() as patch:

        def changed(file, tensors, kind, version, about, *seen):
            change(tensors)
            write(file, tensors, kind, version, about | facts, *seen)

        patch.setattr(storage, "write_tensors", changed)
        index.save(path)


def put(name, at, value):
    def change(tensors):
        tensors[name] = tensors[name].clone()
        tensors[name][at] = value

    return change


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(("change", "facts"), [
    (put("0.offsets", 2, 10**9), {}), (put("0.offsets", 0, -8), {}), (put("0.offsets", -1, 3), {}),
    (put("0.terms", 0, V), {}), (put("0.terms", 1, -1), {}),
    (lambda t: t.pop("0.terms"), {}), (lambda t: t.update({"0.terms": t["0.terms"].int()}), {}),
    (lambda t: t.update({"0.weights": t["0.weights"][:-1]}), {}),
    (lambda t: t.update(deleted=torch.zeros(2, dtype=torch.bool)), {}),
    (lambda t: None, {"num_terms": 0}), (lambda t: None, {"num_terms": "many"}), (lambda t: None, {"weights": "int4"}),
    (lambda t: None, {"segments": [[1.0]]}), (lambda t: None, {"segments": None}),
    (lambda t: None, {"segments": [[float("nan"), False, 0.0]]}),
])  # fmt: skip
def test_what_makes_no_index_is_refused_with_and_without_checksums(tmp_path, verify, change, facts):
    damaged(tmp_path / "x", change, **facts)
    with pytest.raises(IndexFileError, match="is damaged"):
        SparseIndex.load(tmp_path / "x", verify=verify)


@pytest.mark.parametrize("verify", [True, False])
def test_random_bytes_are_no_segmentation_fault(tmp_path, verify):
    index_of(20).save(tmp_path / "x")
    whole = (tmp_path / "x").read_bytes()
    pick = random.Random(0)
    for _ in range(40):
        data = bytearray(whole)
        for _ in range(pick.choice((1, 3, 50))):
            data[pick.randrange(len(data))] = pick.randrange(256)
        if pick.random() < 0.3:
            data = data[: pick.randrange(len(data))]
        (tmp_path / "y").write_bytes(data)
        try:
            index = SparseIndex.load(tmp_path / "y", verify=verify)
        except IndexFileError:
            continue
        index.search(torch.ones(3, V), 5)
        index.scores(torch.ones(V))


# Readers beside a writer


@pytest.mark.parametrize("verify", [True, False])
def test_a_reader_beside_a_writer_has_the_old_index_or_the_new_one(tmp_path, verify):
    """The writer is another process. The two indexes differ in size, so that a mix of their parts would not load."""
    path = tmp_path / "x"
    both = [index_of(2000, 1), index_of(300, 2)]
    both[0].save(path)
    child = os.fork()
    if child == 0:
        try:
            while True:
                for index in both[::-1]:
                    index.save(path)
        finally:
            os._exit(1)
    try:
        seen = set()
        end = time.monotonic() + 30
        while len(seen) < 2 and time.monotonic() < end:
            for _ in range(15):
                found = SparseIndex.load(path, verify=verify)
                (which,) = [i for i, index in enumerate(both) if same(index, found)]
                seen.add(which)
        assert seen == {0, 1}
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_threads_that_save_to_one_path_leave_one_of_their_files(tmp_path):
    both = [index_of(200, 1), index_of(100, 2)]
    with threads(*(lambda i=i: [i.save(tmp_path / "x") for _ in range(10)] for i in both * 2)):
        pass
    found = SparseIndex.load(tmp_path / "x")
    assert any(same(found, i) for i in both) and names(tmp_path) == ["x"]


def kill_while_saving(path: Path, kills: int, seed: int) -> int:
    """Kill processes that append and save at random moments, and return how many kills left an unfinished file.

    After each kill the file has to be a saved one, and not older than that of the last save that returned.
    """
    pick, unfinished, saved = random.Random(seed), 0, 3
    index_of(saved).save(path)
    for _ in range(kills):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                index = SparseIndex.load(path)
                while True:
                    index.append(torch.eye(V)[:1].repeat(50, 1))
                    index.save(path)
                    os.write(write, len(index).to_bytes(8, "little"))
            finally:
                os._exit(1)
        os.close(write)
        told = os.read(read, 8)  # the process has saved at least once
        time.sleep(pick.random() * 0.01)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while more := os.read(read, 8):
            told = more
        os.close(read)
        saved = int.from_bytes(told, "little")
        unfinished += len(names(path.parent)) > 1
        found = SparseIndex.load(path)
        assert len(found) in (saved, saved + 50), "a save that had returned is lost"
        assert found.scores(torch.eye(V)[0])[3:].eq(1.0).all()
        if len(found) > 2000:
            index_of(3).save(path)
    index_of(3).save(path)
    assert names(path.parent) == [path.name]
    return unfinished


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_killed_save_loses_nothing(tmp_path):
    kill_while_saving(tmp_path / "x", 5, 0)


@pytest.mark.heavy
@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_many_killed_saves_lose_nothing(tmp_path):
    """KILLS kills, about half of which interrupt a save."""
    unfinished = kill_while_saving(tmp_path / "x", KILLS, 1)
    print(f"{KILLS} kills, {unfinished} of them in the middle of a save")
    assert unfinished > KILLS // 20, "the kills have to interrupt saves"


# A file that version 0.1.0 wrote: 8-bit weights, some negative; the second of four documents deleted
FORMAT_1 = (
    "c-noEO=`n15QUwlwAV0N77-*_QsOMT3lv%?UB$u3);KZLcCeNH5ORU8dx`FQl%A(lvYn6+=qw~gZ@zi*$PX7@8(Tz1RhBhi8Z_M^ZQj>_rf4QP"
    "!l+p(m(9fjBdv^z50!I*Ia%zmr47`@DNE%MJ3ePQ!Gd@2E9A@7srA$3e_C)XsiQSKg8_Za-rnEe9nt)pmK00j=r}IGs8)?#i>#^(Wo(aTt?CBi"
    "ywsc2RQ2ew&1a>CH{1FJ>L#yBTSsk{snm5v+X$7LB5p?!p{XyhAEEx+TpppkG?NIq;|7)ml->D!PDX?Uk}<-^R7esEK`d<Q4Pf7DB%E+2C=WwA"
    "mW0`{Eq2y7t<!*YzK7@Qd^C|k7LIA>)xS<B5gKGcLSZkR+%FM2OKFmHVn5nWVq_u{!K~!0SD-Z1@%{#ysVvYCqTSAS;q}q~Uf!_ZuloJE-v{1h"
    "TQjih(EI%U{kr-1v6=S=&-=IC"
)


@pytest.mark.parametrize("verify", [True, False])
def test_a_file_of_format_1_opens(tmp_path, verify):
    path = tmp_path / "old.index"
    path.write_bytes(zlib.decompress(base64.b85decode(FORMAT_1)))
    index = SparseIndex.load(path, verify=verify)
    given = torch.tensor([[0, 0.5, 0, 0, 1.25], [0] * 5, [1, -2, 0.25, 0, 0], [0, 0, 0, 2, 0]])
    scores = index.scores(torch.eye(5)).T
    assert scores[1].eq(-float("inf")).all() and (len(index), index.num_live) == (4, 3)
    off = (scores - given)[[0, 2, 3]].abs().max()
    assert 0 < off <= index.weight_error < 0.01
    index.append([{0: 1.0}])
    index.save(path)
    assert torch.equal(SparseIndex.load(path).scores(torch.eye(5)).T[:4], scores)


@pytest.mark.parametrize("bar", [True, False])
def test_building_saving_and_loading_show_progress(tmp_path, capsys, monkeypatch, bar):
    if not bar:
        monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    index = SparseIndex.build(list(torch.rand(5, V)), num_terms=V, progress=True)
    assert "5.00 documents" in (said := capsys.readouterr().err) or said == "5 documents indexed\n"
    index.save(tmp_path / "x", progress=True)
    assert "MiB" in capsys.readouterr().err
    SparseIndex.load(tmp_path / "x", progress=True)
    said = capsys.readouterr().err
    assert "5.00 documents" in said if bar else said == "5 documents loaded\n"
