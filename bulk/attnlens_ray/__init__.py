"""Embeddings for Ray Data, and a model as a Ray Serve application."""

from attnlens_ray.data import Embedder, embed
from attnlens_ray.serving import GRPC_SERVICE, application, build

__all__ = ["GRPC_SERVICE", "Embedder", "application", "build", "embed"]
