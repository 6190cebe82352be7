# syntax=docker/dockerfile:1
# Server image without PyTorch. docs/containers.md describes how to run it.
#   docker build --tag attnlens .                             serves on a CPU
#   docker build --tag attnlens-gpu --build-arg EXTRA=gpu .   serves on CUDA; image not yet run
ARG PYTHON=3.13

FROM python:${PYTHON}-slim AS build
ARG EXTRA=server
WORKDIR /source
RUN python -m venv /opt/attnlens
ENV PIP_CONSTRAINT=/source/constraints.txt
COPY . .
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/attnlens/bin/pip install ".[http,${EXTRA}]"

FROM python:${PYTHON}-slim
LABEL org.opencontainers.image.title="attnlens" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/attnlens /opt/attnlens
# Set options of `attnlens serve` in the environment, such as ATTNLENS_SERVE_HTTP_PORT=8080. Each port that is
# switched on can be published.
ENV PATH=/opt/attnlens/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    ATTNLENS_SERVE_HOST=0.0.0.0 \
    ATTNLENS_SERVE_HTTP_HOST=0.0.0.0 \
    ATTNLENS_SERVE_METRICS_HOST=0.0.0.0
USER 10001:10001
EXPOSE 50051
HEALTHCHECK --interval=10s --timeout=5s --start-period=2m \
    CMD ["attnlens", "health"]
ENTRYPOINT ["attnlens"]
CMD ["serve", "/bundle"]
