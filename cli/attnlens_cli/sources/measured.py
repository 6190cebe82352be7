"""Results of `attnlens bench`, by bundle and machine, which `attnlens serve --auto` applies.

They are stored as `.bench-KEY.json` in the cache. KEY is a hash of the graphs, the processor, its number of
cores, the device options, and the versions of attnlens and the engines, so a result is never applied to
anything else.
"""

import hashlib
import importlib.metadata
import json
import platform
import re
import shlex
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnlens.bundle import read_manifest
from attnlens_cli.files.output_file import replacing
from attnlens_server.bundle.engine_checks import find_engine_check
from attnlens_server.config import EngineName, ServerConfig
from attnlens_server.engine.cpus import count_cpus
from attnlens_server.tuning.variants import MIN_SPEEDUP, REFERENCE, Variant

if TYPE_CHECKING:
    from attnlens_server.tuning import Report

_PACKAGES = ("attnlens", "onnxruntime", "onnxruntime-gpu", "openvino")


def save_report(config: ServerConfig, cache: Path, report: "Report") -> None:
    """Store speeds and settings, in addition to the settings that were measured for other engines.

    Raises:
        OSError: The cache is not writable.
    """
    path = _path(config, cache)
    content = _read(path)
    if report.comparison is not None:
        reference = report.comparison.results[0]
        content["relative_speeds"] = {
            str(result.variant): result.speed_relative_to(reference) for result in report.comparison.results
        }
    content.setdefault("settings", {})[str(report.variant)] = asdict(report.best.setting)
    cache.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())


def choose_options(config: ServerConfig, cache: Path, engines: Collection[EngineName]) -> dict[str, Any]:
    """Return `engine`, `threads`, `lanes` and `max_batch_tokens` for a server, as far as they were measured.

    Engines other than the reference must be faster by MIN_SPEEDUP and have passed their check.

    Args:
        config: Configuration of the server, with the bundle and the precision.
        cache: Directory of the results.
        engines: Engines to choose from.

    Raises:
        click.ClickException: Nothing was measured.
    """
    content = _read(_path(config, cache))
    speeds, settings = content.get("relative_speeds", {}), content.get("settings", {})
    manifest = read_manifest(config.bundle)
    best: Variant | None = None
    for engine in engines:
        variant = Variant(engine, config.precision)
        check = find_engine_check(manifest, engine, config.precision, config.device)
        is_measured = str(variant) in speeds or str(variant) in settings
        if not is_measured or (engine != REFERENCE.engine and not (check and check.passed)):
            continue
        margin = MIN_SPEEDUP if best else 1.0
        if best is None or speeds.get(str(variant), 0.0) >= margin * speeds.get(str(best), 0.0):
            best = variant
    if best is None:
        raise click.ClickException(
            f"--auto: {config.bundle} was not measured in {config.precision} on this machine with these "
            f"versions: run `attnlens bench {shlex.quote(str(config.bundle))} --precision {config.precision}`"
        )
    return {"engine": best.engine, **settings.get(str(best), {})}


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _path(config: ServerConfig, cache: Path) -> Path:
    files = read_manifest(config.bundle).files
    identity = {
        "graphs": [(file.path, file.sha256) for file in files if file.path.startswith("onnx/")],
        "device": (config.provider, config.device_id, config.device),
        "processor": _processor(),
        "cores": (count_cpus(only_physical_cores=True), count_cpus()),
        "versions": {name: _version(name) for name in _PACKAGES},
    }
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    return cache / f".bench-{key}.json"


def _processor() -> str:
    """Return the name and the instruction sets of the processor."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted(set(re.findall(r"^(?:model name|flags|Features)\s*:.*$", text, re.MULTILINE))))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
