"""The example service has the results of a brute-force search of its documents, over HTTP."""

from __future__ import annotations

import importlib.util
import random
import sys
import urllib.error
from itertools import pairwise
from pathlib import Path

import pytest

from processes import threads

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

FILE = Path(__file__).parent.parent / "examples" / "search_service.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("search_service", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def texts(names, seed=0):
    draw = random.Random(seed)
    return {n: {str(draw.randrange(30)): draw.random() + 0.1 for _ in range(5)} for n in names}


def best(documents, query, k):
    scores = {
        name: sum(w * terms.get(t, 0.0) for t, w in query.items())
        for name, terms in documents.items()
    }
    return sorted(scores.values(), reverse=True)[:k]


def test_documents_come_change_and_go(example, tmp_path):
    file = tmp_path / "collection"
    documents, query = texts("abcdefgh"), {"3": 1.0, "7": 0.5, "11": 2.0, "20": 1.0}

    def check(address):
        (found,) = example.ask(address, "POST", "/search", {"queries": [query], "k": 5})["results"]
        assert [one["score"] for one in found] == pytest.approx(best(documents, query, 5))
        assert len({one["id"] for one in found} & {*documents}) == len(found)

    with example.running(example.Collection(file)) as address:
        assert example.ask(address, "PUT", "/documents", documents) == {"replaced": 0}
        check(address)
        changed = texts("ab", seed=1)
        documents.update(changed)
        assert example.ask(address, "PUT", "/documents", changed) == {"replaced": 2}
        assert example.ask(address, "DELETE", "/documents", ["c", "nobody"]) == {"deleted": 1}
        del documents["c"]
        check(address)
        body = {"queries": [query, {}], "k": 9, "allow": ["a", "c", "e", "nobody"]}
        for found in example.ask(address, "POST", "/search", body)["results"]:
            assert {one["id"] for one in found} == {"a", "e"}
        body = {"queries": [query], "k": 2, "offset": 1, "min_score": 0.01, "deny": ["d"]}
        whole = example.ask(address, "POST", "/search", {"queries": [query], "deny": ["d"]})
        (found,) = example.ask(address, "POST", "/search", body)["results"]
        assert found == [one for one in whole["results"][0][1:3] if one["score"] >= 0.01]
        assert example.ask(address, "GET", "/health") == {"documents": 7}
    with example.running(example.Collection(file)) as address:  # the saved documents
        check(address)
        assert example.ask(address, "PUT", "/documents", {"c": {"3": 1.0}}) == {"replaced": 0}


@pytest.mark.parametrize(
    ("method", "path", "body", "said"),
    [
        ("PUT", "/documents", {"a": {"99999": 1.0}}, "term id 99999 is not in"),
        ("PUT", "/documents", {"a": {"word": 1.0}}, "invalid literal"),
        ("POST", "/search", {"k": 3}, "KeyError: 'queries'"),
        ("POST", "/search", {"queries": [{"1": 1.0}], "k": -1}, "k must be"),
    ],
)
def test_what_is_refused_changes_nothing(example, method, path, body, said):
    collection = example.Collection()
    collection.put(texts("ab"))
    with example.running(collection) as address:
        with pytest.raises(urllib.error.HTTPError) as refused:
            example.ask(address, method, path, body)
        assert refused.value.code == 400 and said in refused.value.read().decode()
        assert example.ask(address, "GET", "/health") == {"documents": 2}
        assert "a" in collection.index and "b" in collection.index


def test_searches_while_documents_are_replaced(example):
    collection = example.Collection()
    collection.put(texts(map(str, range(50))))
    wrong = []
    with example.running(collection) as address:

        def client():
            for seed in range(15):
                (query,) = texts("q", seed).values()
                (found,) = example.ask(address, "POST", "/search", {"queries": [query], "k": 20})[
                    "results"
                ]
                if len(found) != 20 or any(f["score"] < g["score"] for f, g in pairwise(found)):
                    wrong.append(found)

        with threads(*[client] * 4):
            for n in range(20):
                example.ask(address, "PUT", "/documents", texts([str(n)], seed=n))
        assert wrong == []
        assert example.ask(address, "GET", "/health") == {"documents": 50}
