"""The benchmarks: their measurements, their output, and that every part of them runs."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import time

import pytest
import torch

from benchmarks import bench as bench_module
from benchmarks import measure
from benchmarks.__main__ import families, main, parse
from benchmarks.bench import Bench
from benchmarks.clients import encoder, fit, llama, splade
from benchmarks.families import splade_head
from benchmarks.publish import Cell, Point, Results, Row, Sample, aligned, rows_table, write
from processes import python

CPU = torch.device("cpu")


def results() -> Results:
    machine = {"device": "Some CPU (R)", "torch": "2.13"}
    return Results(
        "splade_head",
        "python -m benchmarks splade_head",
        machine,
        rows=[
            Row("fast", 0.5, "x", 0.7, 0.4),
            Row("share", 0.8, "", 0.75, 0.92, higher_is_better=True),
            Row("gone", None, "ms", 1.0, note="out of memory"),
        ],
        samples=[Sample("case", "ours", 1.0, 0.9, 1.2, 7, 2**20, 2**10)],
        points=[Point("B", b, name, float(b), b * 2**20) for b in (1, 2) for name in ("a", "b")],
        fixed={"B": 1, "S": 2},
    )


# --- Output -----------------------------------------------------------------------------------------------------------


def test_verdicts_follow_the_direction_of_the_row():
    fast, share, gone = results().rows
    assert (fast.verdict(fast.floor), fast.verdict(fast.goal)) == ("pass", "FAIL")
    assert (share.verdict(share.floor), share.verdict(share.goal)) == ("pass", "FAIL")
    assert gone.verdict(gone.floor) == "?"
    assert gone.verdict(None) == ""


def test_a_value_that_just_misses_a_limit_does_not_look_like_it():
    rows = [
        Row("just", 1.29942, "x", floor=1.3, goal=1.8, higher_is_better=True),
        Row("exactly", 1.3, "x", floor=1.3, goal=1.8, higher_is_better=True),
        Row("far", 1.123456, "x", floor=1.3, higher_is_better=True),
        Row("large", 1234.56, "us", floor=1234),
    ]
    assert [line[1] for line in rows_table(rows)[1:]] == ["1.299 x", "1.3 x", "1.12 x", "1235 us"]


def test_losses_are_named_on_the_page(tmp_path):
    found = results()
    found.rows.append(Row("slow one", 2.0, "x", 3.0))
    found.rows.append(Row("small gain", 0.9, "x", 0.5, higher_is_better=True))
    page = next(p for p in write(found, tmp_path) if p.suffix == ".md").read_text()
    assert "Losses: slow one; small gain." in page
    assert "floor" not in page and "FAIL" not in page


def test_a_size_at_which_compile_wins_is_named_on_the_page(tmp_path):
    found = results()
    found.points = [Point("B", 1, "compile", 2.0, 100), Point("B", 1, "ours", 1.0, 150)]
    page = next(p for p in write(found, tmp_path) if p.suffix == ".md").read_text()
    assert "Behind compile in the curves: memory at B 1 (1.50 x)." in page


def test_all_files_are_written_and_hold_the_figures(tmp_path):
    pytest.importorskip("matplotlib")
    paths = {p.suffix: p for p in write(results(), tmp_path)}
    assert {p.stem for p in paths.values()} == {"splade_head-some-cpu-r"}
    assert set(paths) == {".md", ".json", ".png"}
    assert Results.read(paths[".json"]) == results()


def test_maps_are_written_and_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    cells = [
        Cell("block", "1 row", "1 %", 0.5, 0.8, 1.5, True, section="blocks"),
        Cell("block", "2 rows", "1 %", 2.0, None, None, False, section="blocks"),
        Cell("head", "2 texts", "training", 1.0, 1.0, 1.0, False, section="heads"),
    ]
    found = dataclasses.replace(results(), points=[], cells=cells)
    paths = {p.suffix: p for p in write(found, tmp_path)}
    assert set(paths) == {".md", ".json", ".png"}
    assert Results.read(paths[".json"]) == found
    assert "| 1 row | 1 % | 0.500 | 0.80 | 1.50 | rewritten |" in paths[".md"].read_text()
    now = results()
    now.keep(found, {"blocks"})
    assert now.cells == cells[2:]


def test_without_matplotlib_the_plot_is_left_out_and_that_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert {p.suffix for p in write(results(), tmp_path)} == {".md", ".json"}
    assert "matplotlib is not installed" in capsys.readouterr().out


def test_tables_line_up():
    lines = aligned(rows_table(results().rows)).splitlines()
    assert len(lines) == 4
    assert lines[0].index("floor") == lines[1].index("0.7 x")


# --- Measurements -----------------------------------------------------------------------------------------------------


def test_contenders_take_turns():
    order = []
    measure.race({n: lambda n=n: order.append(n) for n in "ab"}, CPU, seconds=0.0, rounds=(3, 3))
    assert "".join(order) == "aabb" + "ababab"  # two warm-up calls each, then alternately


def test_steady_calls_are_timed_in_batches_that_take_turns():
    order: list[str] = []
    found = measure.steady(
        {n: lambda n=n: (order.append(n), time.sleep(2e-3)) for n in "ab"}, CPU, 0.0, rounds=3
    )
    assert "".join(order[-6:]) == "ababab"
    assert all(0 < each.host_ms <= each.wall_ms for each in found.values())


def test_timings_are_medians_within_their_quartiles():
    taken = measure.race({"a": lambda: None}, CPU, seconds=0.0, rounds=(5, 5))["a"]
    assert taken.rounds <= 5
    assert 0 <= taken.low <= taken.ms <= taken.high


def grow(mib: int) -> dict[str, int]:
    def work() -> torch.Tensor:
        scratch = torch.ones(mib * 2**20, dtype=torch.int8)
        return torch.ones(2**20, dtype=torch.int8) + scratch[0]

    found = measure.peak_memory(work, CPU)
    return {"peak": found.peak, "scratch": found.scratch}


@pytest.mark.heavy
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_memory_of_a_process_of_its_own():
    found = measure.isolated(grow, mib=96)
    assert 96 * 2**20 <= found["peak"] <= 104 * 2**20
    assert found["peak"] - found["scratch"] == 2**20


def fail() -> None:
    raise ValueError("no luck")


def test_a_process_that_fails_says_why():
    with pytest.raises(RuntimeError, match="no luck"):
        measure.isolated(fail)


def test_a_part_that_fails_leaves_the_others_and_is_told(tmp_path, capsys):
    bench = Bench(CPU, results(), tmp_path)
    bench.section(fail)
    assert bench.failed == ["fail"]
    assert "no luck" in bench.results.text[-1]


# --- The families -----------------------------------------------------------------------------------------------------


def test_families_are_the_files():
    assert "splade_head" in families()
    assert parse(["splade_head"]).family == "splade_head"


def test_an_unknown_family_is_refused():
    with pytest.raises(SystemExit):
        parse(["no_such_family"])


@pytest.mark.parametrize("active", [0.02, 0.5])
def test_the_data_is_as_active_as_asked(active):
    case = splade_head.Case(splade_head.Shape(4, 16, 32, 5000), CPU, active=active)
    assert case.active == pytest.approx(active, rel=0.2)
    assert case.hidden.std() > 0.9


def test_the_data_has_the_padding_asked_for():
    shape = splade_head.Shape(4, 16, 32, 50)
    assert splade_head.Case(shape, CPU, padding="half").mask.sum(1).tolist() == [8] * 4
    assert splade_head.Case(shape, CPU, padding="none").mask.all()


@pytest.mark.heavy
def test_contenders_agree_and_only_ours_is_rewritten():
    import sparse_inductor

    case = splade_head.Case(splade_head.Shape(2, 16, 32, 300), CPU, active=None)
    works = case.works([splade_head.TRAINING], ["eager", "compile", "ours", "operator"])
    found = {}
    for (_, name), work in works.items():
        before = len(sparse_inductor.report().rewrites)
        found[name] = work()
        assert (len(sparse_inductor.report().rewrites) > before) == (name == "ours")
    for name in ("compile", "ours", "operator"):
        torch.testing.assert_close(found[name], found["eager"], rtol=1e-4, atol=1e-4)


@pytest.mark.heavy
@pytest.mark.parametrize("family", families())
def test_the_quick_run_writes_its_files(tmp_path, family):
    command = ["-m", "benchmarks", family, "--quick", "--device", "cpu"]
    if family == "end_to_end":  # the test below runs them all
        command += ["--only", "llama_decode"]
    python(*command, "--out", tmp_path, path=(), timeout=550)
    assert {p.suffix for p in tmp_path.iterdir()} >= {".md", ".json"}
    page = next(tmp_path.glob("*.md")).read_text()
    assert "FAILED" not in page
    assert str(tmp_path) not in page  # pages must not contain local paths


ROWS = {"splade_head": 15, "entmax": 4, "entmax_attention": 25, "end_to_end": 18, "relu_ffn": 31}


@pytest.mark.heavy
@pytest.mark.parametrize(("family", "rows"), ROWS.items(), ids=ROWS)
def test_the_parts_for_the_gpu_run(tmp_path, monkeypatch, family, rows):
    """Run the GPU parts on the CPU at tiny sizes. The figures are meaningless, but the code is the same.

    Unrewritten programs are not compiled, because that takes long and the quick runs do it.
    """
    module = importlib.import_module(f"benchmarks.families.{family}")
    for at in (module, bench_module):
        monkeypatch.setattr(at, "compiled", lambda program, **_: program, raising=False)
    monkeypatch.setattr(module, "graphed", lambda work: work, raising=False)
    monkeypatch.setattr(Bench, "cuda", property(lambda self: True))
    for name in ("memory_reserved", "memory_allocated", "empty_cache", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**11, 10**11))
    bench = Bench(CPU, dataclasses.replace(results(), rows=[], points=[]), tmp_path, quick=True)
    for section in module._gpu_sections(bench):
        bench.section(section, bench)
    assert bench.failed == []
    assert len(bench.results.rows) >= rows
    # AdaSplash runs on a GPU only.
    assert all(row.value is not None or "adasplash" in row.name for row in bench.results.rows)


# --- The largest batch that fits --------------------------------------------------------------------------------------


def searched(memory: int, each: int, most: int = 2**20, base: int = 50) -> list[fit.Trial]:
    """Search the largest batch that fits `memory` if a step takes `base` bytes plus `each` bytes per sample."""

    def attempt(batch: int) -> fit.Trial:
        peak = base + each * batch
        return fit.Trial(batch, float(batch), peak if peak <= memory else None)

    return fit.largest(attempt, memory, 16, most)


@pytest.mark.parametrize("memory", [5_000, 12_345, 100_000])
def test_the_largest_batch_is_found_to_three_percent(memory):
    done = searched(memory, 7)
    right = (memory - 50) // 7
    assert right * 0.97 - 16 <= done[-1].batch <= right
    assert [t.batch for t in done] == sorted(t.batch for t in done)
    assert all(t.batch % 16 == 0 and t.peak <= memory for t in done)


def test_a_search_stops_where_it_is_told():
    assert searched(10**9, 1, most=64)[-1].batch == 64


def test_a_first_batch_that_does_not_fit_is_an_error():
    with pytest.raises(MemoryError, match="batch of 16"):
        searched(100, 7)


def test_a_search_after_an_early_failure_stays_below_it():
    """The memory grows faster than a line through the first peaks predicts."""
    tried = []

    def attempt(batch: int) -> fit.Trial:
        tried.append(batch)
        return fit.Trial(batch, 1.0, batch**3 if batch < 100 else None)

    assert 64 <= fit.largest(attempt, 10**9, 16, 2**20)[-1].batch < 100
    assert len(tried) <= 8


def test_the_time_of_a_batch_is_not_that_of_compiling_it(monkeypatch):
    taken = iter([20_000.0, 200.0])
    monkeypatch.setattr(fit, "timed", lambda step, batch, device: next(taken))
    assert fit.attempt(lambda batch: None, 8, CPU).ms == 200.0


# --- Whole models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.02, 0.3])
def test_the_splade_model_is_as_active_as_asked(share):
    training = splade.Training(splade.Sizes(500, 1, 64, 16), CPU)
    assert training.activate(share) == pytest.approx(share, abs=0.01)
    assert training.activate(None) > 0.9  # untrained


def test_the_llama_is_as_active_as_asked():
    sizes = llama.Sizes(layers=3, hidden=64, neurons=256, heads=2, vocabulary=100, context=64)
    apart, alike = (llama.Llama(sizes, CPU, 0.01, 2, share) for share in (0.0, 0.6))
    assert apart.active == pytest.approx(0.01, rel=0.1)
    assert alike.active == pytest.approx(0.01, rel=0.1)


def test_tokens_of_a_text_share_neurons_if_they_are_to(monkeypatch):
    monkeypatch.setattr(llama, "SHARED", 24)
    sizes = llama.Sizes(layers=2, hidden=64, neurons=256, heads=2, vocabulary=1000, context=128)
    apart, alike = (llama.Llama(sizes, CPU, 0.02, 3, share) for share in (0.0, 0.6))
    assert apart.shared < 0.5 < 0.75 < alike.shared


def test_decoding_continues_what_the_prompt_began():
    """The decoded token is the one that a prefill of the whole prompt predicts."""
    sizes = llama.Sizes(layers=2, hidden=64, neurons=256, heads=2, vocabulary=100, context=16)
    model = llama.Llama(sizes, CPU, 0.2, 2)
    whole = model.prefill(llama.Block.forward)().argmax(-1)
    assert torch.equal(model.decode(llama.Block.forward)(), whole)


@pytest.mark.heavy
def test_the_rewritten_model_trains_as_the_eager_one():
    training = splade.Training(splade.Sizes(300, 1, 64, 16), CPU)
    training.mlm.eval()  # dropout would make the two models differ
    assert training.step("ours", 4).item() == pytest.approx(
        training.step("eager", 4).item(), rel=1e-2
    )
    assert (
        training.mlm.cls.predictions.decoder.weight.grad is None
    )  # the optimizer step has freed it


@pytest.mark.heavy
def test_the_entmax_encoder_is_rewritten_and_its_scores_are_as_told():
    sizes = encoder.Sizes(1, 64, 1, 1, 128)
    training = encoder.Training(sizes, CPU, "ours")
    flat = training.supports()[0]
    training.trained()
    assert training.supports()[0] < flat / 3
    assert training.step().isfinite()


# --- Running a part of it ---------------------------------------------------------------------------------------------


def test_a_part_that_is_run_again_replaces_what_was_found_of_it(tmp_path):
    earlier, now = results(), results()
    earlier.rows = [Row("a", 1.0, section="first"), Row("b", 2.0, section="second"), Row("c", 3.0)]
    earlier.samples, earlier.points, now.rows = [], [], []
    earlier.command = "another command"
    earlier.text, now.text = ["The limits."], ["A remark."]
    for part in ("measure_limits", "first", "second"):
        earlier.ran(part)
    now.keep(earlier, {"first"})
    assert now.text == ["The limits.", "A remark."]
    now.ran("first")
    assert [row.name for row in now.rows] == ["b"]
    page = next(p for p in write(now, tmp_path) if p.suffix == ".md").read_text()
    assert "- second: `another command`" in page
    assert f"- first: `{now.command}`" in page


def test_a_curve_stays_where_another_part_is_run_again(tmp_path):
    bench = Bench(CPU, dataclasses.replace(results(), points=[]), tmp_path)

    def sweeps():
        bench.point(Point("B", 1, "ours", 1.0, None))

    bench.section(sweeps)
    now = dataclasses.replace(results(), points=[])
    now.keep(bench.results, {"first"})
    assert now.points == [Point("B", 1, "ours", 1.0, None, section="sweeps")]
    again = dataclasses.replace(results(), points=[])
    again.keep(bench.results, {"sweeps"})
    assert not again.points


def test_parts_that_are_not_named_do_not_run(tmp_path):
    bench = Bench(CPU, results(), tmp_path, only=frozenset(["wanted"]))
    done = []

    def wanted(bench: Bench) -> None:
        done.append("wanted")
        bench.row("a row", 1.0)

    def other(bench: Bench) -> None:
        done.append("other")

    for part in (wanted, other):
        bench.section(part, bench)
    assert done == ["wanted"]
    assert bench.results.rows[-1].section == "wanted"


def test_a_part_that_does_not_exist_is_refused(tmp_path, capsys):
    command = ["tools", "--quick", "--device", "cpu", "--only", "nonsense", "--out", str(tmp_path)]
    assert main(command) == 2
    assert "no part nonsense" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.heavy
def test_a_point_of_the_sweeps_is_a_training_step_of_ours(tmp_path):
    bench = Bench(CPU, results(), tmp_path, quick=True)
    point = splade_head._point(bench, splade_head.Shape(2, 16, 32, 300), "ours")
    assert point.ms and point.peak_bytes


def test_no_gpu_is_said_clearly(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["splade_head", "--device", "cuda"]) == 2
    assert "no CUDA GPU" in capsys.readouterr().err
