"""A thread opens the model. Its errors are raised where the results are used, and leaving aborts it."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from attnlens_server.config import ConfigError, ServerConfig
from attnlens_server.errors import StartupError
from attnlens_server.opening import Opening
from attnlens_server.served_model import ServedModel
from tampered import EMBEDDINGS, change_graph, copy_of, endless_loop, through

HIDDEN = "last_hidden_state"


def test_model_is_open_when_it_is_started(small_bundle: Callable[[str], Path]) -> None:
    config = ServerConfig(bundle=small_bundle("wordpiece"))
    with Opening(config) as opening:
        served = ServedModel(config, opening)
        opening.wait()
        assert served.engine.execution_providers == ("CPUExecutionProvider",)
        assert served.start() > 0
    item = served.engine.probe()
    item.future.result(60)
    served.engine.close()


def test_error_of_the_bundle_is_raised_where_the_model_is_used(tmp_path: Path) -> None:
    with Opening(ServerConfig(bundle=tmp_path)) as opening:
        opening.wait()  # nothing to open
        with pytest.raises(StartupError, match="is not a bundle"):
            opening.model()


def test_option_that_does_not_fit_the_bundle_is_reported(small_bundle: Callable[[str], Path]) -> None:
    with (
        Opening(ServerConfig(bundle=small_bundle("wordpiece"), max_tokens=9999)) as opening,
        pytest.raises(ConfigError, match="max_tokens is 9999"),
    ):
        opening.model()


def test_leaving_aborts_a_graph_that_never_finishes(
    small_bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    bundle = copy_of(small_bundle("wordpiece"), tmp_path)
    change_graph(bundle, EMBEDDINGS, through(HIDDEN, *endless_loop("inner", HIDDEN)))
    started = time.monotonic()
    with Opening(ServerConfig(bundle=bundle)) as opening:
        opening.model()
    assert time.monotonic() - started < 60
    with pytest.raises(StartupError, match="the server is stopping"):
        opening.wait()
