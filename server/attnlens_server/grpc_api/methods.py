"""`attnlens.v1.EncoderService` as gRPC sees it: names, and what takes the bytes of a request."""

import grpc
from google.protobuf.message_factory import GetMessageClass

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens_server.calls import Calls, Parser
from attnlens_server.service import EncoderService

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["EncoderService"]
SERVICE_NAME: str = DESCRIPTOR.full_name

# The fields that lead to the texts of a request.
_INPUTS = {"inputs": pb.EncodeRequest.INPUTS_FIELD_NUMBER}
_TEXTS = {
    "Embed": {"inputs": pb.EmbedRequest.INPUTS_FIELD_NUMBER},
    "Encode": _INPUTS,
    "EncodeStream": {"encode": pb.EncodeStreamRequest.ENCODE_FIELD_NUMBER, **_INPUTS},
    "Tokenize": {"texts": pb.TokenizeRequest.TEXTS_FIELD_NUMBER},
}


def add_service(server: grpc.aio.Server, service: EncoderService, calls: Calls, max_texts: int) -> None:
    """Serve the methods of `service`, each within the life of a call."""
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {}
    for method in DESCRIPTOR.methods:
        parser = Parser(GetMessageClass(method.input_type), _TEXTS.get(method.name, {}), max_texts)
        handle = calls.handler(parser, getattr(service, method.name), method.name)
        make = (
            grpc.unary_stream_rpc_method_handler
            if method.server_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        handlers[method.name] = make(handle)  # without serializers: bytes in, bytes out
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))
