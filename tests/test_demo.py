"""The demo, which new users run first."""

from __future__ import annotations

import subprocess

import pytest

from processes import python

TINY = "--layers 1 --hidden 32 --vocab 600 --batch 2 --seq 16 --steps 2 --device cpu".split()

pytest.importorskip("transformers")


def demo(*options: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "benchmarks.demo", *options, check=False, timeout=500)


@pytest.mark.heavy
def test_it_rewrites_the_head_and_shows_both_sides():
    done = demo(*TINY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "-> sparse_inductor::splade_head" in done.stdout
    for line in ("relative error of representations", "training step", "peak memory", "encoding"):
        assert line in done.stdout
    assert "All right" in done.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--batch", "1"], "--batch must be at least 2"),
        (["--steps", "1"], "--steps must be at least 2"),
        (["--layers", "0"], "--layers must be at least 1"),
        (["--hidden", "100"], "multiple of 64"),
        (["--model", "x", "--layers", "2"], "--layers"),
    ],
)
def test_sizes_that_make_no_sense_are_refused_at_once(capsys, options, said):
    from benchmarks.demo.__main__ import parse

    with pytest.raises(SystemExit) as end:
        parse(options)
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_a_head_that_was_not_rewritten_fails():
    from benchmarks.demo.__main__ import verdict

    sides = {"value_error": 1e-7, "gradient_error": 1e-5}
    assert verdict(sides, {**sides, "rewrites": 2}, "cpu") == []
    assert verdict(sides, {**sides, "rewrites": 0}, "cpu") == ["the head was not rewritten"]


@pytest.mark.parametrize("wrong", [1.0, float("inf"), float("nan")])
def test_numbers_that_are_off_fail(wrong):
    from benchmarks.demo.__main__ import verdict

    good = {"value_error": 1e-7, "gradient_error": 1e-5, "rewrites": 2}
    assert len(verdict(good, {**good, "value_error": wrong}, "cpu")) == 1


def test_every_sentence_ships_as_one_line():
    from benchmarks.demo.model import sentences

    assert len(sentences()) >= 100
    assert all(line[-1] in '.?!"' for line in sentences())


def test_batches_hold_queries_then_documents(tmp_path):
    from benchmarks.demo.model import Sizes, batches, sentences, train_tokenizer

    tokenizer = train_tokenizer(sentences(), 600)
    sizes = Sizes(None, "", layers=1, hidden=32, vocab=600, batch=3, seq=24, steps=2)
    first, second = batches(tokenizer, sizes)
    assert first.input_ids.shape == first.attention_mask.shape == (6, 24)
    assert first.input_ids.max() < 600
    assert not first.input_ids.equal(second.input_ids)
    assert (first.attention_mask.sum(1) > 3).all()
