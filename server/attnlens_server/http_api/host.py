"""The HTTP side of a server process: all routes of a model, and the port they listen on."""

import ssl
import time
from typing import Any

from starlette.middleware.cors import CORSMiddleware

from attnlens_server.bundle import Model
from attnlens_server.config import ServerConfig
from attnlens_server.grpc_api.methods import EncoderService
from attnlens_server.http_api.app import Authenticate, HttpApp
from attnlens_server.http_api.health import HealthRoutes
from attnlens_server.http_api.listener import HttpListener
from attnlens_server.http_api.native import NativeRoutes
from attnlens_server.http_api.openai import OpenAIRoutes
from attnlens_server.http_api.openapi import OpenApiRoutes
from attnlens_server.http_api.origins import OriginPolicy
from attnlens_server.http_api.pages import Pages
from attnlens_server.http_api.prompts import PromptChoice
from attnlens_server.http_api.viewer import ViewerRoutes
from attnlens_server.listening import TcpAddress
from attnlens_server.serving.service import ModelService

_EXPOSED_HEADERS = ("X-Request-Id", "Retry-After", "Retry-After-Ms")


class HttpHost:
    """Serves all routes of one model.

    Args:
        service: Service of the model.
        methods: gRPC methods, which the routes of attnlens call.
        model: The model.
        config: Server configuration.
        authenticate: Checks the credentials of a request. If None, none are needed.

    Attributes:
        app: ASGI application with all routes.
    """

    def __init__(
        self,
        service: ModelService,
        methods: EncoderService,
        model: Model,
        config: ServerConfig,
        authenticate: Authenticate | None = None,
    ) -> None:
        self._config = config
        self._scheme = "http" if config.tls_cert is None else "https"
        self._viewer = ViewerRoutes(service, Pages(service, model), config.max_response_bytes)
        prompts = PromptChoice(model.prompts)
        openai = OpenAIRoutes(
            service, model.name, int(time.time()), prompts, accepts_token_ids=config.http_token_ids
        )
        routes = [
            *HealthRoutes(service.check_serving).routes(),
            *openai.routes(),
            *NativeRoutes(service, methods, config.max_inputs_per_request).routes(),
            *self._viewer.routes(),
        ]
        routes += OpenApiRoutes(routes, needs_key=authenticate is not None).routes()
        origins = OriginPolicy(
            self._scheme,
            public_origin=config.http_origin,
            names=(config.http_host,),
            allowed_origins=config.allowed_origins,
        )
        app = HttpApp(
            service,
            routes,
            origins,
            max_body_bytes=config.request_limit,
            body_timeout_s=config.request_timeout_s,
            stall_timeout_s=config.stall_timeout_s,
            log_requests=config.log_requests,
            authenticate=authenticate,
        )
        self.app: Any = _with_cors(app, config.allowed_origins) if config.allowed_origins else app
        self._listener = HttpListener(
            self.app, max_connections=config.max_connections, request_timeout_s=config.request_timeout_s
        )

    async def listen(self, port: int, context: ssl.SSLContext | None) -> str:
        """Listen and return the URL of the viewer.

        Raises:
            StartupError: The address cannot be bound.
        """
        address = await self._listener.start(TcpAddress(self._config.http_host, port), context, "http-port")
        return f"{self._scheme}://{address}/"

    async def stop(self, timeout_s: float) -> None:
        """Reject new requests, and end running ones."""
        await self._listener.stop(timeout_s)
        self._viewer.close()


def _with_cors(app: HttpApp, origins: tuple[str, ...]) -> CORSMiddleware:
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=_EXPOSED_HEADERS,
        max_age=3600,
    )
