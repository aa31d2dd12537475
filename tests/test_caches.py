"""Inductor's caches stay on and correct: a second process gets hits, and every relevant change is
a miss."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from processes import ROOT, TESTS, python

PROGRAM = """
import json, os, sys, torch, sparse_inductor, toy
from torch._dynamo.utils import counters
sparse_inductor.register(toy.Toy())
arguments = json.loads(sys.argv[1])

def fn(x):
    return torch.relu(x + 1) * 2

def hits():
    return [counters["aot_autograd"]["autograd_cache_hit"], counters["aot_autograd"]["autograd_cache_miss"],
            counters["inductor"]["fxgraph_cache_bypass"], counters["aot_autograd"]["autograd_cache_bypass"]]

exec(arguments.get("before", ""))
if arguments.get("way", "enable") == "enable":
    sparse_inductor.enable(**arguments.get("enable", {}))
    options = None
else:
    options = sparse_inductor.options(**arguments.get("enable", {}))

def once(train):
    torch._dynamo.reset()
    counters.clear()
    before = len(sparse_inductor.report().rewrites)
    x = torch.arange(-3.0, 3.0, requires_grad=train)
    y = torch.compile(fn, options=options)(x)
    assert torch.equal(y, fn(x)), y
    if train:
        y.sum().backward()
        assert torch.equal(x.grad, 2.0 * (x + 1 > 0)), x.grad
    return {"cache": hits(), "rewrites": [r.location for r in sparse_inductor.report().rewrites[before:]]}

result = once(False)
if arguments.get("train"):
    result["trained"] = once(True)
result["then"] = []
for change in arguments.get("then", []):
    exec(change)
    result["then"].append(once(False))
print(json.dumps(result))
"""

# A model with two families; it saves its cache artifacts to a file or loads them from it.
MODEL = """
import json, sys, torch, sparse_inductor
from pathlib import Path
from programs import batch, encoder
from torch._dynamo.utils import counters

arguments = json.loads(sys.argv[1])
file = Path("artifacts")
if arguments.get("load"):
    torch.compiler.load_cache_artifacts(file.read_bytes())
sparse_inductor.enable()
model = encoder()
wanted = model(*batch())
got = torch.compile(model)(*batch())
got.sum().backward()
torch.testing.assert_close(got, wanted)
if arguments.get("save"):
    file.write_bytes(torch.compiler.save_cache_artifacts()[0])
aot, report = counters["aot_autograd"], sparse_inductor.report()
print(json.dumps({
    "cache": [aot["autograd_cache_hit"], aot["autograd_cache_miss"], counters["inductor"]["fxgraph_cache_bypass"],
              aot["autograd_cache_bypass"]],
    "patterns": sorted({r.pattern for r in report.rewrites}), "report": str(report),
}))
"""


# A replacement of the function with blocks that run as written and count their active neurons.
COUNTED = """
from sparse_inductor.policy.worth import Worth
from sparse_inductor.selection import registered

type(registered()["relu_ffn"]).worth = lambda *_: Worth(0.05, "for this test")
weights = [torch.eye(8, 6) for _ in range(3)]

def fn(x):
    x = x[None]
    for weight in weights:
        x = x + torch.relu(x @ weight.t()) @ weight
    return x
