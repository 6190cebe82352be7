"""A model as a Ray Serve deployment, over HTTP and gRPC.

HTTP: Serve's proxy -> replica -> `attnlens_server.asgi`
gRPC: Serve's proxy -> replica -> in-process call -> handlers of `attnlens_server.grpc_api`
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, cast

from ray import serve
from ray.serve.grpc_util import RayServegRPCContext

from attnlens_client.core.events import Event, Failed, Reply, Start
from attnlens_server.asgi import ModelApp
from attnlens_server.config import ServerConfig
from attnlens_server.errors import NotReadyError
from attnlens_server.grpc_api.methods import DESCRIPTOR, Handler, add_service, handlers
from attnlens_server.in_process.call import CallError, LocalCall
from attnlens_server.served_model import ServedModel

GRPC_SERVICE = "attnlens_ray.serving.add_encoder_service"
"""Entry of `grpc_servicer_functions` in Serve's gRPC options."""


def add_encoder_service(servicer: Any, server: Any) -> None:  # noqa: ANN401 - as Serve calls it
    """Register the methods of `attnlens.v1.EncoderService` in Serve's gRPC proxy.

    Serve replaces each handler by one that sends the request to a replica. Without message classes, the proxy
    does not parse requests. Replicas parse them with the limits and errors of a server.
    """
    add_service(server, {method.name: servicer for method in DESCRIPTOR.methods}, receives=False)


class _Serialized:
    """A serialized message. Serve and `LocalCall` use no other method of messages."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self) -> bytes:  # noqa: N802 - as in protobuf
        """Return the message."""
        return self._data


class _Call(LocalCall):
    """A call that Serve's gRPC proxy received. Runs in a task of its own, which owns its memory."""

    def __init__(self, name: str, handle: Handler, request: bytes, grpc_context: RayServegRPCContext) -> None:
        self._context = grpc_context
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        start = Start(0, cast("Any", name), _Serialized(request), None)
        super().__init__(start, handle, self._events.put_nowait)

    def peer(self) -> str:
        """Return the address of the client."""
        return self._context.peer()

    def invocation_metadata(self) -> Any:  # noqa: ANN401 - as in gRPC
        """Return the metadata of the client."""
        return self._context.invocation_metadata()

    async def messages(self) -> AsyncGenerator[bytes]:
        """Run the call and yield its messages.

        Raises:
            CallError: The call failed. Its status is set in the context.
        """
        task = asyncio.create_task(self.run())
        try:
            while isinstance(event := await self._events.get(), Reply):
                yield event.message
                self.acknowledge()
        finally:
            task.cancel()
        if isinstance(event, Failed):
            error = cast("CallError", event.error)
            self._context.set_code(error.code())
            self._context.set_details(error.details())
            self._context.set_trailing_metadata(list(error.trailing_metadata()))
            raise error


class EncoderReplica:
    """A replica with a model of its own.

    For gRPC, Serve calls the method with the name of the gRPC method.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._model = ModelApp(config)

    def __serve_build_asgi_app__(self) -> ModelApp:
        """Return the HTTP application. Serve runs its lifespan, which opens the model."""
        return self._model

    def check_health(self) -> None:
        """Raise an error if the engine has stopped. Serve then replaces the replica."""
        self._served().service.process.check_healthy()

    def _served(self) -> ServedModel:
        if self._model.served is None:
            raise NotReadyError("the replica is starting or stopping: try again soon", retry_after_s=0.5)
        return self._model.served

    def _call(self, name: str, request: bytes, context: RayServegRPCContext) -> _Call:
        served = self._served()
        handles = handlers(served.methods, served.calls, self._config.max_inputs_per_request)
        return _Call(name, handles[name], request, context)


def _unary_method(name: str) -> Callable[..., Any]:
    async def method(self: EncoderReplica, request: bytes, grpc_context: RayServegRPCContext) -> _Serialized:
        with suppress(
            CallError
        ):  # Serve sends the status in the context, with trailers, if nothing is raised
            async for message in self._call(name, request, grpc_context).messages():
                return _Serialized(message)
        return _Serialized(b"")

    return method


def _stream_method(name: str) -> Callable[..., Any]:
    async def method(
        self: EncoderReplica, request: bytes, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[_Serialized]:
        async with aclosing(self._call(name, request, grpc_context).messages()) as messages:
            async for message in messages:
                yield _Serialized(message)

    return method


for _method in DESCRIPTOR.methods:
    _make = _stream_method if _method.server_streaming else _unary_method
    setattr(EncoderReplica, _method.name, _make(_method.name))

_Deployment = serve.deployment()(serve.ingress()(EncoderReplica))


def application(
    bundle: str | os.PathLike[str],
    *,
    num_cpus: int = 1,
    min_replicas: int = 1,
    max_replicas: int = 1,
    target_ongoing_requests: float = 8,
    max_ongoing_requests: int = 64,
    **settings: Any,  # noqa: ANN401 - fields of ServerConfig
) -> serve.Application:
    """Return a Serve application for one bundle.

    HTTP has all routes of a server. For gRPC, start Serve with `GRPC_SERVICE` in `grpc_servicer_functions`.

    Args:
        bundle: Bundle directory. It must exist on every node.
        num_cpus: Number of CPUs that Ray reserves per replica, and of threads per model.
        min_replicas: Minimum number of replicas.
        max_replicas: Maximum number of replicas.
        target_ongoing_requests: Number of waiting and running requests per replica. Serve adds replicas if
            there are more, and removes them if there are fewer.
        max_ongoing_requests: Number of requests that a replica receives. Further requests wait in the proxy.
        settings: Fields of `ServerConfig`, such as `precision`. Those for ports and TLS have no effect.

    Raises:
        ConfigError: A setting is invalid.

    >>> serve.start(grpc_options={"port": 9000, "grpc_servicer_functions": [GRPC_SERVICE]})
    >>> serve.run(application("bundles/minilm", num_cpus=4, max_replicas=8))
    """
    paths = {name: Path(settings[name]) for name in ("api_keys", "policy") if settings.get(name)}
    config = ServerConfig(bundle=Path(bundle), **{"threads": num_cpus, **settings, **paths})
    autoscaling = {
        "min_replicas": min_replicas,
        "max_replicas": max_replicas,
        "target_ongoing_requests": target_ongoing_requests,
    }
    return _Deployment.options(
        autoscaling_config=autoscaling,
        max_ongoing_requests=max_ongoing_requests,
        ray_actor_options={"num_cpus": num_cpus},
    ).bind(config)


def build(args: dict[str, Any]) -> serve.Application:
    """Return the application for the `args` of a Serve config file. They are arguments of `application`."""
    return application(**args)
