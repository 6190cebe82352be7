"""Servers that requests are sent to, and what a client and an operator see of each request."""

import contextlib
import gzip
import hashlib
import http.client
import json
import re
import time
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self
from urllib.parse import urlsplit

import grpc
from google.protobuf import json_format
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import status_pb2

from attnlens.oip import open_inference_pb2
from attnlens.tensors import from_tensor
from attnlens.v1 import encoder_service_pb2, error_pb2
from attnlens.v1.tensor_pb2 import Tensor
from mounted import PREFIX
from recorded_requests.native import shorten
from served import ServerProcess

Record = dict[str, Any]

LIMITS = {
    "max-inputs-per-request": 8,
    "max-text-bytes": 4000,
    "max-request-text-bytes": 16_000,
    "max-computed-tokens": 4000,
    "max-response-bytes": 400_000,
}
"""Options whose limits small requests reach."""
ARGUMENTS = (
    *("--http-port", "0", "--access-log", "all", "--threads", "1", "--lanes", "1"),
    *(argument for name, limit in LIMITS.items() for argument in (f"--{name}", str(limit))),
)
SERVICES = {
    "grpc": encoder_service_pb2.DESCRIPTOR.services_by_name["EncoderService"],
    "oip": open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"],
}
DESCRIPTIONS = ("ListModels", "GetModel", "ServerMetadata", "/info", "/openapi.json", "/v1/attnlens/models")
"""Methods and routes whose values depend on versions and on the machine: only their names are recorded."""
_UNSTABLE = re.compile(r"id|created|timings|(load|total)_duration|version|.*_version")
_SHOWN = 100


def message_of(method: Any, fields: Mapping[str, Any]) -> bytes:
    """Return the message of a request. Raises json_format.ParseError if it cannot hold a field."""
    message = json_format.ParseDict(dict(fields), GetMessageClass(method.input_type)())
    return bytes(message.SerializeToString(deterministic=True))


class Target:
    """A server process with connections and its log."""

    def __init__(self, bundle: Path, *arguments: str, metrics_key: str = "") -> None:
        self._server = ServerProcess(bundle, *ARGUMENTS, *arguments)
        self._metrics_headers = {"X-Request-Id": "metrics", "Authorization": f"Bearer {metrics_key}"}
        self._num_lines = 0
        self._samples: dict[str, int] = {}

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._server)
            host = urlsplit(self._server.http_url()).netloc
            options = [("grpc.max_receive_message_length", -1), ("grpc.enable_retries", 0)]
            self._channel = stack.enter_context(grpc.insecure_channel(self._server.address, options))
            self._connection = stack.enter_context(
                contextlib.closing(http.client.HTTPConnection(host, timeout=60))
            )
            self._samples = self._metrics()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def call(
        self, service: str, method: str, message: bytes, metadata: Mapping[str, str] = MappingProxyType({})
    ) -> Record:
        """Send a gRPC request and return what is visible of it."""
        record = called(self._channel, service, method, message, metadata)
        return self._observed(record, "grpc", method, is_logged=not method.endswith(("Live", "Ready")))

    def request(self, method: str, path: str, body: Any, headers: Mapping[str, str]) -> Record:
        """Send an HTTP request and return what is visible of it."""
        record = requested(self._connection, method, path, body, headers)
        return self._observed(record, "http", f"{method} {path}")

    def _observed(self, record: Record, protocol: str, method: str, *, is_logged: bool = True) -> Record:
        """Add the log line and the changes of the metrics, as far as they are not what the reply implies."""
        line = self._line() if is_logged else {}
        before, self._samples = self._samples, self._metrics()
        own = line.get("method", "")
        changed = {
            _short(name, own): value - before.get(name, 0)
            for name, value in self._samples.items()
            if value != before.get(name, 0)
        }
        status, reason = str(record["status"]), line.get("reason", "")
        usual = {
            "protocol": protocol,
            "method": method,
            "status": status,
            "reason": record.get("reason", reason),
        }
        record["log"] = " ".join(
            f"{name}={value}" for name, value in line.items() if usual.get(name) != value
        )
        implied = {
            f"requests.{status}": int(is_logged),
            "request_duration": int(is_logged),
            f"request_errors.{reason}": int(bool(reason)),
            "inputs": 0 if reason else line.get("inputs", 0),
            "input_tokens": 0 if reason else line.get("tokens", 0),
        }
        names = dict.fromkeys([*changed, *implied])
        record["metrics"] = " ".join(
            f"{name}={changed.get(name, 0)}" for name in names if changed.get(name, 0) != implied.get(name, 0)
        ).replace(_STAGES, "stages=1")
        return record

    def _line(self) -> dict[str, Any]:
        """Return the fields of the next line of the access log that are not 0."""
        until = time.monotonic() + 30
        while True:
            lines = self._server.log().rpartition("\n")[0].splitlines()
            for number, text in enumerate(lines[self._num_lines :], self._num_lines + 1):
                line = json.loads(text)
                if line["message"] == "request" and line.get("request_id") != "metrics":
                    self._num_lines = number
                    return {name: value for name, value in line.items() if name not in _LOG_FIELDS and value}
            assert time.monotonic() < until, "no line was written"
            time.sleep(0.002)

    def _metrics(self) -> dict[str, int]:
        """Return the counters, and the numbers of observations of histograms."""
        self._connection.request("GET", "/metrics", headers=self._metrics_headers)
        text = self._connection.getresponse().read().decode()
        pairs = (line.rsplit(" ", 1) for line in text.splitlines() if _COUNTER.match(line))
        return {name: int(float(value)) for name, value in pairs if '"GET /metrics"' not in name}


