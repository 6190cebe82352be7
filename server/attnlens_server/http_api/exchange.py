"""Requests, responses and errors of the HTTP routes."""

import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import orjson
from msgspec import inspect

from attnlens_server.core.admission import Budget, Conversion
from attnlens_server.errors import (
    MAX_MESSAGE_BYTES,
    FieldViolation,
    InputTooLongError,
    InvalidFieldsError,
    RequestError,
    shortened,
)
from attnlens_server.http_api.known_options import REPLACEMENTS, Options

Body = TypeVar("Body")

JSON = "application/json"
NDJSON = "application/x-ndjson"
JSON_CONVERSION = Conversion(growth=6, token_bytes=320, text_bytes=1024)
"""Upper bounds on the memory of replies as JSON. A float16 takes up to 12 characters, a float32 up to 14."""
_VALUE_BYTES = 64  # memory of a list, dictionary or number
VALUES_PER_TEXT, MAX_OTHER_VALUES = 16, 4096  # lists, objects and strings of a JSON body
_SCANNED_BYTES = 1 << 16
_PIECE_VALUES = 1 << 15  # serialized in about 1 ms
_PLACEHOLDER = b"\0"  # not a byte of JSON
_MAX_SHOWN = 40  # characters of a value in a message
# Such as: Expected `str`, got `int` - at `$.input[0]`
_PROBLEM_AT = re.compile(r"(?P<problem>.*) - at `(key in )?\$\.?(?P<path>.*)`", re.DOTALL)
# Other APIs have texts and ids in one list.
_OWN_LEVELS = re.compile(r"^(inputs\[\d+\])(\.text$|\.token_ids\.input_ids\b)")
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`")
_NOT_LITERAL = re.compile(r"Invalid enum value (?P<value>.*)", re.DOTALL)


class HttpError(RequestError):
    """A request that violates the rules of HTTP or of this server's routes.

    Args:
        http_status: HTTP status.
        reason: Machine-readable reason.
        message: Problem, limit and remedy.
        headers: Headers of the response.
        field: Invalid field, if there is one.
    """

    def __init__(
        self,
        http_status: int,
        reason: str,
        message: str,
        headers: Mapping[str, str] | None = None,
        *,
        field: str | None = None,
    ) -> None:
        super().__init__(message)
        self.http_status = http_status
        self.reason = reason
        self.headers = headers or {}
        self.field = field


class BodyError(InvalidFieldsError):
    """One or more fields of a JSON body are invalid. They have the names of the body, not of `operations`."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A complete request.

    Attributes:
        method: HTTP method.
        path: Decoded path. For a route that ends in `*`, the rest of the path.
        headers: Headers by lower-case name.
        body: Decompressed body.
        budget: Memory, deadline and metrics of the call.
        root_path: Prefix of all paths, if the application is mounted in another one.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    budget: Budget
    root_path: str = ""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A response.

    Attributes:
        body: The whole body, or its parts if it is streamed.
        status: HTTP status.
        content_type: Media type. Empty for a response without a body.
        headers: Further headers.
    """

    body: bytes | AsyncGenerator[bytes] = b""
    status: int = 200
    content_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)


Handler = Callable[[HttpRequest], Awaitable[HttpResponse]]


@dataclass(frozen=True, slots=True)
class Dialect:
    """How an API reports errors.

    Attributes:
        body: Returns the JSON value that describes an error.
        statuses: HTTP statuses by reason, if they differ from those of `attnlens_server.errors`.
        fields: Names of this API for a field path or its first part, such as `input` for `inputs`.
        headers: Headers of all responses.
        schema: Type of the body, for the OpenAPI document: see `Route.body`.
        truncation: How a client of this API has long texts truncated.
    """

    body: Callable[[RequestError], Any]
    statuses: Mapping[str, int] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    schema: Any = None
    truncation: str = "set truncate"

    def status(self, error: RequestError) -> int:
        """Return the HTTP status for an error."""
        return self.statuses.get(error.reason, error.http_status)

    def translate(self, error: RequestError) -> None:
        """Replace the names of fields and the remedy for long texts by those of this API."""
        if isinstance(error, InputTooLongError) and error.can_truncate:
            error.violations = tuple(
                replace(each, description=f"{each.description.removesuffix(error.remedy)}{self.remedy}")
                for each in error.violations
            )
            error.message = _message(error.violations)
        rename_fields(error, self.fields)

    @property
    def remedy(self) -> str:
        """What to do about a text that is too long."""
        return f"shorten it, or {self.truncation}"


PUBLIC: tuple[str, ...] = ()
HEALTH = ("Check",)
EMBED, ENCODE, TOKENIZE = ("Embed",), ("Encode",), ("Tokenize",)
SCORE, CLASSIFY, MODELS = ("Score",), ("Classify",), ("GetModel",)


class Route(NamedTuple):
    """A route. A path that ends in `*` matches all paths with that beginning.

    Attributes:
        method: HTTP method.
        path: Path.
        handler: Returns the response to a request.
        dialect: How errors are reported.
        methods: Methods of a policy that the route belongs to, `HEALTH`, or `PUBLIC` if anyone may use it.
        needs_page: Whether browsers may only send the request from this server's own pages.
        summary: What the route does, for the OpenAPI document. Defaults to the docstring of the handler.
        body: Type of the request body, for the OpenAPI document: a msgspec type, a JSON schema, or a
            `TranscodedBody`. None if there is no body.
        response: Type of the response, for the OpenAPI document: a msgspec type, a JSON schema, or the
            descriptor of a message. If None, any JSON value.
        media_type: Media type of the response. Empty for a response without a body.
    """

    method: str
    path: str
    handler: Handler
    dialect: Dialect
    methods: tuple[str, ...]
    needs_page: bool = False
    summary: str = ""
    body: Any = None
    response: Any = None
    media_type: str = JSON

    @property
    def is_public(self) -> bool:
        """Whether the route needs no credentials by default."""
        return self.methods in (PUBLIC, HEALTH)


def encode_json(value: Any) -> bytes:  # noqa: ANN401 - any JSON value
    """Serialize a JSON value that may contain C-contiguous NumPy arrays.

    orjson holds the GIL during a call, which delays all threads, so large arrays are serialized in pieces and
    joined by `bytes.join`, which releases it.
    """
    arrays: list[npt.NDArray[Any]] = []

    def placeholder(array: object) -> orjson.Fragment:
        if not isinstance(array, np.ndarray):
            raise TypeError
        arrays.append(array)
        return orjson.Fragment(_PLACEHOLDER)

    first, *others = orjson.dumps(value, default=placeholder).split(_PLACEHOLDER)
    pieces = [first]
    for array, after in zip(arrays, others, strict=True):
        pieces.extend(_array_pieces(array))
        pieces.append(after)
    return b"".join(pieces)


def _array_pieces(array: npt.NDArray[Any]) -> Iterator[bytes]:
    if array.size <= _PIECE_VALUES:
        yield orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)
        return
    yield b"["
    is_flat = array.ndim == 1
    for start in range(0, len(array), _PIECE_VALUES if is_flat else 1):
        yield b"," if start else b""
        if is_flat:
            piece = orjson.dumps(array[start : start + _PIECE_VALUES], option=orjson.OPT_SERIALIZE_NUMPY)
            yield piece[1:-1]
        else:
            yield from _array_pieces(array[start])
    yield b"]"


def parsed_bytes(body: bytes) -> int:
    """Return an upper bound on the memory of a parsed JSON body."""
    # A text takes up to four bytes per character if one of them is not ASCII.
    text_bytes = len(body) if body.isascii() and b"\\u" not in body else 4 * len(body)
    return text_bytes + _VALUE_BYTES * sum(body.count(character) for character in (b"[", b"{", b","))


def check_values(body: bytes, max_texts: int) -> None:
    """Check the number of lists, objects and strings of a JSON body before it is parsed.

    Parsers hold the GIL during a call, which delays all threads, for a second if a body of a few megabytes
    consists of empty lists. Numbers cost little. Strings are skipped in chunks, because one pass over a large
    body would hold the GIL as well.

    Raises:
        BodyError: There are too many.
    """
    limit = VALUES_PER_TEXT * max_texts + MAX_OTHER_VALUES
    if sum(body.count(character) for character in b'[{"') <= limit:
        return
    count, is_string, rest = 0, False, b""
    for start in range(0, len(body), _SCANNED_BYTES):
        chunk = rest + body[start : start + _SCANNED_BYTES]
        # An escape sequence may continue in the next chunk.
        num_backslashes = len(chunk) - len(chunk.rstrip(b"\\"))
        rest = b"\\" * (num_backslashes % 2)
        chunk = chunk[: len(chunk) - len(rest)].replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = chunk.split(b'"')
        outside = pieces[is_string::2]
        count += (len(pieces) - is_string) // 2 + sum(
            piece.count(b"[") + piece.count(b"{") for piece in outside
        )
        is_string ^= len(pieces) % 2 == 0
        if count > limit:
            problem = f"has more than {limit} lists, objects and strings: send several requests"
            raise BodyError([FieldViolation("the body", problem)])


def native_error(error: RequestError) -> dict[str, Any]:
    """Return the error body of the routes of attnlens."""
    body: dict[str, Any] = {"error": error.message, "reason": error.reason}
    if error.violations:
        body["violations"] = [
            {"field": violation.field, "description": violation.description} for violation in error.violations
        ]
    if error.metadata:
        body["metadata"] = error.metadata
    return body


class NativeError(msgspec.Struct, omit_defaults=True):
    """Body of an error.

    Attributes:
        error: What is wrong, and how to fix it.
        reason: Machine-readable reason, such as INVALID_FIELD.
        violations: Invalid fields.
        metadata: Further values by name.
    """

    error: str
    reason: str
    violations: list[dict[str, str]] = []
    metadata: dict[str, str] = {}


NATIVE = Dialect(native_error, schema=NativeError)
"""Error format of the routes of attnlens, and of unknown paths."""


class BodyParser:
    """Parses JSON bodies of a type.

    Args:
        body_type: A msgspec type.
        options: Options that the API has and the type lacks.

    Attributes:
        body_type: The type with these options.
    """

    def __init__(self, body_type: type[Body], options: Options | None = None) -> None:
        self._options = {name: values for name, values in (options or {}).items() if values is not None}
        self.body_type: type[Any] = body_type
        if self._options:
            fields = [(name, _option_type(values), None) for name, values in self._options.items()]
            self.body_type = msgspec.defstruct(
                body_type.__name__,
                fields,
                bases=(body_type,),
                namespace={"__doc__": body_type.__doc__},
                kw_only=True,
            )
        self._decoder = msgspec.json.Decoder(self.body_type)
        self._schema = inspect.type_info(body_type)

    def parse(self, body: bytes) -> Any:  # noqa: ANN401 - an instance of the type
        """Parse a body.

        Raises:
            BodyError: A field is missing, has an invalid value, or is an option with an unsupported value.
            HttpError: The body is not JSON.
        """
        try:
            parsed = self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise self._invalid_field(str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            message = f"the body is not valid JSON: {error}. Send a JSON object"
            raise HttpError(400, "MALFORMED_REQUEST", message) from None
        for name, values in self._options.items():
            value = getattr(parsed, name)
            # Not `in`, since True equals 1.
            if value is not None and not any(type(value) is type(same) and value == same for same in values):
                remedy = f"use {' or '.join(map(_json, values))}, or omit it" if values else "omit it"
                if name in REPLACEMENTS:
                    remedy += f", and send {REPLACEMENTS[name]}"
                problem = f"is {shown(value)}, which is not supported: {remedy}"
                raise BodyError([FieldViolation(name, problem)])
        return parsed

    def _invalid_field(self, message: str) -> BodyError:
        match = _PROBLEM_AT.fullmatch(message)
        path, problem = (match["path"], match["problem"]) if match else ("", message)
        if missing := _MISSING.fullmatch(problem):
            path, problem = f"{path}.{missing['name']}".removeprefix("."), "is missing: set it"
        elif names := _literals(self._schema, re.findall(r"[^.\[]+|\[", path)):
            wrong = _NOT_LITERAL.fullmatch(problem)
            found = shown(wrong["value"].strip("'")) if wrong else f"invalid ({problem.lower()})"
            problem = f"is {found}: use one of {', '.join(map(str, names))}"
        else:
            problem = f"is invalid: {problem[:1].lower()}{problem[1:]}"
        return BodyError([FieldViolation(path or "the body", problem)])


def _option_type(values: tuple[Any, ...]) -> Any:  # noqa: ANN401 - a type
    """Return the type of an option that has to have one of some values."""
    schema = {"enum": [*values, None], "description": "Options of other servers. Other values are rejected."}
    return Annotated[Any, msgspec.Meta(extra_json_schema=schema)]


def _literals(kind: inspect.Type, path: Sequence[str]) -> list[str | int]:
    """Return the values of the literal type at a path of field names, and `[` for an element of a list."""
    match kind:
        case inspect.Metadata():
            return _literals(kind.type, path)
        case inspect.UnionType():
            return [value for option in kind.types for value in _literals(option, path)]
        case inspect.LiteralType() if not path:
            return [value for value in kind.values if isinstance(value, str | int)]
        case inspect.ListType() if path and path[0] == "[":
            return _literals(kind.item_type, path[2:])  # after `[`, the index
        case inspect.StructType() if path:
            found = [field.type for field in kind.fields if field.encode_name == path[0]]
            return _literals(found[0], path[1:]) if found else []
    return []


def shown(value: Any) -> str:  # noqa: ANN401 - any JSON value
    """Return a value for a message, shortened. Lists and objects may be too deep to be serialized."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = value if isinstance(value, str) else _json(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _json(value: Any) -> str:  # noqa: ANN401 - any JSON value
    return json.dumps(value, ensure_ascii=False)


def rename_fields(error: RequestError, names: Mapping[str, str]) -> None:
    """Replace field names in the violations and the message of an error with the names of an API."""
    if error.violations and names and not isinstance(error, BodyError):
        error.violations = tuple(
            FieldViolation(_rename(violation.field, names), violation.description)
            for violation in error.violations
        )
        error.message = _message(error.violations)


def _message(violations: Sequence[FieldViolation]) -> str:
    text = "; ".join(f"{each.field} {each.description}" for each in violations[:3])
    return shortened(text, MAX_MESSAGE_BYTES)


def _rename(path: str, names: Mapping[str, str]) -> str:
    path = _OWN_LEVELS.sub(r"\1", path)
    if path in names:
        return names[path]
    name = re.match(r"\w*", path)
    first = name[0] if name else ""
    return names.get(first, first) + path[len(first) :]
