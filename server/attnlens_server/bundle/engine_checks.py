"""What was measured of a bundle in another engine than ONNX Runtime on a CPU, and what follows from it."""

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
    """Return what was measured of an engine on a device last."""
    key = engine, PRECISIONS[precision], device
    found = [
        check for check in manifest.engine_checks if (check.engine, check.precision, check.device) == key
    ]
    return found[-1] if found else None


def heed_engine_check(
    bundle: Bundle, engine: str, device: str, *, version: str, processor: str
) -> EngineCheck | None:
    """Return what was measured; say in the log where it was not, or not on this machine.

    Args:
        bundle: which was opened for a precision.
        engine: the package that is to run it.
        device: where.
        version: of the package.
        processor: the device's own name.

    Raises:
        StartupError: a gate did not hold.
    """
    check = find_engine_check(bundle.manifest, engine, bundle.precision, device)
    command = f"attnlens check {shlex.quote(str(bundle.directory))} --engine {engine}"
    what = f"{engine} in {bundle.precision} on {device}"
    if check is None:
        logger.warning(
            "%s was not compared with PyTorch for this bundle: `%s` does it, and writes it into the bundle",
            what,
            command,
        )
        return None
    if not check.passed:
        raise StartupError(
            f"{bundle.directory}: {what} did not pass its check, see "
            f"{bundle.directory / 'parity' / 'report.md'}: use another --precision or --engine onnxruntime; "
            f"with another version of {engine} or on another processor, measure again: `{command}`"
        )
    if (check.version, check.processor) != (version, processor):
        logger.info(
            "%s was checked with version %s on %s, and runs now in version %s on %s: `%s` measures it here",
            what,
            check.version,
            check.processor,
            version,
            processor,
            command,
        )
    return check
