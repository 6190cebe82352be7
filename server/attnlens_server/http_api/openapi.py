"""OpenAPI document of all routes, and the page that displays it and sends requests.

The document is built from the routes, msgspec types, and the descriptors and comments of the .proto files.
"""

import functools
import re
from collections.abc import Iterable, Mapping
from functools import partial
from importlib.resources import files
from typing import Any

import msgspec
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

from attnlens_server.errors import FieldViolation, InvalidFieldsError
from attnlens_server.grpc_api.methods import INPUT_FIELDS
from attnlens_server.grpc_api.model_info import own_version
from attnlens_server.http_api import viewer
from attnlens_server.http_api.exchange import (
    NATIVE,
    PUBLIC,
    HttpRequest,
    HttpResponse,
    Route,
    encode_json,
)
from attnlens_server.http_api.native import ARRAYS, TranscodedBody
from attnlens_server.http_api.transcoding import (
    DURATION,
    INPUT,
    TENSOR,
    enum_names,
    is_map,
)

Schema = dict[str, Any]

_REFERENCE = "#/components/schemas/{name}"
_NESTED_LIST = "NestedList"
_FILES = {
    "/docs": ("docs.html", "text/html; charset=utf-8"),
    "/docs.js": ("docs.js", "text/javascript; charset=utf-8"),
    "/docs.css": ("docs.css", "text/css; charset=utf-8"),
}
_NULLABLE_NUMBER: Schema = {"type": ["number", "null"]}
_SCALARS: dict[int, Schema] = {
    FieldDescriptor.CPPTYPE_BOOL: {"type": "boolean"},
    FieldDescriptor.CPPTYPE_STRING: {"type": "string"},
    FieldDescriptor.CPPTYPE_INT32: {"type": "integer", "minimum": -(1 << 31), "maximum": (1 << 31) - 1},
    FieldDescriptor.CPPTYPE_INT64: {"type": "integer", "format": "int64"},
}
_ERROR = InvalidFieldsError([FieldViolation("inputs", "is empty: send at least 1 text")])


class OpenApiRoutes:
    """`/openapi.json` and `/docs`.

    Args:
        routes: Routes to describe. Pages, and aliases that end in a slash, are omitted.
        needs_key: Whether routes that are not public need a key.
    """

    def __init__(self, routes: Iterable[Route], *, needs_key: bool) -> None:
        self._routes = [
            route for route in routes if not route.needs_page and (route.path == "/" or route.path[-1] != "/")
        ]
        self._needs_key = needs_key

    def routes(self) -> list[Route]:
        """Return the routes."""
        pages = [
            Route("GET", path, partial(_send_file, *file), viewer.DIALECT, PUBLIC, needs_page=True)
            for path, file in _FILES.items()
        ]
        return [Route("GET", "/openapi.json", self.document, NATIVE, PUBLIC), *pages]

    async def document(self, request: HttpRequest) -> HttpResponse:
        """Return the OpenAPI document."""
        content = {**self._content, "servers": [{"url": request.root_path or "/"}]}
        return HttpResponse(encode_json(content))

    @functools.cached_property
    def _content(self) -> dict[str, Any]:
        schemas = _Schemas(self._routes)
        paths: dict[str, dict[str, Any]] = {}
        for route in self._routes:
            path = route.path.replace("*", "{name}")
            paths.setdefault(path, {})[route.method.lower()] = self._operation(route, schemas)
        components: dict[str, Any] = {"schemas": schemas.components}
        if self._needs_key:
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        return {
            "openapi": "3.1.0",
            "info": {"title": "attnlens", "version": own_version()},
            "paths": paths,
            "components": components,
        }

    def _operation(self, route: Route, schemas: "_Schemas") -> dict[str, Any]:
        handler = getattr(route.handler, "func", route.handler)
        summary = route.summary or (handler.__doc__ or "").partition("\n")[0]
        ok: dict[str, Any] = {"description": "Success"}
        if route.media_type:
            ok["content"] = {route.media_type: {"schema": schemas.of(route.response)}}
        error: dict[str, Any] = {"schema": schemas.of(route.dialect.schema)}
        error["example"] = route.dialect.body(_ERROR)
        failure = {"description": "Error", "content": {"application/json": error}}
        operation: dict[str, Any] = {
            "operationId": "_".join([route.method.lower(), *re.findall(r"\w+", route.path)]),
            "tags": [handler.__module__.rpartition(".")[2].replace("native", "attnlens")],
            "summary": summary,
            "responses": {"200" if route.media_type else "2XX": ok, "4XX": failure, "5XX": failure},
        }
        if route.path.endswith("*"):
            operation["operationId"] += "_name"
            name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
            operation["parameters"] = [name]
        if route.body is not None:
            content = {"application/json": {"schema": schemas.of(route.body)}}
            operation["requestBody"] = {"required": True, "content": content}
        if self._needs_key and not route.is_public:
            operation["security"] = [{"key": []}]
        return operation


