"""Server reflection, so that tools such as grpcurl work without .proto files."""

from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

import grpc
from google.protobuf.descriptor_pool import Default, DescriptorPool
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse

from attnlens_server.grpc_api.identity import Check, accept
from attnlens_server.grpc_api.open_streams import OpenStreams
from attnlens_server.grpc_api.status import parse_or_abort

REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
Context = grpc.aio.ServicerContext[Any, Any]


class _Pools:
    """Several descriptor pools as one, whose methods raise KeyError if no pool has the name."""

    def __init__(self, *pools: DescriptorPool) -> None:
        self._pools = pools

    def __getattr__(self, method: str) -> Any:  # noqa: ANN401 - a method of DescriptorPool
        def find(*arguments: Any) -> Any:  # noqa: ANN401
            for pool in self._pools:
                with suppress(KeyError):
                    return getattr(pool, method)(*arguments)
            raise KeyError(*arguments)

        return find


def add_reflection(
    server: grpc.aio.Server,
    service_names: Sequence[str],
    streams: OpenStreams,
    *pools: DescriptorPool,
    check_access: Check = accept,
) -> None:
    """Register grpc.reflection.v1 and v1alpha for services in the default pool or in `pools`.

    grpcio-reflection only has v1alpha. v1 has the same messages under another service name (gRFC A15).
    """
    names = [*service_names, REFLECTION_V1, reflection.SERVICE_NAME]
    servicer = reflection.aio.ReflectionServicer(service_names=names, pool=_Pools(*pools, Default()))

    async def reflect(messages: AsyncIterator[bytes], context: Context) -> AsyncIterator[Any]:
        await check_access(context, "ServerReflectionInfo")

        async def requests() -> AsyncIterator[ServerReflectionRequest]:
            async for data in messages:
                yield await parse_or_abort(ServerReflectionRequest, data, context)

        async with streams.hold(context):
            async for response in servicer.ServerReflectionInfo(requests(), context):
                yield response

    behavior: Any = reflect
    handler: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
        behavior, response_serializer=ServerReflectionResponse.SerializeToString
    )
    for name in (REFLECTION_V1, reflection.SERVICE_NAME):
        methods = grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler})
        server.add_generic_rpc_handlers((methods,))
