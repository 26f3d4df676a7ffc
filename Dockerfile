# A server on a CPU:
#   docker build -t plait .
#   docker run --rm -p 127.0.0.1:8080:8080 -v plait:/cache plait org/name
# Other commands: docker run --rm -v plait:/cache --entrypoint plait plait pull org/name
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PATH=/opt/plait/bin:$PATH
RUN python -m venv /opt/plait
WORKDIR /src
COPY constraints.txt ./
# The build for CPUs: the usual one brings gigabytes for GPUs.
RUN pip install -c constraints.txt --index-url https://download.pytorch.org/whl/cpu torch
COPY pyproject.toml hatch_build.py README.md LICENSE CHANGELOG.md ./
COPY plait plait
RUN pip install -c constraints.txt ".[hub]"
# Kernels of common models, for every level of processors that this machine runs, into the installed package.
COPY examples/nano-hybrid examples/nano-hybrid
COPY tools/ship_kernels.py tools/
RUN cd /opt && python /src/tools/ship_kernels.py

FROM python:${PYTHON}-slim
# Caches (models, compiled kernels, packed weights, startup images) are under the home, which is a volume.
RUN useradd --uid 10001 --home-dir /cache --create-home --shell /usr/sbin/nologin plait
COPY --from=build /opt/plait /opt/plait
ENV PATH=/opt/plait/bin:$PATH HOME=/cache PYTHONDONTWRITEBYTECODE=1 \
    PLAIT_ADDRESS_FILE=/dev/shm/plait-address
USER 10001
WORKDIR /cache
VOLUME /cache
EXPOSE 8080
STOPSIGNAL SIGTERM
# It asks the server at the address that `plait serve` wrote: of every port, with TLS or without.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["plait", "health"]
ENTRYPOINT ["plait", "serve", "--host", "0.0.0.0", "--port", "8080"]
CMD ["--help"]