class _Schemas:
    """JSON schemas of the types of all routes.

    Attributes:
        components: Named schemas.
    """

    def __init__(self, routes: Iterable[Route]) -> None:
        self.components: dict[str, Schema] = {}
        types = {
            kind
            for route in routes
            for kind in (route.body, route.response, route.dialect.schema)
            if not (kind is None or isinstance(kind, Mapping | TranscodedBody | Descriptor))
        }
        ordered = sorted(types, key=str)
        schemas, components = msgspec.json.schema_components(ordered, ref_template=_REFERENCE)
        self._by_type: dict[Any, Schema] = dict(zip(ordered, schemas, strict=True))
        self.components.update(components)

    def of(self, kind: Any) -> Schema:  # noqa: ANN401 - as in Route.body
        """Return the schema of a type."""
        if kind is None:
            return {}
        if isinstance(kind, Mapping):
            return dict(kind)
        if isinstance(kind, TranscodedBody):
            return self._message(kind.message, kind)
        if isinstance(kind, Descriptor):
            return self._message(kind)
        return self._by_type[kind]

    def _message(self, descriptor: Descriptor, body: TranscodedBody | None = None) -> Schema:
        """Return the schema of a message.

        Args:
            descriptor: Descriptor of the message.
            body: Type of the body if the message is part of a request.
        """
        name = descriptor.full_name
        if name == DURATION:
            return {"type": "number", "description": "Seconds."}
        if name not in self.components:
            self.components[name] = {}  # messages may refer to themselves
            if name == TENSOR:
                self.components[_NESTED_LIST] = _nested_list()
                self.components[name] = _tensor(self._fields(descriptor, None))
            else:
                self.components[name] = self._object(descriptor, body)
        return _reference(name)

    def _object(self, descriptor: Descriptor, body: TranscodedBody | None) -> Schema:
        properties = self._fields(descriptor, body)
        schema: Schema = {"type": "object", "properties": properties}
        if body is None:
            schema["required"] = [field.name for field in descriptor.fields if not field.has_presence]
            return _described(schema, descriptor.name)
        schema["additionalProperties"] = False
        schema["required"] = [field.name for field in descriptor.fields if _is_required(field)]
        if body.has_arrays and descriptor is body.message:
            properties["arrays"] = {
                "enum": [*ARRAYS, None],
                "default": ARRAYS[0],
                "description": "Format of tensors in the response.",
            }
        groups = [oneof for oneof in descriptor.oneofs if len(oneof.fields) > 1]
        if groups and len(groups[0].fields) == len(properties):  # such as Input and Prompt
            schema |= {"minProperties": 1, "maxProperties": 1}
        if descriptor.full_name == INPUT:
            schema = {"anyOf": [{"type": "string"}, schema]}
        return _described(schema, descriptor.name)

    def _fields(self, descriptor: Descriptor, body: TranscodedBody | None) -> dict[str, Schema]:
        return {
            field.name: _described(self._field(field, body), f"{descriptor.name}.{field.name}")
            for field in descriptor.fields
        }

    def _field(self, field: FieldDescriptor, body: TranscodedBody | None) -> Schema:
        schema = self._value(field, body)
        if body is None or _is_required(field):
            return schema
        return {"anyOf": [schema, {"type": "null"}]}  # null is the same as no value

    def _value(self, field: FieldDescriptor, body: TranscodedBody | None) -> Schema:
        if is_map(field):
            return {"type": "object", "additionalProperties": {"type": "string"}}
        if field.message_type is not None:
            schema = self._message(field.message_type, body)
        elif field.enum_type is not None:
            schema = self._enum(field.enum_type)
        elif field.cpp_type in _SCALARS:
            schema = _SCALARS[field.cpp_type]
        else:
            schema = {"type": "number"} if body else _NULLABLE_NUMBER  # NaN is null
        if not field.is_repeated:
            return schema
        return {"type": "array", "items": schema, **({"minItems": 1} if _is_required(field) else {})}

    def _enum(self, enum: EnumDescriptor) -> Schema:
        if enum.full_name not in self.components:
            names, comments = enum_names(enum), proto_comments()
            lines = [
                f"- `{names[value.number]}`: {comments[f'{enum.name}.{value.name}']}" for value in enum.values
            ]
            schema = _described({"type": "string", "enum": list(names.values())}, enum.name)
            schema["description"] = "\n".join([schema["description"], "", *lines])
            self.components[enum.full_name] = schema
        return _reference(enum.full_name)


