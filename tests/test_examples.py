"""The examples run and are rewritten; `make examples` runs each of them in full, both ways."""

from __future__ import annotations

import json

import pytest

from processes import ROOT, python

EXAMPLES = {
    "generate": (["transformers"], "relu_ffn"),
    "vision_transformer": (["transformers", "entmax"], "entmax_attention"),
    "trainer": (["transformers", "accelerate"], "splade_head"),
    "sparse_encoder": (["sentence_transformers"], "splade_head"),
    "index": (["transformers"], "splade_head"),
    "train_sae": ([], "topk_encode"),
}


@pytest.mark.heavy
@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name, tmp_path):
    packages, pattern = EXAMPLES[name]
    for package in packages:
        pytest.importorskip(package)
    command = ("-W", "ignore", ROOT / "examples" / f"{name}.py", "--small", "--side", "rewritten")
    python(*command, "--out", tmp_path / "found", path=[ROOT], timeout=500)
    result = json.loads((tmp_path / "found").read_text())
    assert any(pattern in said for said in result["patterns"]), result
    assert all(value == value for value in result["found"].values()), result