def _short(name: str, method: str) -> str:
    """Return a sample's name and labels without the method of the request."""
    family, _, labels = name.removeprefix("attnlens_").partition("{")
    values = [value for value in re.findall(r'"(.*?)"', labels) if value != method]
    return ".".join([re.sub(r"(_seconds)?_(total|count)$", "", family), *values])


_STAGES = " ".join(f"stage_duration.{stage}=1" for stage in ("tokenize", "queue", "compute"))
_LOG_FIELDS = {
    "time",
    "level",
    "logger",
    "message",
    "peer",
    "request_id",
    "trace_id",
    "sampled",
    "reply_bytes",
}
_LOG_FIELDS |= {"tokenize_ms", "queue_ms", "compute_ms", "total_ms"}
_COUNTER = re.compile(
    r"attnlens_(?!client_)\w+(?<!seconds)_(total|count)\b|attnlens_\w+_duration_seconds_count"
)


def called(
    channel: grpc.Channel, service: str, method: str, message: bytes, metadata: Mapping[str, str]
) -> Record:
    """Return the reply to a gRPC request."""
    described = SERVICES[service].methods_by_name[method]
    path, reply_class = f"/{SERVICES[service].full_name}/{method}", GetMessageClass(described.output_type)
    make: Any = channel.unary_stream if described.server_streaming else channel.unary_unary
    try:
        sent = make(path)(message, timeout=60, metadata=tuple(metadata.items()))
        replies = [
            reply_class.FromString(reply) for reply in (sent if described.server_streaming else [sent])
        ]
        return {"status": "OK", "reply": form(replies if described.server_streaming else replies[0], method)}
    except grpc.RpcError as error:
        return grpc_error(error)


def requested(
    connection: http.client.HTTPConnection, method: str, path: str, body: Any, headers: Mapping[str, str]
) -> Record:
    """Return the response to an HTTP request."""
    sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    if headers.get("Content-Encoding") == "gzip":
        sent = gzip.compress(sent or b"")
    connection.request(method, path, sent, dict(headers))
    response = connection.getresponse()
    content = response.read()
    found = {name.lower(): value for name, value in response.getheaders()}
    route = path.removeprefix(PREFIX) if response.status == HTTPStatus.OK else ""
    reply = body_form(content, found.get("content-type", ""), route)
    return {"status": response.status, "headers": stable_headers(found), "reply": reply}


def form(value: Any, name: str) -> str:
    """Return a reply as text, with types and shapes in place of numbers."""
    is_description = any(name.startswith(each) for each in DESCRIPTIONS)
    text = json.dumps(_names(value) if is_description else _form(value), ensure_ascii=False)
    return re.sub("[0-9a-f]{64}", "…", re.sub(r'\\*"', "", text))


def body_form(content: bytes, media_type: str, path: str) -> str:
    """Return the form of a body. Other bodies than JSON are represented by their type."""
    if "json" not in media_type:
        return media_type or "nothing"
    values = [json.loads(line) for line in content.splitlines() if line]
    return form(values[0] if len(values) == 1 else values, path)


