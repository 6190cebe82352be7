"""Checks of a bundle in engines other than ONNX Runtime on CPUs."""

import logging
import shlex

from attnlens.v1.manifest_pb2 import EngineCheck, Manifest
from attnlens_server.bundle.manifest import PRECISIONS
from attnlens_server.bundle.open import Bundle
from attnlens_server.config import Precision
from attnlens_server.errors import StartupError

logger = logging.getLogger(__name__)


def find_engine_check(
    manifest: Manifest, engine: str, precision: Precision, device: str
) -> EngineCheck | None:
    """Return the last check of an engine on a device, or None."""
    key = engine, PRECISIONS[precision], device
    checks = [
        check for check in manifest.engine_checks if (check.engine, check.precision, check.device) == key
    ]
    return checks[-1] if checks else None


def require_engine_check(
    bundle: Bundle, engine: str, device: str, *, version: str, processor: str
) -> EngineCheck | None:
    """Return the check of an engine. Log if there is none, or if it is from another version or processor.

    Args:
        bundle: Bundle, opened in a precision.
        engine: Package name of the engine.
        device: Device.
        version: Package version of the engine.
        processor: Name of the processor.

    Raises:
        StartupError: The check failed.
    """
    check = find_engine_check(bundle.manifest, engine, bundle.precision, device)
    command = f"attnlens check {shlex.quote(str(bundle.directory))} --engine {engine}"
    name = f"{engine} in {bundle.precision} on {device}"
    if check is None:
        logger.warning(
            "%s was not compared with PyTorch for this bundle: run `%s`, which records the result in it",
            name,
            command,
        )
        return None
    if not check.passed:
        raise StartupError(
            f"{bundle.directory}: {name} failed its check, see {bundle.directory / 'parity' / 'report.md'}: "
            f"use another --precision, or --engine onnxruntime. For another version of {engine} or another "
            f"processor, measure again with `{command}`"
        )
    if (check.version, check.processor) != (version, processor):
        logger.info(
            "%s was checked with version %s on %s, but this is version %s on %s: run `%s` to check it here",
            name,
            check.version,
            check.processor,
            version,
            processor,
            command,
        )
    return check
