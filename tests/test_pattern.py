"""The registry of patterns: their sources, and invalid patterns."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from processes import ROOT, TESTS, python
from sparse_inductor import pattern
from toy import Toy

pytestmark = pytest.mark.usefixtures("toy")


def test_registering_the_same_name_twice_raises():
    with pytest.raises(ValueError, match="'toy' is taken.*register"):
        pattern.register(Toy("toy"))


def test_a_newer_object_may_take_the_place():
    newer = pattern.register(Toy("toy"), replace=True)
    assert pattern.registered()["toy"] is newer


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("name", "", "`name`"),
        ("name", "two words", "identifier"),
        ("summary", "two\nlines", "one line"),
        ("anchors", "relu", "`anchors`"),
        ("anchors", frozenset(), "`anchors`"),
        ("signs", "relu", "`signs`"),
        ("match", None, "`match"),
        ("examples", ["text"], "Example"),
        ("near_misses", None, "`near_misses`"),
        ("resolve", 3, "`resolve`"),
    ],
)
def test_a_bad_pattern_is_refused(attribute, value, message):
    bad = Toy("bad")
    setattr(bad, attribute, value)
    with pytest.raises(TypeError, match=message):
        pattern.register(bad)


def test_a_class_is_not_a_pattern():
    with pytest.raises(TypeError, match="is a class"):
        pattern.register(Toy)


# Entry points


def with_entry_points(tmp_path: Path, entries: str, code: str) -> subprocess.CompletedProcess:
    """Run `code` with an installed package that declares these entry points."""
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{pattern.ENTRY_POINTS}]\n{entries}\n")
    (tmp_path / "theirs.py").write_text("import toy\nPATTERN = toy.Toy('theirs')\nNUMBER = 3\n")
    return python("-c", code, path=(tmp_path, TESTS, ROOT), check=False)


NAMES = "from sparse_inductor.pattern import registered; print('theirs' in registered())"


def test_an_installed_package_brings_its_pattern(tmp_path):
    done = with_entry_points(tmp_path, "theirs = theirs:PATTERN", NAMES)
    assert done.stdout.strip() == "True", done.stderr


@pytest.mark.heavy
def test_an_entry_point_that_cannot_be_imported_is_left_out_with_a_warning(tmp_path):
    done = with_entry_points(tmp_path, "a = nowhere:PATTERN\nb = theirs:PATTERN", NAMES)
    assert done.stdout.strip() == "True", done.stderr
    assert "'a' of entry point 'nowhere:PATTERN' is left out" in done.stderr


@pytest.mark.heavy
def test_an_entry_point_that_is_no_pattern_raises(tmp_path):
    done = with_entry_points(tmp_path, "number = theirs:NUMBER", NAMES)
    assert done.returncode != 0
    assert "TypeError: not a pattern (entry point number = theirs:NUMBER)" in done.stderr


@pytest.mark.heavy
def test_two_packages_with_one_name_raise(tmp_path):
    twice = "one = theirs:PATTERN\ntwo = again:PATTERN"
    (tmp_path / "again.py").write_text("import toy\nPATTERN = toy.Toy('theirs')\n")
    done = with_entry_points(tmp_path, twice, NAMES)
    assert done.returncode != 0
    assert "ValueError: pattern name 'theirs' is taken" in done.stderr
    assert "theirs:PATTERN" in done.stderr and "again:PATTERN" in done.stderr
