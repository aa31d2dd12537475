"""Whole models: SPLADE training, a ReLU Llama, an entmax encoder.

The contenders run in one process, take turns and have the same weights: the model run eagerly where that makes sense
("eager"), under torch.compile ("compile"), and compiled with the pattern enabled ("ours"). The encoder with entmax
attention is compared with a different model: the same encoder with softmax attention, for which torch chooses the
kernel ("softmax"). For all contenders, encoder layers and blocks share one compiled code (regional compilation).

SPLADE is trained with the largest batch that fits into the GPU's memory. It is determined for each contender
separately, by extrapolating the last two memory peaks. SPLADE training steps are timed from an idle GPU to an idle GPU,
host and optimizer included; all other times are measured as described in `benchmarks.measure`.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.bench import NONE, Bench, Limits, Section, both, graphed, part
from benchmarks.clients import encoder, fit, llama, splade
from benchmarks.clients.fit import Trial
from benchmarks.measure import MIB, Timing, Work
from benchmarks.publish import Point

NAMES = ("compile", "ours")
# The share of active entries of [batch, V], as in models that are trained with a FLOPS regulariser.
ACTIVE = 0.02
# With this value, about five sixths of the active neurons of a text's tokens are among 512 neurons, as in the benchmark
# of the feed-forward block alone.
ALIKE = 0.4


def run(bench: Bench) -> None:
    """Measure everything for this device."""
    bench.results.swept = "SPLADE training step; no padding, 2 % of the terms active"
    for section in _gpu_sections(bench) if bench.cuda else _cpu_sections(bench):
        if bench.only and section.__name__ not in bench.only:
            continue
        if bench.late():
            bench.note(f"Not measured, out of time: {section.__name__.replace('_', ' ')}.")
            continue
        bench.section(section, bench)
        bench.save()


# --- SPLADE training --------------------------------------------------------------------------------------------------


class Splade:
    """One model, trained by each contender with the largest batch that fits."""

    def __init__(self, bench: Bench, sizes: splade.Sizes, axis: str, start: int = 16) -> None:
        self.bench, self.axis = bench, axis
        self.training = splade.Training(sizes, bench.device)
        self.active = self.training.activate(ACTIVE)
        self.start, self.most = (4, 8) if bench.quick else (start, 2**20)
        self.unit = 4 if bench.quick else 16
        if bench.device.type == "cuda":
            # Without expandable segments, fragmentation decides which batches fit.
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        bench.results.fixed["tokens a text"] = sizes.tokens

    def search(self, name: str) -> list[Trial]:
        """Find the largest batch. Returns the trials that fit, the largest last, and adds them to the plot."""
        step = partial(self.training.step, name)

        def attempt(batch: int) -> Trial:
            found = fit.attempt(step, batch, self.bench.device)
            self._said(name, found)
            return found

        room = fit.room(self.bench.device)
        done = fit.largest(attempt, room, self.start, self.most, unit=self.unit)
        for t in done:
            self.point(name, t)
        return done

    def point(self, name: str, found: Trial) -> None:
        """Add a point to the plot."""
        self.bench.point(Point(self.axis, found.batch, name, found.ms, found.peak))

    def _said(self, name: str, found: Trial) -> None:
        what = "does not fit" if found.peak is None else f"peak {found.peak / MIB:,.0f} MiB"
        taken = "" if found.ms is None else f"{found.ms:.4g} ms, "
        self.bench.say(f"{self.axis} {found.batch}: {name} {taken}{what}")

    def times(self, batches: dict[str, int], rounds: int = 1) -> dict[str, float]:
        """Return the median ms of a step. Contenders take turns, each with its own batch, after a warm-up step."""
        taken: dict[str, list[float]] = {name: [] for name in batches}
        for _ in range(rounds):
            for name, batch in batches.items():
                step = partial(self.training.step, name)
                gc.collect()
                if self.bench.cuda:
                    torch.cuda.empty_cache()
                first = fit.timed(step, batch, self.bench.device)
                # Run each contender for about a second.
                many = 1 if self.bench.quick else max(1, min(10, round(1000 / first)))
                taken[name].append(fit.timed(step, batch, self.bench.device, many))
        return {name: statistics.median(found) for name, found in taken.items()}

    def compare(
        self,
        case: str,
        batches: dict[str, int],
        limits: Limits = NONE,
        rounds: int = 1,
    ) -> None:
        """Record a row with samples per second, and a line for each contender."""
        taken = self.times(batches, rounds)
        rates = {name: batches[name] / ms * 1e3 for name, ms in taken.items()}
        for name, ms in taken.items():
            label = f"{case}, batch {batches[name]}"
            self.bench.sample(label, name, Timing(ms, ms, ms, rounds))
        note = f"{rates['ours']:.0f} / {rates['compile']:.0f} samples a second with batches of "
        note += f"{batches['ours']} / {batches['compile']}"
        name = f"{case}: samples a second, ours over compile"
        value = rates["ours"] / rates["compile"]
        self.bench.row(name, value, "x", *limits, True, note)


def _splade(
    bench: Bench,
    case: str,
    sizes: splade.Sizes,
    start: int,
    batch: Limits,
    speed: Limits,
    checkpointing: bool = False,
) -> None:
    """Compare the largest batches and samples per second, also with random lengths and with an untrained model."""
    axis = f"batch, V {sizes.vocabulary}" + ", checkpointed" * checkpointing
    work = Splade(bench, sizes, axis, start)
    work.training.checkpointing = checkpointing
    bench.say(f"{case}: {sizes}, {work.active:.2%} active")
    found = {name: work.search(name) for name in NAMES}
    batches = {name: done[-1].batch for name, done in found.items()}
    note = f"{batches['ours']} / {batches['compile']}; {work.active:.2g} of the terms active"
    value = batches["ours"] / batches["compile"]
    bench.row(f"{case}: largest batch, ours over compile", value, "x", *batch, True, note)
    _same_batch(bench, case, found)
    work.compare(case, batches, speed)
    if sizes.vocabulary < 100_000 and not checkpointing:
        work.training.texts.padded = True
        work.compare(f"{case}, random lengths", batches, speed)
        work.training.texts.padded = False
        active = work.training.activate(None)
        work.compare(f"{case}, untrained: {active:.2g} active", batches)


def _same_batch(bench: Bench, case: str, found: dict[str, list[Trial]]) -> None:
    """Compare time and memory at the largest batch that both contenders have run."""
    theirs, mine = ({t.batch: t for t in found[name]} for name in NAMES)
    batch = max(theirs.keys() & mine.keys())
    a, b = theirs[batch], mine[batch]
    if a.ms is None or b.ms is None or a.peak is None or b.peak is None:
        return
    name, note = f"{case}, batch {batch} for both", f"{a.ms:.4g} ms / {b.ms:.4g} ms"
    bench.row(f"{name}: time, compile over ours", a.ms / b.ms, "x", higher=True, note=note)
    note = f"{a.peak / MIB:,.0f} MiB / {b.peak / MIB:,.0f} MiB, weights and optimizer included"
    value = a.peak / max(1, b.peak)
    bench.row(f"{name}: peak memory, compile over ours", value, "x", higher=True, note=note)


def _splade_eager(bench: Bench, case: str, sizes: splade.Sizes) -> None:
    """Measure the eager model, to show the gain from compiling alone."""
    work = Splade(bench, sizes, f"batch, V {sizes.vocabulary}", 256)
    batch = work.search("eager")[-1].batch
    ms = work.times({"eager": batch}, 1)["eager"]
    bench.sample(f"{case}, batch {batch}", "eager", Timing(ms, ms, ms, 1))


# --- ReLU Llama -------------------------------------------------------------------------------------------------------


def _llama(
    bench: Bench,
    what: str,
    sizes: llama.Sizes,
    rows: int,
    activity: Sequence[tuple[float, float]],
    limits: Limits = NONE,
    places: int = 1,
) -> None:
    """Compare tokens per second of "prefill" or "decode", each in one CUDA graph.

    activity: pairs (share of active neurons, `alike` of `llama.Llama`). Only pairs with the first share are judged.
    places: how many times the model is measured, with its weights allocated at different addresses; the median ratio
    counts.
    """
    runs = {name: llama.contender(name) for name in ("eager", *NAMES)}
    for share, alike in activity:
        found, spacers = [], []
        for place in range(places):
            case, theirs, mine = _llama_at(bench, what, sizes, rows, share, alike, runs, place)
            tokens = rows * (sizes.context if what == "prefill" else 1)
            rates = " / ".join(f"{tokens / t.ms * 1e3:,.0f}" for t in (mine, theirs))
            note = f"{rates} tokens a second; {both(mine, theirs)}"
            found.append((theirs.ms / mine.ms, note))
            runs.pop("eager", None)
            gc.collect()
            if bench.cuda and place + 1 < places:
                torch.cuda.empty_cache()
                spacer = torch.empty((37 * place + 11) * MIB, dtype=torch.uint8, device="cuda")
                spacers.append(spacer)
        found.sort()
        value, note = found[places // 2]
        if places > 1:
            least, most = found[0][0], found[-1][0]
            note += f"; median of {places} places of the weights, {least:.3g}x to {most:.3g}x"
        name = f"{case}: tokens a second, ours over compile"
        judged = limits if share == activity[0][0] else NONE
        bench.row(name, value, "x", *judged, True, note)


def _llama_at(
    bench: Bench,
    what: str,
    sizes: llama.Sizes,
    rows: int,
    share: float,
    alike: float,
    runs: Mapping[str, Callable[..., Tensor]],
    place: int,
) -> tuple[str, Timing, Timing]:
    """Measure a newly allocated model; return the name of the case and the times of "compile" and "ours"."""
    model = llama.Llama(sizes, bench.device, share, rows, alike)
    case = f"ReLU Llama {sizes}, {what}, {rows} x {sizes.context}, {model.active:.2%} active"
    if alike:
        case += f", {model.shared:.0%} of them among {llama.SHARED} neurons of the text"
    label = case + (f", weights in place {place + 1}" if place else "")
    works: dict[tuple[str, str], Work] = {}
    for name, run in runs.items():
        work = (model.prefill if what == "prefill" else model.decode)(run)
        if "eager" in runs:  # checked for the first model only: later ones reuse its code
            llama.checked(name, work)
        works[label, name] = graphed(work) if bench.cuda and not bench.quick else work
    taken = bench.race(works, 1.0, weigh=False)
    theirs, mine = (taken[label, name] for name in NAMES)
    return case, theirs, mine


# --- Entmax encoder ---------------------------------------------------------------------------------------------------


def _encoder(bench: Bench, sizes: encoder.Sizes, names: Sequence[str]) -> None:
    """Compare with the last of the names, for the scores of random weights and for scores as in trained models."""
    works = {name: encoder.Training(sizes, bench.device, name) for name in names}
    for kind in ("random weights", "trained scores"):
        if kind == "trained scores":
            for work in works.values():
                work.trained()
        first, last = works["ours"].supports()
        case = f"entmax encoder, {sizes}, {kind}, support {first:.3g} to {last:.3g}"
        race = {(case, name): work.step for name, work in works.items()}
        taken = bench.race(race, 2.0)
        judged = kind == "trained scores" and names[-1] == "softmax"
        name = f"{case}: training step, ours over {names[-1]}"
        limits = (1.1, 0.8) if judged else NONE
        bench.compare(name, taken[case, "ours"], taken[case, names[-1]], limits)


# --- The parts --------------------------------------------------------------------------------------------------------


def _gpu_sections(bench: Bench) -> list[Section]:
    bert, roberta = splade.Sizes(30522), splade.Sizes(250002)
    model, prompts, layers = llama.Sizes(), 16, encoder.Sizes()
    if bench.quick:
        bert = roberta = splade.Sizes(500, 2, 64, 16)
        model, prompts = llama.Sizes(2, 64, 256, 2, 100, 32), 2
        layers = encoder.Sizes(2, 64, 1, 1, 64)
    small, large = "SPLADE training, BERT-base", "SPLADE training, vocabulary of XLM-R"

    xlm_r = 64, (10.0, 26.0), (2.0, 3.0)
    prompt = [(0.01, 0.0), (0.01, ALIKE), (30 / 5632, 0.0)]
    short, places = (model, 1) if bench.quick else (llama.Sizes(context=1024), 5)
    token = [(0.01, 0.0), (30 / 5632, 0.0)]
    return [
        part("splade_bert", _splade, small, bert, 256, (1.3, 2.0), (1.15, 1.5)),
        part(
            "splade_xlm_r_checkpointed", _splade, f"{large}, activation checkpointing", roberta,
            *xlm_r, checkpointing=True,
        ),
        part("llama_decode", _llama, "decode", short, 1, token, (1.3, 1.8), places),
        part("llama_prefill", _llama, "prefill", model, prompts, prompt, (1.15, 1.4)),
        part("entmax_encoder", _encoder, layers, ("ours", "softmax")),
        part("splade_xlm_r", _splade, large, roberta, *xlm_r),
        part("splade_bert_eager", _splade_eager, small, bert),
    ]  # fmt: skip


def _cpu_sections(bench: Bench) -> list[Section]:
    """Return parts with smaller models, fixed batches and no floors."""
    texts, batch = splade.Sizes(30522, 4, 256, 128), 8
    model, layers = llama.Sizes(4, 1024, 2816, 16, 8000, 128), encoder.Sizes(2, 256, 4, 1, 1024)
    if bench.quick:
        texts, batch = splade.Sizes(500, 1, 64, 16), 4
        model, layers = llama.Sizes(1, 64, 256, 2, 100, 32), encoder.Sizes(1, 64, 1, 1, 64)

    return [
        part("splade_training", _splade_given, texts, batch),
        part("llama_prefill", _llama, "prefill", model, 1, [(0.01, 0.0)]),
        part("llama_decode", _llama, "decode", model, 1, [(0.01, 0.0)]),
        part("entmax_encoder", _encoder, layers, ("ours", "compile")),
    ]


def _splade_given(bench: Bench, sizes: splade.Sizes, batch: int) -> None:
    """Measure this batch and twice as many texts; compare the contenders at this batch."""
    work = Splade(bench, sizes, f"batch, V {sizes.vocabulary}")
    for name in NAMES:
        for size in (batch, 2 * batch):
            found = fit.attempt(partial(work.training.step, name), size, bench.device)
            work.point(name, dataclasses.replace(found, peak=None))
    work.compare(f"SPLADE training, {sizes}", dict.fromkeys(NAMES, batch))
