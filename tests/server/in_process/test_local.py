"""An in-process model and a server of the same bundle return bit-identical results."""

import asyncio
import dataclasses
import doctest
import itertools
import signal
import subprocess
import sys
import threading
import typing
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnlens_client
import attnlens_server
from attnlens_client import (
    AttentionQuery,
    AttnlensError,
    BlockingMethods,
    Client,
    DeadlineExceededError,
    InputTooLongError,
    InvalidRequestError,
    ModelNotFoundError,
    NotSupportedError,
    ResponseTooLargeError,
    UnavailableError,
)
from attnlens_server import Local, ServerConfig, in_process
from attnlens_server.config import ConfigError
from attnlens_server.core.process import State
from attnlens_server.errors import StartupError
from attnlens_server.in_process.local_model import LocalSettings
from served import ServerProcess

TEXTS = ["The animal didn't cross the street because it was too tired.", "", "Zoë 東京 😀", "word " * 90]
LONG = "word " * 300
Ask = Callable[[BlockingMethods], Any]


@pytest.fixture(scope="module")
def model(minilm_bundle: Path) -> Iterator[Local]:
    with attnlens_server.local(minilm_bundle) as model:
        yield model


@pytest.fixture
def client(minilm_server: ServerProcess) -> Iterator[Client]:
    with Client(minilm_server.address) as client:
        yield client


