"""The reference of the protocol as Markdown, from the comments of the .proto files."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)

PACKAGE = "attnlens.v1"
FILES = {
    "encoder_service": "Service and messages",
    "explanation": "Explanations",
    "model": "Models",
    "error": "Errors",
    "tensor": "Tensors",
    "manifest": "The manifest of a bundle",
    "quantization": "The manifest: int8",
}
_LABELS = {FieldDescriptorProto.LABEL_REPEATED: "repeated "}
# Numbers of fields in descriptor.proto, which say what a comment belongs to.
_MESSAGES, _ENUMS, _SERVICES, _FIELDS, _VALUES, _METHODS, _NESTED, _NESTED_ENUMS = 4, 5, 6, 2, 2, 2, 3, 4
_SYNTAX = 12

Place = tuple[int, ...]


def reference(protos: Path) -> str:
    """Return the page: each file's service, messages and enums with their comments."""
    lines = [f"# {PACKAGE}", "", "Every method, message and field, from the comments of the `.proto` files."]
    lines += ["[How to use them](../protocol.md).", ""]
    for file in _described(protos):
        lines += [f"## {FILES[Path(file.name).stem]}", "", f"`{file.name}`", ""]
        comments = {tuple(place.path): place.leading_comments for place in file.source_code_info.location}
        if conventions := comments.get((_SYNTAX,)):
            lines += [re.sub(r"^ ", "", conventions, flags=re.MULTILINE), ""]
        for i, service in enumerate(file.service):
            rows = [
                (f"`{method.name}`", _types(method), comments.get((_SERVICES, i, _METHODS, j), ""))
                for j, method in enumerate(service.method)
            ]
            lines += _entry(service.name, comments.get((_SERVICES, i), ""), "method", rows)
        for i, message in enumerate(file.message_type):
            lines += _message(message, message.name, (_MESSAGES, i), comments)
        for i, enum in enumerate(file.enum_type):
            lines += _enum(enum, enum.name, (_ENUMS, i), comments)
    return "\n".join(lines)


def _described(protos: Path) -> Iterator[FileDescriptorProto]:
    """Yield what protoc makes of the files, in the order of `FILES`."""
    names = [f"attnlens/v1/{name}.proto" for name in FILES]
    with tempfile.NamedTemporaryFile() as made:
        command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={protos}"]
        command += ["--include_source_info", f"--descriptor_set_out={made.name}", *names]
        subprocess.run(command, check=True)  # noqa: S603 - our own files
        files = {file.name: file for file in FileDescriptorSet.FromString(Path(made.name).read_bytes()).file}
    yield from (files[name] for name in names)


def _message(message: DescriptorProto, name: str, place: Place, comments: dict[Place, str]) -> list[str]:
    rows = []
    for j, field in enumerate(message.field):
        kind = f"{_LABELS.get(field.label, '')}{_field_type(field)}"
        if field.HasField("oneof_index") and not field.proto3_optional:
            kind += f", one of `{message.oneof_decl[field.oneof_index].name}`"
        rows.append((f"`{field.name}`", kind, comments.get((*place, _FIELDS, j), "")))
    lines = _entry(name, comments.get(place, ""), "field", rows)
    for j, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            lines += _message(nested, f"{name}.{nested.name}", (*place, _NESTED, j), comments)
    for j, enum in enumerate(message.enum_type):
        lines += _enum(enum, f"{name}.{enum.name}", (*place, _NESTED_ENUMS, j), comments)
    return lines


def _enum(enum: EnumDescriptorProto, name: str, place: Place, comments: dict[Place, str]) -> list[str]:
    rows = [
        (f"`{value.name}`", str(value.number), comments.get((*place, _VALUES, j), ""))
        for j, value in enumerate(enum.value)
    ]
    return _entry(name, comments.get(place, ""), "value", rows)


def _entry(name: str, comment: str, kind: str, rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """Return a heading, the comment, and a table of what the thing has."""
    lines = [f"### {name}", "", re.sub(r"^ ", "", comment, flags=re.MULTILINE), ""]
    if rows:
        lines += [f"| {kind} | {'number' if kind == 'value' else 'type'} | meaning |", "|---|---|---|"]
        for first, second, told in rows:
            cell = " ".join(told.split()).replace("|", "\\|")
            lines.append(f"| {first} | {second} | {cell} |")
    return [*lines, ""]


def _types(method: MethodDescriptorProto) -> str:
    returned = f"{'a stream of ' if method.server_streaming else ''}{_type(method.output_type)}"
    return f"{_type(method.input_type)}, returns {returned}"


def _field_type(field: FieldDescriptorProto) -> str:
    if field.type_name:
        return _type(field.type_name)
    return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _type(full_name: str) -> str:
    """Return a link to a type of the package, else its name."""
    own = full_name.removeprefix(f".{PACKAGE}.")
    if own == full_name:
        return f"`{full_name.removeprefix('.')}`"
    if own.endswith("Entry"):
        return "map"
    return f"[{own}](#{own.lower().replace('.', '')})"
