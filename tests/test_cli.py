"""The command line: the output of each command, in a terminal and elsewhere, and its exit status."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import sparse_inductor
from planted import bug_named
from processes import ROOT, TESTS, python
from sparse_inductor import compat, doctor
from sparse_inductor.__main__ import load, main
from sparse_inductor.reporting import console
from support import heavy

MODEL = """
import torch
from torch import nn

class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = nn.Linear(8, 20)

    def forward(self, hidden, mask):
        logits = self.decoder(hidden)
        return (torch.log1p(torch.relu(logits)) * mask.unsqueeze(-1)).amax(1)

class Both(Head):
    def forward(self, hidden, mask):
        logits = self.decoder(hidden)
        return (torch.log1p(torch.relu(logits)) * mask.unsqueeze(-1)).amax(1), logits

ARGS = torch.randn(2, 6, 8), torch.ones(2, 6)
def head(): return Head(), ARGS
def both(): return Both(), ARGS
"""


def command(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    return python("-m", "sparse_inductor", *arguments, cwd=cwd, COLUMNS="100")


def in_a_terminal(*arguments: str, cwd: Path) -> str:
    """Run the command in a pseudo-terminal and return its output."""
    master, terminal = pty.openpty()
    path = f"{ROOT}{os.pathsep}{TESTS}"
    env = {**os.environ, "PYTHONPATH": path, "COLUMNS": "100", "TERM": "xterm-256color"}
    with subprocess.Popen(
        [sys.executable, "-m", "sparse_inductor", *arguments],
        env=env, cwd=cwd, stdin=terminal, stdout=terminal, stderr=terminal,
    ) as process:  # fmt: skip
        os.close(terminal)
        chunks = []
        while True:
            try:
                chunk = os.read(master, 4096)
            except OSError:  # the other side is closed
                break
            if not chunk:
                break
            chunks.append(chunk)
        process.wait(timeout=300)
    os.close(master)
    return b"".join(chunks).decode()


# Help


def test_help_names_the_commands_and_does_not_load_torch():
    code = (
        "import sys, sparse_inductor.__main__ as m\n"
        "try: m.main(['--help'])\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    done = python("-c", code)
    for name in ("demo", "doctor", "patterns", "explain", "verify", "index"):
        assert re.search(rf"^    {name} ", done.stdout, re.M)


# explain


def test_explain_as_plain_text(tmp_path):
    (tmp_path / "mine.py").write_text(MODEL)
    done = command("explain", "mine:head", cwd=tmp_path)
    assert done.stdout.startswith("sparse_inductor: 1 rewrite") and "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("returned", "args", "kwargs"),
    [
        ("model", (), {}),
        ("(model, 1, 2)", (1, 2), {}),
        ("(model, (1, 2))", (1, 2), {}),
        ("(model, [1, 2])", (1, 2), {}),
        ("(model, 1)", (1,), {}),
        ("(model, {'mask': 1})", (), {"mask": 1}),
    ],
)
def test_what_a_factory_returns(tmp_path, monkeypatch, returned, args, kwargs):
    (tmp_path / "factories.py").write_text(f"def model(): pass\ndef factory(): return {returned}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "factories", raising=False)
    fn, *given = load("factories:factory")
    assert fn.__name__ == "model" and given == [args, kwargs]


@pytest.mark.heavy
def test_explain_as_json(tmp_path):
    (tmp_path / "mine.py").write_text(MODEL)
    data = json.loads(command("explain", "mine:head", "--json", "--verify", cwd=tmp_path).stdout)
    assert data["rewrites"][0]["pattern"] == "splade_head"
    assert data["checks"][0]["verdict"] == "agrees"


@pytest.mark.skipif(importlib.util.find_spec("rich") is None, reason="needs rich")
@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        heavy("head", ["rewritten", "mine.py:12", "sparse_inductor::splade_head", "values and"]),
        heavy("both", ["not rewritten, but nearly", "the logits are also", "mine.py:16"]),
    ],
)
def test_explain_as_tables_in_a_terminal(tmp_path, name, wanted):
    (tmp_path / "mine.py").write_text(MODEL)
    text = in_a_terminal("explain", f"mine:{name}", "--verify", cwd=tmp_path)
    assert "\x1b[1m" in text and "──" in text
    for part in wanted:
        assert part in text, text


# patterns and demo


def test_patterns_are_listed(capsys):
    assert main(["patterns"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["pattern", "operator", "rewrites"]
    assert any(line.startswith("splade_head ") for line in lines)


def test_patterns_as_json(capsys):
    assert main(["patterns", "--json"]) == 0
    found = {p["pattern"]: p["operator"] for p in json.loads(capsys.readouterr().out)}
    assert found["splade_head"] == "sparse_inductor::splade_head"


def test_the_version_is_said(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"sparse_inductor {sparse_inductor.__version__}\n"


# verify and index


@pytest.mark.parametrize(("wrong", "status"), [(False, 0), (True, 1)])
def test_the_exit_status_says_whether_a_rewrite_is_right(
    tmp_path, monkeypatch, capsys, wrong, status
):
    (tmp_path / "verified.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    with bug_named("bias dropped").plant() if wrong else contextlib.nullcontext():
        assert main(["verify", "verified:head", "--json"]) == status
    (check,) = json.loads(capsys.readouterr().out)["checks"]
    assert check["verdict"] == ("differs" if wrong else "agrees")


def test_verify_fails_where_nothing_is_rewritten(tmp_path, monkeypatch, capsys):
    (tmp_path / "nothing.py").write_text("def f(): return 1")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["verify", "nothing:f", "--policy", "never"]) == 1
    assert capsys.readouterr().err.endswith("nothing was rewritten, so nothing was checked\n")


def test_verify_rewrites_what_gains_nothing_unless_told_otherwise(tmp_path, monkeypatch, capsys):
    (tmp_path / "small.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("SPARSE_INDUCTOR_POLICY", raising=False)
    assert main(["verify", "small:head", "--json"]) == 0
    assert main(["verify", "small:head", "--json", "--policy", "never"]) == 1
    monkeypatch.setenv("SPARSE_INDUCTOR_POLICY", "never")
    assert main(["verify", "small:head", "--json"]) == 1


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("no_such_module:f", "load no_such_module:f: ModuleNotFoundError: No module named"),
        ("odd.py:f", "load odd.py:f: ValueError: did you mean odd:f?"),
        ("./odd.py:f", "load ./odd.py:f: ValueError: did you mean odd:f?"),
        ("odd:absent", "load odd:absent: AttributeError: there is no 'absent' in it; it has fails"),
        ("odd:takes", "load odd:takes: TypeError: takes() missing 1 required"),
        ("odd:raises", "load odd:raises: RuntimeError: no weights"),
        ("odd:fails", "run odd:fails: TorchRuntimeError: "),
    ],
)
def test_what_cannot_be_explained_is_said_in_one_line(tmp_path, monkeypatch, capsys, target, said):
    (tmp_path / "odd.py").write_text(
        "import torch\n"
        "def takes(x): return x\n"
        "def raises(): raise RuntimeError('no weights')\n"
        "def fails(): return torch.nn.Linear(2, 3), (torch.ones(1, 5),)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["explain", target]) == 2
    *logged, line = capsys.readouterr().err.splitlines()
    assert line.startswith(f"cannot {said}")
    # torch 2.14 logs a shape that fails.
    assert not logged or "_subclasses/fake_tensor.py" in logged[0]


def test_a_page_that_cannot_be_written_is_named(tmp_path, capsys, monkeypatch):
    (tmp_path / "plain.py").write_text("def f(): return None\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["explain", "plain:f", "--html", str(tmp_path)]) == 2
    said = f"--html: cannot write {tmp_path}: Is a directory\n"
    assert capsys.readouterr().err.endswith(said)


def test_a_page_in_no_folder_is_refused_before_anything_runs(tmp_path, capsys):
    assert main(["explain", "odd:f", "--html", str(tmp_path / "none" / "page.html")]) == 2
    assert capsys.readouterr().err == f"--html: there is no folder {tmp_path / 'none'}\n"


def test_what_a_saved_index_holds(tmp_path, capsys):
    rows = torch.eye(3, 5).to_sparse_csr()
    index = sparse_inductor.SparseIndex.build(rows)
    index.delete([1])
    index.save(tmp_path / "three.index")
    assert main(["index", str(tmp_path / "three.index"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    counted = [facts[name] for name in ("documents", "not deleted", "terms", "postings")]
    assert counted == [3, 2, 5, 3] and facts["weights"] == "float32"
    assert main(["index", str(tmp_path / "three.index")]) == 0
    assert re.search(r"^ *documents +3$", capsys.readouterr().out, re.M)
    (tmp_path / "text").write_text("no index")
    assert main(["index", str(tmp_path / "text")]) == 2
    assert capsys.readouterr().err.startswith(f"cannot load {tmp_path / 'text'}: ")


def test_demo_hands_its_arguments_on(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "--help"])
    assert stopped.value.code == 0 and "--model" in capsys.readouterr().out


def test_demo_without_the_source_tree_says_where_it_is(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "benchmarks.demo.__main__", None)
    assert main(["demo"]) == 2
    assert "source tree" in capsys.readouterr().err


def test_an_unknown_option_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["patterns", "--nonsense"])
    assert "--nonsense" in capsys.readouterr().err


# doctor


def test_doctor_runs_every_operator(capsys):
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    for text in ("versions", f"torch            {torch.__version__}", "C++ compiler", "cache"):
        assert text in said
    from sparse_inductor.pattern import registered

    for pattern in registered().values():
        assert re.search(rf"ok  {pattern.op} +values.* agree with a reference", said)


def by_name(findings) -> dict[str, doctor.Finding]:
    return {f.name: f for f in findings}


def test_doctor_finds_a_wrong_operator():
    with bug_named("gradient of the bias dropped").plant():
        found = by_name(doctor.diagnose())["sparse_inductor::splade_head"]
    assert found.status == "fail" and "gradient" in found.value
    assert "SPARSE_INDUCTOR_SKIP=splade_head" in found.advice


@pytest.mark.breaks_pattern
def test_doctor_finds_a_pattern_that_does_not_match(monkeypatch):
    pattern = SimpleNamespace(
        **{n: getattr(doctor.registered()["splade_head"], n) for n in ("name", "op")}
    )
    pattern.examples = doctor.registered()["splade_head"].near_misses
    found = doctor._operator(pattern, "cpu")
    assert found.status == "fail" and "also returned" in found.value


@pytest.mark.parametrize(
    ("variables", "name", "status", "advice"),
    [
        ({"TORCHDYNAMO_DISABLE": "1"}, "TORCHDYNAMO_DISABLE", "fail", "unset"),
        ({"SPARSE_INDUCTOR_SKIP": "entmax"}, "SPARSE_INDUCTOR_SKIP", "note", "left out"),
        ({"TORCHINDUCTOR_CACHE_DIR": "/proc/nowhere"}, "Inductor's cache", "fail", "set TORCHINDUCTOR_CACHE_DIR"),
        ({"PATH": "", "CXX": ""}, "C++ compiler", "fail", "apt-get install g++"),
    ],
)  # fmt: skip
def test_doctor_says_what_to_change(monkeypatch, variables, name, status, advice):
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    if torch.cuda.is_available() and name == "C++ compiler":
        status = "warn"
    found = by_name(doctor.diagnose(operators=False))[name]
    assert found.status == status and advice in found.advice


def test_doctor_sees_inductors_passes_being_off():
    with compat.patched_settings(use_pre_grad_passes=False):
        assert by_name(doctor.diagnose(operators=False))["use_pre_grad_passes"].status == "fail"


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("2.10.1", "fail"),
        ("2.11.0+cu130", "ok"),
        ("2.13.0", "ok"),
        ("2.14.1", "ok"),
        ("2.15.0.dev1", "warn"),
    ],
)
def test_doctor_knows_the_tested_versions(version, status):
    assert doctor._version("torch", version, doctor.TESTED_TORCH).status == status


def test_the_exit_status_says_whether_something_fails(capsys):
    fine, bad = doctor.Finding("g", "a", "1"), doctor.Finding("g", "b", "2", "fail", "do this")
    assert doctor.show([fine]) == 0 and "nothing to do" in capsys.readouterr().out
    assert doctor.show([fine, bad]) == 1
    assert "FAIL  b" in (out := capsys.readouterr().out) and "do this" in out


# Tables


def test_a_plain_table_is_aligned():
    assert console.plain_table(("a", "long"), [("1234", "x"), ("5", "")], "title") == (
        "title\n  a     long\n  1234  x\n  5"
    )


# Imports


IMPORTS = """
import sys, torch
seen = {*sys.modules}
def added():
    new = {*sys.modules} - seen
    seen.update(new)
    return new
import sparse_inductor
sparse_inductor.__version__
print(*added())
torch.compile(lambda x: x)
added()
sparse_inductor.enable()
print(*added())
sparse_inductor.explain(lambda x: x + 1, torch.ones(2))
print(*added())
"""


def test_what_is_imported():
    """Importing the package imports nothing else. `enable()` imports what `torch.compile` imports, and no kernels.

    A graph without rewrites defines no operators.
    """
    said = python("-c", IMPORTS).stdout
    imported, enabled, explained = (line.split() for line in said.splitlines())
    assert imported == ["sparse_inductor"]
    assert {name.partition(".")[0] for name in enabled} <= {"sparse_inductor", "entmax"}, enabled
    kernels = {name for name in enabled if name.startswith("sparse_inductor.kernels.")}
    assert kernels == {"sparse_inductor.kernels.common", "sparse_inductor.kernels.common.arch"}
    own = {name for name in (*enabled, *explained) if name.startswith("sparse_inductor.")}
    assert not {name for name in own if name.startswith("sparse_inductor.ops")}