def same(one: Any, other: Any) -> bool:
    """Return whether two results are bit-identical, including types, arrays and dataclass fields."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        is_equal = one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
        return bool(is_equal and one.flags.writeable == other.flags.writeable)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return all(same(getattr(one, name), getattr(other, name)) for name in names)
    return bool(one == other)


CALLS: dict[str, Ask] = {
    "embed": lambda model: model.embed(TEXTS, pooling="cls", dimensions=100),
    "embed_with_usage": lambda model: model.embed_with_usage([*TEXTS, LONG], truncate=True, dtype="float16"),
    "embed_iter": lambda model: list(model.embed_iter(iter(TEXTS), batch_size=3)),
    "encode": lambda model: model.encode([*TEXTS, ("a", "b"), [101, 102]], attention=AttentionQuery()),
    "encode_stream": lambda model: list(
        model.encode_stream(TEXTS, attention=AttentionQuery(view="head_mean"))
    ),
    "encode_stream_parts": lambda model: list(
        model.encode_stream_parts(TEXTS[:1], attention=AttentionQuery(layers=[0]))
    ),
    "tokenize": lambda model: model.tokenize([*TEXTS, LONG]),
    "explain": lambda model: model.explain(TEXTS[:1], to="music", methods=["contributions", "rollout"]),
    "compare": lambda model: model.compare("A man plays.", "Music.", matrix="interaction", level="words"),
    "get_model": lambda model: model.get_model(),
    "list_models": lambda model: model.list_models(),
}


def test_every_method_is_compared() -> None:
    methods = {name for name, _ in vars(BlockingMethods).items() if not name.startswith("_")}
    of_classifiers = {"classify", "rerank", "score", "score_pairs"}  # ../test_classifiers.py
    assert methods - {"close"} - of_classifiers == CALLS.keys()


@pytest.mark.parametrize("method", CALLS)
def test_local_model_returns_the_same_results_as_a_server(method: str, client: Client, model: Local) -> None:
    assert same(CALLS[method](model), CALLS[method](client))


INVALID_CALLS: dict[str, tuple[type[AttnlensError], Ask]] = {
    "long": (InputTooLongError, lambda model: model.embed(["a", LONG])),
    "model": (ModelNotFoundError, lambda model: model.embed(["a"], model="nope")),
    "ids": (InvalidRequestError, lambda model: model.embed([[101, 999_999]])),
    "layer": (
        InvalidRequestError,
        lambda model: list(model.encode_stream(["a"], attention=AttentionQuery(layers=[6]))),
    ),
    "bytes": (InvalidRequestError, lambda model: model.tokenize(["a", "b" * 200_000])),
    "role": (
        InvalidRequestError,
        lambda model: model.encode(["a"], attention=AttentionQuery(role="head_gates")),
    ),
}


@pytest.mark.parametrize("case", INVALID_CALLS)
def test_local_model_raises_the_same_errors_as_a_server(case: str, client: Client, model: Local) -> None:
    kind, ask = INVALID_CALLS[case]
    failures = []
    for caller in (client, model):
        with pytest.raises(kind) as caught:
            ask(caller)
        failures.append(caught.value)
    assert failures[0].args == failures[1].args
    with pytest.raises(TypeError, match=r"Local\.embed\(\) has no argument 'poling'"):
        model.embed(["a"], poling="cls")  # type: ignore[call-arg]


def test_docstring_examples_of_the_methods_pass(minilm_bundle: Path, model: Local) -> None:
    names = {**vars(attnlens_client), "itertools": itertools, "client": model, "bundle": minilm_bundle}
    names["attnlens_server"] = attnlens_server
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    for kind in (BlockingMethods, in_process.local):
        for example in finder.find(kind, module=False, globs=names):
            runner.run(example)
    assert runner.summarize().failed == 0


def test_settings_match_those_of_a_server(minilm_bundle: Path) -> None:
    fields = {field.name: field.type for field in dataclasses.fields(ServerConfig)}
    of_server = typing.get_type_hints(ServerConfig)
    for name, kind in typing.get_type_hints(LocalSettings).items():
        assert name in fields
        assert kind == of_server[name]
    wrong: dict[str, Any]
    for wrong, message in (
        ({"thread": 2}, r"local\(\) has no option 'thread': did you mean 'threads'\?"),
        ({"port": 1}, "port is an option of servers, which"),
        ({"zzz": 1}, r"no option 'zzz': it has timeout_s, batch_size,"),
        ({"batch_size": 1.5}, "batch_size is 1.5: use an integer"),
    ):
        with pytest.raises(TypeError, match=message):
            attnlens_server.local(minilm_bundle, **wrong)
    with pytest.raises(ConfigError, match="threads is -1: use 0 to 1024"):
        attnlens_server.local(minilm_bundle, threads=-1)
    with pytest.raises(ConfigError, match="threads is '2': use an integer"):
        attnlens_server.local(minilm_bundle, threads="2")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_tokens is 513"):
        attnlens_server.local(minilm_bundle, max_tokens=513)
    with pytest.raises(ValueError, match="timeout_s is 0"):
        attnlens_server.local(minilm_bundle, timeout_s=0)


def test_invalid_bundle_raises_the_same_error_as_a_server(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"is not a bundle: manifest.json cannot be read"):
        attnlens_server.local(tmp_path)


def test_limits_and_deadline_are_enforced(minilm_bundle: Path) -> None:
    with attnlens_server.local(
        minilm_bundle, explain=False, max_response_bytes=1 << 17, max_request_text_bytes=1 << 17
    ) as small:
        with pytest.raises(ResponseTooLargeError, match="131072"):
            small.encode([TEXTS[3]], attention=AttentionQuery())
        query = AttentionQuery(layers=[0], heads=[0])
        [text] = small.encode_stream([TEXTS[3]], attention=query, last_hidden_state=False)
        assert text.weights.shape == (1, 1, 92, 92)
        with pytest.raises(NotSupportedError, match="explain"):
            small.explain(["a"])
        small._session.timeout_s = 0.001
        with pytest.raises(DeadlineExceededError):
            small.embed([TEXTS[3]] * 100)


def test_stopped_engine_is_reported_immediately(minilm_bundle: Path) -> None:
    with attnlens_server.local(minilm_bundle, explain=False) as model:
        model._driver._host._service.process.state = State.FAILED  # type: ignore[attr-defined]
        with pytest.raises(UnavailableError, match="the engine has stopped: restart the server, or open"):
            model.embed(["It rained."])


def test_concurrent_threads_get_their_own_vectors(model: Local) -> None:
    texts = [f"text number {number}" for number in range(24)]
    expected = [model.embed([text]) for text in texts]
    with ThreadPoolExecutor(12) as threads:
        found = list(threads.map(lambda text: model.embed([text]), texts))
    assert all(map(same, found, expected))


async def test_local_model_works_inside_a_running_event_loop(model: Local) -> None:
    here = model.embed(["It rained."])
    there = await asyncio.gather(*(asyncio.to_thread(model.embed, ["It rained."]) for _ in range(4)))
    assert all(same(here, vectors) for vectors in there)


def test_close_cancels_running_calls_and_frees_the_model(minilm_bundle: Path, model: Local) -> None:
    before = set(threading.enumerate())
    own = attnlens_server.local(minilm_bundle, threads=1)
    assert repr(own) == f"Local({str(minilm_bundle)!r})"
    stream = own.encode_stream([LONG] * 50, truncate=True)
    next(stream)
    assert repr(own) == f"Local({str(minilm_bundle)!r}, model='all-MiniLM-L6-v2')"
    running = threading.Event()

    with ThreadPoolExecutor(1) as threads:
        embedding = threads.submit(
            own.embed, [LONG] * 2000, truncate=True, progress=lambda _, __: running.set()
        )
        assert running.wait(60)
        own.close()
        with pytest.raises(AttnlensError, match="the model was closed"):
            embedding.result(timeout=60)
    with pytest.raises(AttnlensError, match="the model was closed"):
        list(stream)
    with pytest.raises(AttnlensError, match="the model was closed"):
        own.embed(["a"])
    own.close()
    left = {thread.name for thread in set(threading.enumerate()) - before if thread.is_alive()}
    assert not {name for name in left if name.startswith(("attnlens", "embeddings", "attention", "worker"))}
    assert model.embed(["a"]).shape == (1, 384)  # the other model keeps working


PROGRAM = """
import gc, os, signal, sys, threading, time
import attnlens_server
model = attnlens_server.local(sys.argv[1], threads=1)
stream = attnlens_server.local(sys.argv[1], threads=1).encode_stream(["a", "b"])  # outlives its model's name
print([text.num_tokens for text in stream], flush=True)
del stream
gc.collect()
child = os.fork()
if not child:
    try:
        model.embed(["a"])
    except RuntimeError as error:
        print(f"{error}".replace(str(os.getppid()), "N").partition(",")[0], flush=True)
    model.close()
    sys.exit(0)
os.waitpid(child, 0)
deadline = time.monotonic() + 60
while len([one for one in threading.enumerate() if one.name == "attnlens-local"]) > 1:
    assert time.monotonic() < deadline
    time.sleep(0.01)
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    for batch in model.embed_iter("word " * 200 for _ in range(10**9)):
        pass
except KeyboardInterrupt:
    print(model.embed(["a"]).shape, flush=True)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs fork")
def test_process_handles_interrupt_fork_and_exit(minilm_bundle: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROGRAM, str(minilm_bundle)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    expected = ["[3, 3]", "the model was opened by process N", "(1, 384)"]
    assert (result.returncode, result.stdout.splitlines(), result.stderr) == (0, expected, "")
