"""The commands to copy: how to serve at each accuracy."""

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from attnlens_server.config import DEFAULT_DEVICE, ServerConfig
from attnlens_server.tuning import Offer, Report, Setting, Variant, config_of, offers


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """A command line, and what to expect of it.

    Attributes:
        command: the line.
        offer: the accuracy and the speed; None: engines were not compared.
        is_tuned: whether it has the settings that were searched for; otherwise it has the default ones.
        check: a command to run before, once; None: the bundle was checked as it is served.
    """

    command: str
    offer: Offer | None
    is_tuned: bool
    check: str | None = None


def serve_commands(config: ServerConfig, report: Report) -> list[ServeCommand]:
    """Return a command for each accuracy that is worth it, and the one with the settings found."""
    tuned = tuned_command(config, report)
    if report.comparison is None:
        return [ServeCommand(tuned, None, is_tuned=True)]
    asked = Variant(config.engine, config.precision)
    commands = []
    for offer in offers(report.comparison.rows, asked):
        row, is_asked = offer.measured, offer.measured.variant == asked
        command = tuned if is_asked else _command(config_of(config, row.variant), row.device, None)
        check = None if row.is_checked else _check_command(config, row.variant)
        commands.append(ServeCommand(command, offer, is_asked, check))
    return commands


def tuned_command(config: ServerConfig, report: Report) -> str:
    """Return the command that starts a server with the best settings."""
    return _command(config, report.device, report.best.setting)


def _command(config: ServerConfig, device: str, setting: Setting | None) -> str:
    return shlex.join(("attnlens", "serve", os.fspath(config.bundle), *_options(config, device, setting)))


def _options(config: ServerConfig, device: str, setting: Setting | None) -> Iterator[str]:
    if config.engine != "onnxruntime":
        yield from ("--engine", config.engine)
    if config.device != DEFAULT_DEVICE:
        yield from ("--device", config.device)
    if config.engine == "onnxruntime" and device != DEFAULT_DEVICE:
        yield from ("--provider", "cuda")
    if config.device_id:
        yield from ("--device-id", str(config.device_id))
    if config.precision != "fp32":
        yield from ("--precision", config.precision)
    if setting is not None:
        yield from ("--threads", str(setting.threads), "--lanes", str(setting.lanes))
        yield from ("--max-batch-tokens", str(setting.max_batch_tokens))
    elif config.threads:
        yield from ("--threads", str(config.threads))


def _check_command(config: ServerConfig, variant: Variant) -> str:
    return shlex.join(("attnlens", "check", os.fspath(config.bundle), "--engine", variant.engine))