"""


@pytest.fixture
def run(tmp_path):
    """Returns a function that runs PROGRAM in a new process, on copies of the package and the toy
    pattern, with one cache folder."""
    tree, skipped = tmp_path / "tree", shutil.ignore_patterns("__pycache__")
    for folder in ("sparse_inductor", "patterns"):
        if (ROOT / folder).is_dir():
            shutil.copytree(ROOT / folder, tree / folder, ignore=skipped)
    shutil.copy(ROOT / "pyproject.toml", tree)  # so that the copy counts as a checkout
    shutil.copy(TESTS / "toy.py", tree)
    shutil.copy(TESTS / "programs.py", tree)
    (tree / "program.py").write_text(PROGRAM)
    (tree / "model.py").write_text(MODEL)

    def run(program="program.py", cache="cache", env=(), **arguments):
        variables = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / cache), **dict(env)}
        without = [name for name in os.environ if name.startswith("TRITON_")]
        given = json.dumps(arguments)
        done = python(program, given, cwd=tree, path=[tree], without=without, **variables)
        return json.loads(done.stdout.splitlines()[-1])

    run.tree = tree
    return run


HIT, MISS, BYPASSED = [1, 0, 0, 0], [0, 1, 0, 0], "bypassed"


def state(result) -> list[int] | str:
    return BYPASSED if any(result["cache"][2:]) else result["cache"]


@pytest.mark.parametrize("way", ["enable", pytest.param("options", marks=pytest.mark.heavy)])
def test_a_second_process_hits_and_its_report_is_complete(run, way):
    first, second = (run(way=way, train=True) for _ in range(2))
    for before, after in ((first, second), (first["trained"], second["trained"])):
        assert state(before) == MISS and state(after) == HIT
        assert before["rewrites"] == after["rewrites"] == ["program.py:8"]


@pytest.mark.heavy
def test_a_second_process_hits_where_blocks_are_counted(run):
    def counted(seed):
        told = ["result['report'] = str(sparse_inductor.report())"]
        names = {"PYTHONHASHSEED": seed}
        return run(before=COUNTED, then=told, enable={"policy": "auto"}, env=names)

    first, second = map(counted, "12")
    assert first["report"].count("not counted yet") == 3
    assert state(first) == MISS and state(second) == HIT


def test_a_changed_option_misses(run):
    skip, only = (f"sparse_inductor.enable({name}='toy')" for name in ("skip", "only"))
    environment = "os.environ['SPARSE_INDUCTOR_SKIP'] = 'toy'; sparse_inductor.enable()"
    result = run(then=[skip, only, environment])
    unrewritten, others, left_out = result["then"]
    assert state(result) == state(unrewritten) == state(left_out) == MISS
    assert unrewritten["rewrites"] == left_out["rewrites"] == []
    assert state(others) == (MISS if other_patterns() else HIT)


def other_patterns() -> bool:
    return any((ROOT / "patterns").glob("[a-z]*.py"))


@pytest.mark.heavy
def test_an_edited_source_misses(run):
    assert state(run()) == MISS
    for edited in ("toy.py", "sparse_inductor/kernels/__init__.py", "patterns/splade_head.py"):
        file = run.tree / edited
        if file.exists():
            file.write_text(file.read_text() + "\n# edited\n")
            assert state(run()) == MISS, edited
    (run.tree / "patterns").mkdir(exist_ok=True)
    (run.tree / "patterns" / "_helper.py").write_text("")
    assert state(run()) == MISS, "a new file"
    assert state(run()) == HIT


@pytest.mark.heavy
def test_a_pattern_without_source_turns_caching_off(run):
    before = (
        "scope = {'__name__': '__main__', 'Toy': toy.Toy}\n"
        "exec('class Nowhere(Toy): pass', scope)\n"
        "scope['Nowhere'].__module__ = 'nowhere'\n"
        "sparse_inductor.register(scope['Nowhere']('nowhere'))"
    )
    assert state(run(before=before)) == BYPASSED


@pytest.mark.heavy
def test_the_users_uncacheable_pass_stays_uncacheable(run):
    before = "from torch._inductor import config\nconfig.joint_custom_pre_pass = lambda graph: None"
    first = run(before=before)
    assert state(first) == BYPASSED and first["rewrites"]


# Models

BOTH = ["entmax_attention", "splade_head"]


@pytest.mark.heavy
def test_a_model_starts_warm_in_a_new_process_and_on_another_machine(run):
    """A second process reuses the rewritten code, and has the whole report. So does a machine with an empty cache that
    loads the artifacts of torch.compiler.save_cache_artifacts; with another version of the package it compiles again.

    This is one test because compilation takes most of its time. `python -m benchmarks tools` measures the start-up.
    """
    cold = run("model.py", save=True)
    warm = run("model.py")
    assert state(cold) == MISS and state(warm) == HIT
    assert cold["patterns"] == warm["patterns"] == BOTH
    assert sections(warm["report"]) == sections(cold["report"])

    there = run("model.py", cache="there", load=True)
    assert state(there) == HIT and there["patterns"] == BOTH

    source = run.tree / "sparse_inductor" / "__init__.py"
    source.write_text(source.read_text().replace('__version__ = "', '__version__ = "9.'))
    assert '"9.' in source.read_text()
    newer = run("model.py", cache="elsewhere", load=True)
    assert state(newer) == MISS and newer["patterns"] == BOTH


def sections(report: str) -> list[str]:
    """Return the lines of the report without its first line and without suffixes such as "  (3 times)"."""
    return [line.partition("  (")[0] for line in report.splitlines()[1:]]