def _is_required(field: FieldDescriptor) -> bool:
    """Return whether requests must set a field."""
    is_input = field.message_type is not None and field.message_type.full_name == INPUT
    return field.name in INPUT_FIELDS or (is_input and field.containing_oneof is None)


def _reference(name: str) -> Schema:
    return {"$ref": _REFERENCE.format(name=name)}


def _described(schema: Schema, name: str) -> Schema:
    return {**schema, "description": proto_comments().get(name, "")}


def _nested_list() -> Schema:
    number_or_list = {"anyOf": [_NULLABLE_NUMBER, _reference(_NESTED_LIST)]}
    return {"type": "array", "items": number_or_list, "description": "Array as nested lists. NaN is null."}


def _tensor(properties: dict[str, Schema]) -> Schema:
    data = {"type": "string", "contentEncoding": "base64"}
    properties["data"] = {**properties["data"], **data}
    encoded = {"type": "object", "properties": properties, "required": ["shape", "data_type", "data"]}
    return _described({"anyOf": [_reference(_NESTED_LIST), encoded]}, "Tensor")


@functools.cache
def proto_comments() -> dict[str, str]:
    """Return the comments of the .proto files by `Message`, `Message.field` and `Enum.VALUE`."""
    comments: dict[str, str] = {}
    for file in files("attnlens.v1").iterdir():
        if not file.name.endswith(".proto"):
            continue
        scopes: list[str] = []
        lines: list[str] = []
        for raw in file.read_text("utf-8").splitlines():
            line = raw.strip()
            if line.startswith("//"):
                lines.append(line.removeprefix("//").strip())
                continue
            if scope := re.match(r"(message|enum|service|oneof) (\w+) \{", line):
                scopes.append(scopes[-1] if scope[1] == "oneof" else scope[2])
                if scope[1] != "oneof":
                    comments[scope[2]] = " ".join(lines)
            elif field := re.match(r".*?(\w+) = \d+;", line):
                comments[f"{scopes[-1]}.{field[1]}"] = " ".join(lines)
            if line.endswith("}"):
                scopes.pop()
            lines = []
    return comments


async def _send_file(name: str, content_type: str, request: HttpRequest) -> HttpResponse:
    del request
    content = files("attnlens_server.http_api").joinpath("assets", name).read_bytes()
    return HttpResponse(content, content_type=content_type)