def shortened(record: Record) -> Record:
    """Return a record without what its message repeats, and with the hash of a long reply."""
    short = {name: value for name, value in record.items() if value not in ({}, [], "")}
    reply: str = short.get("reply", "")
    if len(reply) > _SHOWN and str(short["status"]) in ("OK", "200"):
        short["reply"] = f"{reply[:_SHOWN]}… {hashlib.sha256(reply.encode()).hexdigest()[:8]}"
    if "fields" in short:  # the message contains the first three problems
        short["fields"] = [
            each if number > 2 else each.partition(" ")[0] for number, each in enumerate(short["fields"])
        ]
    return short


def native_error(record: Record) -> str:
    """Return the form of the JSON body with the same error as a gRPC record."""
    violations = [
        {"field": re.sub("#.*", "", name), "description": description}
        for name, _, description in (each.partition(" ") for each in record["fields"])
    ]
    body = {"error": record["reply"], "reason": record["reason"], "violations": violations}
    body["metadata"] = record["metadata"]
    return form({name: value for name, value in body.items() if value}, "")


def stable_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return headers that not all responses have, without values that change between requests."""
    return {
        name: "…" if "time" in name or name == "etag" else value
        for name, value in sorted(headers.items())
        if name not in ("date", "content-length", "server", "x-request-id") and _USUAL.get(name) != value
    }


_USUAL = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "content-type": "application/json",
    "x-content-type-options": "nosniff",
}


def grpc_error(error: Any) -> Record:
    """Return an error without what its reason implies."""
    trailers = dict(error.trailing_metadata() or ())
    record: Record = {"status": error.code().name, "reply": form(error.details(), "")}
    if "attnlens-error-bin" not in trailers:
        return record | {"trailers": sorted(trailers)}
    found = error_pb2.ErrorDetails.FromString(trailers["attnlens-error-bin"])
    record["reason"] = trailers["attnlens-error-reason"]
    record["metadata"] = {name: form(value, "") for name, value in sorted(found.metadata.items())}
    record["fields"] = [
        f"{each.field}{f'#{each.input_index}' if each.HasField('input_index') else ''} {each.description}"
        for each in found.violations
    ]
    rich = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    usual = ["ErrorInfo", *(["BadRequest"] if found.violations else [])]
    record["details"] = [
        name for each in rich.details if (name := each.type_url.rpartition(".")[2]) not in usual
    ]
    record["trailers"] = sorted(
        name for name in trailers if not name.startswith(("attnlens-", "grpc-status-"))
    )
    return record


def _form(value: Any) -> Any:
    """Return a JSON value with types and shapes in place of numbers that a processor may round otherwise."""
    if isinstance(value, Tensor):
        array = from_tensor(value)
        return f"{array.dtype}{list(array.shape)}"
    if isinstance(value, Message):
        value = {field.name: found for field, found in value.ListFields()}
    if isinstance(value, Mapping):  # or a map of a message
        return {
            name: "…" if _is_unstable(name, value[name]) else _form(value[name]) for name in sorted(value)
        }
    if isinstance(value, float | bytes):
        return "float" if isinstance(value, float) else f"bytes[{len(value)}]"
    if isinstance(value, str | int) or value is None:
        return value
    forms = [_form(each) for each in value]
    if len(forms) > 1 and all(form == forms[0] for form in forms):
        return f"{len(forms)} of {json.dumps(forms[0], ensure_ascii=False)}"
    return forms


def _names(value: Any, depth: int = 3) -> Any:
    """Return the names of fields, down to a depth at which they depend on what an export has measured."""
    if isinstance(value, Message):
        value = {field.name: found for field, found in value.ListFields()}
    if isinstance(value, Mapping):
        return {name: _names(value[name], depth - 1) if depth > 1 else "…" for name in sorted(value)}
    is_list = not isinstance(value, str | bytes | int | float) and value is not None
    return [_names(each, depth - 1) for each in value] if is_list and depth > 1 else "…"


def _is_unstable(name: str, value: Any) -> bool:
    is_token_id = name == "id" and isinstance(value, int)
    return _UNSTABLE.fullmatch(name) is not None and not is_token_id


def pieces(table: Mapping[str, list[Any]]) -> Iterator[tuple[str, str, Any]]:
    """Yield path or method, name and content of each request."""
    for path, bodies in table.items():
        for body in bodies:
            yield path, shorten(body) if not isinstance(body, bytes) else repr(body), body
