"""The HTTP side of a server process: all routes of a model, and the port they listen on."""

import ssl
import time
from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, Metric
from starlette.middleware.cors import CORSMiddleware

from attnlens_server.access import is_loopback
from attnlens_server.bundle import Bundle
from attnlens_server.config import ServerConfig
from attnlens_server.engine import Engine
from attnlens_server.grpc_api.methods import EncoderService
from attnlens_server.http_api.app import HttpApp
from attnlens_server.http_api.cohere import CohereRoutes
from attnlens_server.http_api.identity import Gate
from attnlens_server.http_api.json_bodies import TRUNCATED
from attnlens_server.http_api.listener import HttpListener
from attnlens_server.http_api.metrics import ServerMetrics, gauge, limited
from attnlens_server.http_api.native import NativeRoutes
from attnlens_server.http_api.ollama import OllamaRoutes
from attnlens_server.http_api.openai import OpenAIRoutes
from attnlens_server.http_api.openapi import OpenApiRoutes
from attnlens_server.http_api.operations import OperationsRoutes, OperationsServer
from attnlens_server.http_api.origins import OriginPolicy
from attnlens_server.http_api.pages import Pages
from attnlens_server.http_api.prompts import PromptChoice
from attnlens_server.http_api.rerank import RerankRoutes
from attnlens_server.http_api.tei import TeiRoutes
from attnlens_server.http_api.viewer import ViewerRoutes
from attnlens_server.http_api.vllm import VllmRoutes
from attnlens_server.http_api.weaviate import WeaviateRoutes
from attnlens_server.observing.observer import Observer
from attnlens_server.operations.service import ModelService

_EXPOSED_HEADERS = ("X-Request-Id", "Retry-After", "Retry-After-Ms", "X-Should-Retry", TRUNCATED)


class HttpHost:
    """Serves all routes of one model.

    Args:
        service: Service of the model.
        methods: gRPC methods, which the routes of attnlens call.
        engine: Engine of the model.
        bundle: Bundle of the model.
        config: Server configuration.
        observer: Notified of each request. It gets the metrics of this host.
        gate: Access control.

    Attributes:
        app: ASGI application with all routes.
        metrics: Metrics of the server.
        url: URL of the viewer, once `listen` has returned. Empty if the configuration has no HTTP port.
        metrics_url: URL of the metrics, if they have a port of their own.
    """

    def __init__(
        self,
        service: ModelService,
        methods: EncoderService,
        engine: Engine,
        bundle: Bundle,
        config: ServerConfig,
        observer: Observer,
        gate: Gate,
    ) -> None:
        model = bundle.model
        self.url = self.metrics_url = ""
        self.metrics = ServerMetrics(service, engine, model, bundle.precision, observer)
        observer.count = self.metrics.observe
        self.metrics.add(self._own_metrics)
        self._config = config
        self._scheme = "http" if config.tls_cert is None else "https"
        self._viewer = ViewerRoutes(service, Pages(service, model), config.max_response_bytes)
        self._operations = OperationsRoutes(service.process.check_healthy, self.metrics)
        self._operations_server: OperationsServer | None = None
        prompts = PromptChoice(model.prompts)
        openai = OpenAIRoutes(
            service, model.name, int(time.time()), prompts, accepts_token_ids=config.http_token_ids
        )
        routes = [
            *openai.routes(),
            *NativeRoutes(service, methods, config.max_inputs_per_request).routes(),
            *TeiRoutes(service, model, config, engine).routes(),
            *RerankRoutes(service, model, engine).routes(),
            *VllmRoutes(service, model).routes(),
            *CohereRoutes(service, model, prompts).routes(),
            *WeaviateRoutes(service, model, prompts).routes(),
            *OllamaRoutes(service).routes(),
            *self._operations.routes(),
            *self._viewer.routes(),
        ]
        routes += OpenApiRoutes(routes, needs_key=gate.needs_key).routes()
        origins = OriginPolicy(
            self._scheme,
            public_origin=config.http_origin,
            names=(config.http_host,),
            allowed_origins=config.allowed_origins,
            is_local=config.http_port is not None and is_loopback(config.http_host),
        )
        app = HttpApp(
            service,
            routes,
            origins,
            gate,
            max_body_bytes=config.request_limit,
            body_timeout_s=config.request_timeout_s,
            stall_timeout_s=config.stall_timeout_s,
            observer=observer,
        )
        self.app: Any = _with_cors(app, config.allowed_origins) if config.allowed_origins else app
        self._listener = HttpListener(
            self.app, max_connections=config.max_connections, request_timeout_s=config.request_timeout_s
        )

    async def listen(self, context: ssl.SSLContext | None) -> None:
        """Listen on the configured ports.

        Raises:
            StartupError: An address cannot be bound.
        """
        config = self._config
        if (wanted := config.metrics_address) is not None:
            origins = OriginPolicy(
                "http",
                public_origin=config.http_origin,
                names=(config.metrics_host,),
                allowed_origins=(),
                is_local=is_loopback(config.metrics_host),
            )
            self._operations_server = OperationsServer(self._operations, origins)
            address = self._operations_server.start(wanted)
            self.metrics_url = f"http://{address}/metrics"
        if (wanted := config.http_address) is not None:
            address = await self._listener.start(wanted, context, "http-port")
            self.url = f"{self._scheme}://{address}/"

    def _own_metrics(self) -> Iterator[Metric]:
        yield from limited("attnlens_http_connections", "Open HTTP connections", self._listener.connections)
        yield CounterMetricFamily(
            "attnlens_http_connections_rejected",
            "HTTP connections that were closed at once because of a limit.",
            value=self._listener.num_rejected,
        )
        if (limit := self._config.max_memory_bytes) is not None:
            yield gauge("attnlens_process_memory_limit_bytes", "Limit of the memory of the process.", limit)

    async def stop(self, timeout_s: float) -> None:
        """Reject new requests, and end running ones. Health checks and metrics remain until `close`."""
        await self._listener.stop(timeout_s)
        self._viewer.close()

    def close(self) -> None:
        """Stop serving health checks and metrics."""
        if self._operations_server is not None:
            self._operations_server.stop()


def _with_cors(app: HttpApp, origins: tuple[str, ...]) -> CORSMiddleware:
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=_EXPOSED_HEADERS,
        max_age=3600,
    )
