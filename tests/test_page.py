"""explain() as a page: its contents, and its layout in a browser at laptop and phone width."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import struct
import subprocess

import pytest
import torch
from torch import nn

import sparse_inductor
from planted import bug_named
from processes import python
from sparse_inductor.explanation.drawing import Box, draw, fold, merge, subgraph
from sparse_inductor.reporting.graphs import GraphNode
from sparse_inductor.reporting.source import Source
from support import heavy

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome on the path")


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = nn.Linear(8, 40)

    def forward(self, hidden, mask):
        logits = self.decoder(hidden)
        values = torch.log1p(torch.relu(logits)) * mask.unsqueeze(-1)
        return values.amax(1)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.sigmoid(self.up(x)) * 2 - 1)


class Encoder(nn.Module):
    """A model with some layers, a head that is rewritten, a near miss, and a graph break."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head, self.other = Head(), nn.Linear(8, 30)

    def forward(self, hidden, mask):
        for layer in self.layers:
            hidden = layer(hidden)
        first = self.head(hidden, mask)
        scores = self.other(hidden)  # <b>not markup</b>
        second = (torch.log1p(torch.relu(scores)) * mask.unsqueeze(-1)).amax(1)
        torch._dynamo.graph_break()
        return first + 1, second, scores


ARGS = torch.randn(2, 6, 8), torch.ones(2, 6)


def page(layers: int, **options) -> str:
    torch.manual_seed(0)
    return sparse_inductor.explain(Encoder(layers), *ARGS, **options).to_html("my.model:encoder")


@pytest.fixture(scope="module")
def small() -> str:
    return page(1, verify=True)


@pytest.fixture(scope="module")
def large() -> str:
    """An explanation of a graph with two thousand nodes."""
    return page(205)


# Contents


def test_the_page_loads_nothing(small):
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#)""", small)
    assert "@import" not in small and "url(" not in small


def test_it_shows_the_users_lines(small):
    marked = re.findall(r'<span class="row replaced"><i>\d+</i>(.*?)</span>', small)
    assert [line.strip() for line in marked] == [
        "logits = self.decoder(hidden)",
        "values = torch.log1p(torch.relu(logits)) * mask.unsqueeze(-1)",
        "return values.amax(1)",
    ]


def test_a_near_miss_stands_at_its_line_with_its_reason(small):
    found = re.search(
        r'<span class="row near"><i>\d+</i>(.*?)</span></pre></div><div class="note">(.*?)</div>',
        small,
    )
    assert found is not None
    assert "scores = self.other(hidden)" in found[1] and "also" in found[2]
    assert "&lt;b&gt;not markup" in found[1]


def test_it_shows_the_subgraph_before_and_after(small):
    before, after = re.findall(r"<svg.*?</svg>", small, re.S)[:2]
    titles = re.findall(r'<g class="box replaced">.*?class="title"[^>]*>(.*?)<', before, re.S)
    assert set(titles) == {"linear", "relu", "log1p", "mul", "amax"}
    assert "sparse_inductor::splade_head" in after and 'class="box inserted"' in after


def test_it_says_what_was_checked_and_what_it_cost(small):
    assert "values and gradients agree with a reference" in small
    assert "explain(fn, *args, verify=True)" in page(1)
    assert re.search(r"<b>[\d.]+ ms</b><span>in the pass", small)
    assert "no longer kept for backward" in small and "graph breaks" in small


def test_what_verify_caught_is_at_the_top():
    with bug_named("bias dropped").plant():
        text = page(1, verify=True)
    assert text.index("Caught by verify") < text.index("<h2>Rewritten")
    assert 'class="card wrong"' in text


def test_a_function_with_nothing_in_it():
    text = sparse_inductor.explain(lambda x: x + 1, ARGS[0]).to_html()
    assert "Nothing to rewrite" in text and "Not rewritten, but nearly" not in text


def test_the_command_line_writes_it(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\ndef f():\n    return torch.relu, (torch.ones(3),)\n"
    )
    python("-m", "sparse_inductor", "explain", "mine:f", "--html", "page.html", cwd=tmp_path)
    assert "<title>mine:f" in (tmp_path / "page.html").read_text()


# Drawings


def node(name: str, *inputs: str, module: str = "", kind: str = "call") -> GraphNode:
    return GraphNode(name, kind, f"f({name})", name, inputs, "", Source(""), module)


CHAIN = [node("x", kind="input"), *(node(f"n{i}", f"n{i - 1}" if i else "x") for i in range(100))]


def test_a_subgraph_has_what_it_reads_and_who_reads_it():
    boxes = subgraph(CHAIN, ["n3", "n4"], "replaced")
    assert [(b.name, b.kind) for b in boxes] == [
        ("n2", "context"), ("n3", "replaced"), ("n4", "replaced"), ("n5", "context"),
    ]  # fmt: skip


def test_the_middle_of_a_large_subgraph_is_one_box():
    boxes = subgraph(CHAIN, [f"n{i}" for i in range(90)], "replaced", most=10)
    assert len(boxes) == 1 + 10 + 1 + 1
    assert [b.title for b in boxes if b.kind == "fold"] == ["80 operations"]
    draw(boxes, "no cycle")


