"""Recorded calls: sent to a server as bytes, written to a file and read back."""

import base64
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, cast

import grpc
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from attnlens.tensors import from_tensor
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.error_pb2 import ErrorDetails
from attnlens.v1.tensor_pb2 import Tensor

SERVICE = pb.DESCRIPTOR.services_by_name["EncoderService"]


@dataclass(frozen=True)
class Recorded:
    """One call: the request, the responses and the final status."""

    name: str
    method: str
    request: bytes
    responses: tuple[bytes, ...]
    code: str
    error: bytes = b""
    """ErrorDetails of a call that failed."""

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        return cls(
            name=values["name"],
            method=values["method"],
            request=base64.b64decode(values["request"]),
            responses=tuple(base64.b64decode(response) for response in values["responses"]),
            code=values["code"],
            error=base64.b64decode(values["error"]),
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "request": _text(self.request),
            "responses": [_text(response) for response in self.responses],
            "error": _text(self.error),
        }

    def replies(self) -> list[dict[str, Any]]:
        """Responses as JSON values, with tensor data as lists."""
        kind = GetMessageClass(SERVICE.methods_by_name[self.method].output_type)
        return [as_values(kind.FromString(response)) for response in self.responses]

    def failure(self) -> dict[str, Any]:
        """Status and details of a failed call."""
        return {"code": self.code, **as_values(ErrorDetails.FromString(self.error))}


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def call(channel: grpc.Channel, name: str, method: str, request: bytes) -> Recorded:
    """Send the request bytes and return the recorded call."""
    path = f"/{SERVICE.full_name}/{method}"
    try:
        if SERVICE.methods_by_name[method].server_streaming:
            responses = tuple(channel.unary_stream(path, _same, _same)(request, timeout=60))
        else:
            responses = (channel.unary_unary(path, _same, _same)(request, timeout=60),)
    except grpc.RpcError as error:
        failed = cast("grpc.Call", error)
        trailers = dict(failed.trailing_metadata() or ())
        details = cast("bytes", trailers["attnlens-error-bin"])
        return Recorded(name, method, request, (), failed.code().name, details)
    return Recorded(name, method, request, responses, "OK")


def _same(data: bytes) -> bytes:
    return data


def write(path: Path, calls: list[Recorded]) -> None:
    path.write_text(json.dumps([recorded.to_json() for recorded in calls], indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> list[Recorded]:
    return [Recorded.from_json(values) for values in json.loads(path.read_text(encoding="utf-8"))]


def as_values(message: Message) -> dict[str, Any]:
    """Convert a message to JSON values by field name; a tensor becomes its shape, data type and values."""
    values: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True)
    _unpack(message, values)
    return values


def _unpack(message: Message, values: dict[str, Any]) -> None:
    for field, content in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        shown = values[field.name]
        if field.message_type.full_name == Tensor.DESCRIPTOR.full_name:
            shown["data"] = from_tensor(content).astype(float).ravel().tolist()
        elif field.message_type.full_name.startswith("attnlens."):
            parts = zip(content, shown, strict=True) if isinstance(shown, list) else [(content, shown)]
            for part, part_values in parts:
                _unpack(part, part_values)
