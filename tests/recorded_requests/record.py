"""Send all requests, and write or compare the record: one JSON object per line and request.

    python tests/recorded_requests/record.py [MODEL ...]

needs MINILM_BUNDLE, the directory of an exported MiniLM, for the model `embedder`.
"""

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from operator import methodcaller
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from google.protobuf import json_format

from recorded_requests import native, routes
from recorded_requests.play import SERVICES, Record, Target, message_of, native_error, pieces, shortened
from stored_bundle import STORED_BUNDLE

DIRECTORY = Path(__file__).parent
NATIVE = "/v1/attnlens/"
METHODS_BY_PATH = {
    "encode_stream" if method == "EncodeStream" else method.lower(): method
    for method in native.USUAL
    if method not in ("ListModels", "GetModel")
}
RESTRICTED_KEY, METRICS_KEY = "restricted", "prometheus"
MALFORMED = b"\x12\xff\xff"


class Model(NamedTuple):
    """Requests to one model.

    Attributes:
        calls: gRPC requests.
        bodies: Bodies of HTTP requests.
        has_all: Whether it also receives the requests that are the same for all models.
    """

    calls: dict[str, list[native.Fields]]
    bodies: routes.Bodies
    has_all: bool = False


MODELS = {
    "embedder": Model(native.EMBEDDER, routes.EMBEDDER, has_all=True),
    "reranker": Model(native.RERANKER, routes.RERANKER),
    "topics": Model(native.TOPICS, routes.TOPICS),
    "plain": Model(native.PLAIN, routes.PLAIN),
}
"""An embedding model, a reranker, a classifier, and `STORED_BUNDLE`."""
Call = Callable[[Any], Record]


def plays(model: Model) -> Iterator[tuple[str, Call]]:
    """Yield the name of each request, and a function that sends it to a target."""
    grpc = SERVICES["grpc"].methods_by_name
    for method, name, fields in native.requests(model.calls):
        try:
            message = message_of(grpc[method], fields)
        except json_format.ParseError:
            continue
        yield f"grpc {method} {name}", methodcaller("call", "grpc", method, message)
    for method, name, fields in native.requests(model.calls):
        if path := next((path for path, called in METHODS_BY_PATH.items() if called == method), None):
            path = NATIVE + path
            yield f"POST {path} {name}", methodcaller("request", "POST", path, fields, {})
    for path, name, body in pieces(model.bodies | (routes.NATIVE if model.has_all else {})):
        yield f"POST {path} {name}", methodcaller("request", "POST", path, body, _headers(path))
    if model.has_all:
        yield from _once()


def _headers(path: str) -> dict[str, str]:
    return {"Content-Type": "application/json"} if path == "/page" else {}


def _once() -> Iterator[tuple[str, Call]]:
    """Yield requests that are the same for all models."""
    for method, name, fields in pieces(routes.INFERENCE):
        message = message_of(SERVICES["oip"].methods_by_name[method], fields)
        yield f"oip {method} {name}", methodcaller("call", "oip", method, message)
    for method in ("Embed", "EncodeStream"):
        yield f"grpc {method} malformed", methodcaller("call", "grpc", method, MALFORMED)
    for path in routes.GETS:
        yield f"GET {path}", methodcaller("request", "GET", path, None, {})
    for method, path, headers in routes.OTHERS:
        sent = {"input": native.TEXT} if method == "POST" else None
        name = f"{method} {path} {native.shorten(headers)[:80]}"
        yield name, methodcaller("request", method, path, sent, headers)


def restricted_plays() -> Iterator[tuple[str, Call]]:
    """Yield one request to each method and route without a key, and with a key that may only embed."""
    for client in ("nobody", "restricted"):
        sent = {} if client == "nobody" else {"authorization": f"Bearer {RESTRICTED_KEY}"}
        for service, usual in (("grpc", native.USUAL), ("oip", {name: [] for name in routes.INFERENCE})):
            for method in usual:
                fields = native.USUAL[method] if service == "grpc" else routes.INFERENCE[method][0]
                message = message_of(SERVICES[service].methods_by_name[method], fields)
                name = f"{client} {service} {method}"
                yield name, methodcaller("call", service, method, message, sent)
        for path in dict.fromkeys(routes.GETS):
            yield f"{client} GET {path}", methodcaller("request", "GET", path, None, sent)
        bodies = {
            path: bodies[0] for path, bodies in (routes.EMBEDDER | routes.RERANKER | routes.NATIVE).items()
        }
        bodies |= {NATIVE + path: native.USUAL[method] for path, method in METHODS_BY_PATH.items()}
        for path, body in bodies.items():
            headers = sent | _headers(path)
            yield f"{client} POST {path}", methodcaller("request", "POST", path, body, headers)


def played(requests: Iterable[tuple[str, Call]], target: Any) -> dict[str, Record]:
    """Send requests, and return what is visible of each by its name.

    Records of JSON requests that fail in the same way as over gRPC are omitted.
    """
    records: dict[str, Record] = {}
    for name, play in requests:
        assert name not in records, f"two requests have the name {name}"
        records[name] = play(target)
    for name in [name for name in records if name.startswith(f"POST {NATIVE}")]:
        method, _, fields = name.removeprefix(f"POST {NATIVE}").partition(" ")
        called = records.get(f"grpc {METHODS_BY_PATH.get(method)} {fields}", {})
        if "reason" in called and records[name].get("reply") == native_error(called):
            del records[name]
    return {name: shortened(record) for name, record in records.items()}


def read(name: str) -> dict[str, Record]:
    """Return the record of a model."""
    lines = (DIRECTORY / f"{name}.jsonl").read_text("utf-8").splitlines()
    return dict(map(json.loads, lines))


def write(name: str, records: dict[str, Record]) -> None:
    """Write the record of a model."""
    lines = [json.dumps(each, ensure_ascii=False, separators=(",", ":")) for each in records.items()]
    (DIRECTORY / f"{name}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")


def restricted(directory: Path) -> Target:
    """Return a server with `RESTRICTED_KEY`, whose files are written into a directory."""
    keys, policy = directory / "keys", directory / "policy.toml"
    lines = [
        f"{key} sha256:{hashlib.sha256(key.encode()).hexdigest()}\n" for key in (RESTRICTED_KEY, METRICS_KEY)
    ]
    keys.write_text("".join(lines))
    allowed = f'[default]\nmethods = ["embeddings"]\n[clients.{METRICS_KEY}]\nmethods = ["Metrics"]\n'
    policy.write_text(allowed)
    return Target(STORED_BUNDLE, "--api-keys", str(keys), "--policy", str(policy), metrics_key=METRICS_KEY)


def bundle_of(name: str, directory: Path) -> Path:
    """Return the bundle of a model, which is exported into a directory if necessary."""
    if name == "embedder":
        return Path(os.environ["MINILM_BUNDLE"])
    if name == "plain":
        return STORED_BUNDLE
    from small_bundles import export_classifier  # noqa: PLC0415 - imports torch

    return export_classifier(name, directory)


def main(names: list[str]) -> None:
    """Write the records."""
    for name in names or [*MODELS, "restricted"]:
        with tempfile.TemporaryDirectory() as temporary:
            directory = Path(temporary)
            is_restricted = name == "restricted"
            requests = restricted_plays() if is_restricted else plays(MODELS[name])
            with restricted(directory) if is_restricted else Target(bundle_of(name, directory)) as target:
                write(name, played(requests, target))


if __name__ == "__main__":
    main(sys.argv[1:])
