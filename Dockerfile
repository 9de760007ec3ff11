# syntax=docker/dockerfile:1.7
#
#   docker build --target cpu  -t chairlift:cpu .     the default model is in the image
#   docker build --target cuda -t chairlift:cuda .    for NVIDIA GPUs: docker run --gpus all ...
#
#   docker run --rm -p 127.0.0.1:8000:8000 chairlift:cpu [serve --max-num-seqs 32 ...]
#
# Runs as any user id (in group 0), also with --read-only: only /cache (models) and /tmp are written to. Every flag of
# `chairlift serve` is a variable too: -e CHAIRLIFT_MODEL=... ; set CHAIRLIFT_API_KEY before you open it to a network.

ARG PYTHON=3.12.13-slim-trixie

# --- builds the virtual environment; nothing else of these stages gets into an image

FROM python:${PYTHON} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/chairlift/bin:$PATH
WORKDIR /src
RUN python -m venv /opt/chairlift
COPY pyproject.toml constraints.txt ./
# Requirements apart from the sources, so that a change of code does not install torch again.
# With the extra for traces, which is 9 MB.
RUN python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; print(*p["dependencies"], *p["optional-dependencies"]["otel"], sep="\n")' \
    > requirements.txt

FROM build AS build-cpu
# For the C kernels. Any gcc from 12 on will do, hence no version; it stays in this stage.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
# PyTorch's CPU build, without 3 GB of CUDA libraries. Its index has torch alone at the versions we pin: hence --no-deps.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --no-deps --constraint constraints.txt --index-url "$TORCH_INDEX" torch \
    && pip install --constraint constraints.txt --requirement requirements.txt setuptools
COPY . .
RUN pip install --no-cache-dir --no-deps --no-build-isolation .

FROM build-cpu AS model
RUN --mount=type=cache,target=/var/cache/chairlift \
    CHAIRLIFT_CACHE_DIR=/var/cache/chairlift chairlift pull \
    && cp -R /var/cache/chairlift /models \
    && chmod -R g=u /models

FROM build AS build-cuda
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --constraint constraints.txt --requirement requirements.txt setuptools
COPY . .
RUN pip install --no-cache-dir --no-deps --no-build-isolation .

# --- the images

FROM python:${PYTHON} AS runtime
LABEL org.opencontainers.image.title="Chairlift" \
      org.opencontainers.image.description="OpenAI-compatible LLM server with continuous batching" \
      org.opencontainers.image.licenses="Apache-2.0"
# USER and LOGNAME: libraries ask for the user's name, which an arbitrary user id does not have.
ENV PATH=/opt/chairlift/bin:$PATH \
    HOME=/cache USER=chairlift LOGNAME=chairlift \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HF_HOME=/cache/huggingface CHAIRLIFT_CACHE_DIR=/cache \
    CHAIRLIFT_HOST=0.0.0.0 CHAIRLIFT_PORT=8000
RUN useradd --no-log-init --no-create-home --uid 10001 --gid 0 --home-dir /cache chairlift \
    && install --directory --owner=chairlift --group=0 --mode=2775 /cache
USER 10001:0
WORKDIR /cache
VOLUME /cache
EXPOSE 8000
STOPSIGNAL SIGTERM
# Healthy = the engine makes progress. Loading a large model takes minutes; a failure counts only after that. The port and
# HTTPS are known by their variables, hence the shell. (-P: nothing is imported from /cache.)
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s --retries=3 \
    CMD ["sh", "-c", "exec python -P -m server.health --port \"$CHAIRLIFT_PORT\" ${CHAIRLIFT_SSL_CERTFILE:+--tls} ${CHAIRLIFT_SSL_CA_CERTS:+--handshake}"]
ENTRYPOINT ["chairlift"]
CMD ["serve"]

FROM runtime AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-cuda /opt/chairlift /opt/chairlift

FROM runtime AS cpu
# The default model lies beside the volume, not in it, so that an empty or old volume cannot hide it. To unpack a .gguf
# file of your own with a read-only root: -e CHAIRLIFT_CACHE_DIR=/cache.
ENV CHAIRLIFT_CACHE_DIR=/models
COPY --from=model /models /models
COPY --from=build-cpu /opt/chairlift /opt/chairlift