def test_a_folded_graph_keeps_marked_nodes():
    nodes = [
        node(f"n{i}", *([f"n{i - 1}"] if i else []), module=f"layer.{i // 10}") for i in range(60)
    ]
    boxes, folds = fold(nodes, {"n25": "inserted"}, lambda n: n.module, "#fold-")
    assert [len(members) for _, members in folds] == [10, 10, 5, 4, 10, 10, 10]
    assert [b.name for b in boxes if b.kind == "inserted"] == ["n25"]
    assert boxes[0].link == "#fold-0"


def test_merging_keeps_the_edges():
    boxes = [
        Box("a", "a", "", (), "call"),
        Box("b", "b", "", ("a",), "call"),
        Box("c", "c", "", ("b",), "call"),
    ]
    first, second = merge(boxes, ["a", "b"], "")
    assert first.inputs == () and second.inputs == ("merged",)


# In a browser

MEASURE = """
<script>
addEventListener("load", () => {
  const inside = (a, b) =>
    a.left >= b.left - 1 && a.right <= b.right + 1 && a.top >= b.top - 1 && a.bottom <= b.bottom + 1;
  const found = {width: innerWidth, page: document.documentElement.scrollWidth, tight: [], overlapping: [], outside: [],
                 small: [], drawings: 0, boxes: 0};
  for (const card of document.querySelectorAll(".card, .chips li, h1, .source, .pair > div")) {
    const r = card.getBoundingClientRect();
    if (r.left < 0 || r.right > innerWidth) found.outside.push(card.className);
  }
  for (const svg of document.querySelectorAll("svg.graph")) {
    found.drawings++;
    const rects = [...svg.querySelectorAll("g.box")].map(g => {
      const rect = g.querySelector("rect").getBoundingClientRect();
      for (const text of g.querySelectorAll("text")) {
        const t = text.getBoundingClientRect();
        if (!inside(t, rect)) found.tight.push(text.textContent);
        if (t.height < 9) found.small.push(text.textContent);
      }
      return rect;
    });
    found.boxes += rects.length;
    rects.forEach((a, i) => rects.slice(i + 1).forEach(b => {
      if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1)
        found.overlapping.push([a.left, b.left]);
    }));
  }
  parent.postMessage(JSON.stringify(found), "*");
});
</script>
"""
# A browser's window has a minimum width, a frame has none.
FRAME = """<!doctype html><style>* {{ margin: 0; border: 0 }}</style>
<script>addEventListener("message", e => document.getElementById("measured").textContent = e.data)</script>
<iframe src="page.html" width="{width}" height="{height}"></iframe><pre id="measured"></pre>"""
SIZES = {"laptop": (1366, 900), "phone": (390, 844)}


def browse(*arguments: str) -> str:
    options = ["--headless", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=3000"]
    if os.geteuid() == 0:
        options.append("--no-sandbox")
    done = subprocess.run(
        [str(BROWSER), *options, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


@needs_browser
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("which", ["small", heavy("large")])
def test_it_looks_right_in_a_browser(which, size, request, tmp_path):
    text = request.getfixturevalue(which)
    (tmp_path / "page.html").write_text(text.replace("</body>", f"{MEASURE}</body>"))
    width, height = SIZES[size]
    frame, picture = tmp_path / "frame.html", tmp_path / "page.png"
    frame.write_text(FRAME.format(width=width, height=height))
    window = f"--window-size={max(500, width)},{height}"
    dom = browse(window, "--dump-dom", frame.as_uri())
    measured = json.loads(html.unescape(re.search(r'<pre id="measured">(.*?)</pre>', dom)[1]))
    assert measured["width"] == width
    assert measured["page"] <= width, "the page scrolls sideways"
    assert not measured["outside"]
    assert measured["drawings"] >= 3 and measured["boxes"] >= 15
    assert measured["boxes"] < 250, "too many to be read"
    assert not measured["tight"], "text leaves its box"
    assert not measured["small"]
    assert not measured["overlapping"]
    browse(window, f"--screenshot={picture}", frame.as_uri())
    data = picture.read_bytes()
    assert struct.unpack(">II", data[16:24]) == (max(500, width), height)
    assert len(data) > 20_000, "an empty page"


@pytest.mark.heavy
@needs_browser
def test_a_fold_opens_where_its_box_leads(large, tmp_path):
    file = tmp_path / "page.html"
    file.write_text(large)
    assert "<details id=" in large and " open" not in re.search(r"<details id=.*?>", large)[0]
    dom = browse("--dump-dom", f"{file.as_uri()}#graph-0-fold-0")
    assert re.search(r'<details id="graph-0-fold-0" open="">', dom)


@pytest.mark.heavy
def test_two_thousand_nodes_are_folded(large):
    nodes = int(re.search(r"<b>(\d+)</b><span>nodes", large)[1])
    assert nodes > 2000
    assert large.count("<svg") >= 3 and large.count('class="box') < 250
    assert len(large) < 1_000_000
