"""Server reflection, so that grpcurl and its like need no .proto file."""

from collections.abc import Sequence

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"


def add_reflection(server: grpc.aio.Server, service_names: Sequence[str]) -> None:
    """Serve grpc.reflection.v1 and v1alpha for `service_names`.

    grpcio-reflection has v1alpha only. v1 is the same protocol under another name, message for message
    (gRFC A15), so the same handler serves both.
    """
    names = [*service_names, REFLECTION_V1, reflection.SERVICE_NAME]
    reflection.enable_server_reflection(names, server)
    servicer = reflection.aio.ReflectionServicer(service_names=names)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = grpc.method_handlers_generic_handler(REFLECTION_V1, {"ServerReflectionInfo": handler})
    server.add_generic_rpc_handlers((methods,))
