"""Names and defaults of options match the packages that define them."""

import dataclasses
from typing import get_args

import click

from attnlens.v1.manifest_pb2 import Pooling
from attnlens_cli.commands.options import EMBEDDING_TYPES, POOLINGS
from attnlens_cli.commands.serving.bench import bench
from attnlens_cli.commands.serving.serve import serve
from attnlens_client.arguments import EmbeddingTypeName
from attnlens_server.config import ServerConfig

DEFAULTS = {field.name: field.default for field in dataclasses.fields(ServerConfig) if field.name != "bundle"}


def _defaults(command: click.Command) -> dict[str, object]:
    return {str(param.name): param.default for param in command.params if isinstance(param, click.Option)}


def test_every_configuration_field_is_a_serve_option_with_its_default() -> None:
    defaults = _defaults(serve)
    for name in ("cache_dir", "auto"):  # used before the configuration exists
        del defaults[name]
    assert defaults == DEFAULTS


def test_bench_has_the_defaults_of_serve() -> None:
    shared = ("provider", "precision", "device_id")
    assert {name: _defaults(bench)[name] for name in shared} == {name: DEFAULTS[name] for name in shared}


def test_embedding_types_match_the_client() -> None:
    assert get_args(EmbeddingTypeName) == EMBEDDING_TYPES


def test_poolings_match_the_protocol() -> None:
    assert set(POOLINGS) == {
        name.removeprefix("POOLING_").lower() for name, value in Pooling.items() if value
    }
