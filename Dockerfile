# zerofit with the versions of constraints.txt. How to build and run it: docs/container.md.
#   TORCH  cpu, cuda, or 'torch --index-url URL', as for make setup. CUDA's libraries come with torch
#   BASE   a Debian or Ubuntu with Python 3.11 to 3.13

ARG BASE=docker.io/library/debian:12-slim

FROM ${BASE} AS base
# The compiler is used by runs: DeepSpeed builds CPU Adam (offload) for the processor at hand, torch.compile its kernels.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates g++ libaio-dev python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*
# Whichever user runs it may write to /home/zerofit, where libraries have their caches.
RUN useradd --uid 1000 --non-unique --create-home zerofit \
 && install --directory --owner 1000 --mode 1777 /home/zerofit /home/zerofit/.cache /work
ENV PATH=/opt/zerofit/bin:$PATH HOME=/home/zerofit USER=zerofit NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM base AS dependencies
ARG TORCH=cpu
COPY constraints.txt /src/
COPY scripts/setup.sh /src/scripts/
COPY zerofit/strategy/gpus.py /src/zerofit/strategy/
# The secret is a pip.conf, for an index of your own.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    PIP_NO_CACHE_DIR=1 TORCH="${TORCH}" bash /src/scripts/setup.sh /opt/zerofit dependencies

FROM dependencies AS wheel
COPY . /src/
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /dist /src

# For .devcontainer: `make setup` makes the environment. Any user may, since editors take the user's number on the host.
FROM base AS development
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends git make \
 && rm -rf /var/lib/apt/lists/* \
 && mkdir --mode 1777 /opt/zerofit
ENV VENV=/opt/zerofit
USER 1000:1000

FROM dependencies
LABEL org.opencontainers.image.title="zerofit" \
      org.opencontainers.image.description="Trains language models under any strategy of Accelerate and DeepSpeed" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=wheel /dist /dist
RUN pip install --no-cache-dir --no-deps --no-index /dist/*.whl
USER 1000:1000
WORKDIR /work
ENTRYPOINT ["zerofit"]
CMD ["--help"]
