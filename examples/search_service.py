"""A search service over HTTP. Documents have ids of your choice; adding, replacing and deleting take effect at once.

    python examples/search_service.py --port 8000 [--file collection]     serve (needs starlette and uvicorn)
    python examples/search_service.py --load [--small]                    serve, and run a load test

    PUT    /documents    {"a": {"17": 0.5, "40": 1.25}, ...}    term weights of each document; replaces existing ones
    DELETE /documents    ["a", ...]
    POST   /search       {"queries": [{"17": 1.0}], "k": 10, "allow": ["a", ...], "deny": [...], "offset": 0,
                          "min_score": 0.5}    only the queries are required
    GET    /health, /metrics

Searches run in threads, and each sees a consistent state of the documents. Writes wait for each other. With --file, the
collection is loaded at the start and saved atomically when the service ends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from sparse_inductor.index import NamedIndex

TERMS = 30522


class Collection:
    """A `NamedIndex` that takes terms as JSON and is stored in a file."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        there = file is not None and file.exists()
        self.index = NamedIndex.load(file) if there else NamedIndex(TERMS)

    def put(self, documents: Mapping[str, Mapping[str, float]]) -> int:
        """Add or replace documents; return the number of replaced documents."""
        replaced = self.index.put(documents.keys(), [terms_of(d) for d in documents.values()])
        if len(self.index.index) > 2 * len(self.index) + 10_000:
            self.index.compact()
        return replaced

    def search(self, queries: Sequence[Mapping[str, float]], **options: Any) -> list[Any]:
        """Return the best documents of each query, as names and scores."""
        found = self.index.search([terms_of(q) for q in queries], **options)
        return [[{"id": name, "score": score} for name, score in line] for line in found]

    def save(self) -> None:
        """Write the file, if one was given."""
        if self._file is not None:
            self.index.save(self._file)


def terms_of(weights: Mapping[str, float]) -> dict[int, float]:
    """Convert terms and weights from JSON."""
    return {int(term): float(weight) for term, weight in weights.items()}


def service(collection: Collection) -> Starlette:
    """Return the application."""
    seconds: dict[str, list[float]] = {"put": [], "delete": [], "search": []}
    refused = [0]

    async def timed(name: str, request: Request, work: Any) -> Response:
        start = time.perf_counter()
        try:
            found = await run_in_threadpool(work, await request.json())
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            refused[0] += 1
            return JSONResponse({"error": f"{type(error).__name__}: {error}"}, status_code=400)
        seconds[name].append(time.perf_counter() - start)
        del seconds[name][:-10_000]
        return JSONResponse(found)

    async def put(request: Request) -> Response:
        return await timed("put", request, lambda body: {"replaced": collection.put(body)})

    async def delete(request: Request) -> Response:
        return await timed(
            "delete", request, lambda body: {"deleted": collection.index.delete(body)}
        )

    async def search(request: Request) -> Response:
        def work(body: Any) -> Any:
            return {"results": collection.search(body.pop("queries"), **{"k": 10, **body})}

        return await timed("search", request, work)

    async def health(_: Request) -> Response:
        return JSONResponse({"documents": len(collection.index)})

    async def metrics(_: Request) -> Response:
        lines = [f"documents {len(collection.index)}", f"refused_total {refused[0]}"]
        for name, taken in seconds.items():
            lines.append(f'requests{{kind="{name}"}} {len(taken)}')
            if taken:
                lines.append(f'seconds{{kind="{name}",quantile="0.5"}} {statistics.median(taken)}')
                lines.append(f'seconds{{kind="{name}",quantile="1"}} {max(taken)}')
        return PlainTextResponse("\n".join(lines) + "\n")

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        collection.save()

    routes = [
        Route("/documents", put, methods=["PUT"]),
        Route("/documents", delete, methods=["DELETE"]),
        Route("/search", search, methods=["POST"]),
        Route("/health", health),
        Route("/metrics", metrics),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


@contextlib.contextmanager
def running(collection: Collection) -> Any:
    """Run the service in a thread, on a free port; yield its address."""
    server = uvicorn.Server(uvicorn.Config(service(collection), port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        _, port = server.servers[0].sockets[0].getsockname()
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def ask(address: str, method: str, path: str, body: Any = None) -> Any:
    """Send one request; return the JSON of the answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address + path, data, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def load(small: bool) -> None:
    """Search with eight clients while another one writes and deletes documents; print the times of the requests."""
    documents, seconds = (500, 2.0) if small else (50_000, 20.0)
    draw = random.Random(0)

    def text(length: int) -> dict[str, float]:
        return {str(int(TERMS * draw.random() ** 3)): draw.random() for _ in range(length)}

    with running(Collection()) as address:
        for first in range(0, documents, 5000):
            names = range(first, min(first + 5000, documents))
            ask(address, "PUT", "/documents", {f"d{n}": text(128) for n in names})
        end = time.monotonic() + seconds
        taken: list[float] = []

        def client() -> None:
            while time.monotonic() < end:
                start = time.perf_counter()
                found = ask(address, "POST", "/search", {"queries": [text(32)], "k": 10})
                taken.append(time.perf_counter() - start)
                assert len(found["results"][0]) == 10

        clients = [threading.Thread(target=client) for _ in range(8)]
        for each in clients:
            each.start()
        written = 0
        while time.monotonic() < end:
            ask(address, "PUT", "/documents", {f"d{draw.randrange(2 * documents)}": text(128)})
            ask(address, "DELETE", "/documents", [f"d{draw.randrange(2 * documents)}"])
            written += 1
        for each in clients:
            each.join()
        taken.sort()
        print(
            f"{documents:,} documents; {len(taken) / seconds:,.0f} searches a second by 8 clients,"
        )
        print(f"beside {written / seconds:,.0f} documents replaced and deleted a second;")
        middle, late = taken[len(taken) // 2], taken[int(0.99 * len(taken))]
        print(f"a search takes {middle * 1e3:.1f} ms (median), {late * 1e3:.1f} ms (99 %)")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="A search service over HTTP.")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--file", type=Path, help="where the collection is kept")
    parser.add_argument("--load", action="store_true", help="put load on a service of its own")
    parser.add_argument("--small", action="store_true", help="a little load")
    options = parser.parse_args()
    if options.load:
        load(options.small)
    else:
        uvicorn.run(service(Collection(options.file)), port=options.port)


if __name__ == "__main__":
    main()
