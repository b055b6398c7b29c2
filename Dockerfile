# syntax=docker/dockerfile:1
# docker build --build-arg VERSION=0.1.0 --build-arg REVISION=$(git rev-parse HEAD) --tag crmctl:0.1.0 .
#
# Pin both stages by digest where the image is built for production: --build-arg BASE=python:3.13-slim-trixie@sha256:…
ARG BASE=python:3.13-slim-trixie

# What is installed is exactly what the lock files name, by hash; wheels only, so no compiler is ever needed.
FROM ${BASE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY requirements/runtime.lock requirements/build.lock requirements/
RUN ["python", "-m", "venv", "--without-pip", "/opt/crmctl"]
RUN ["python", "-m", "pip", "--python", "/opt/crmctl/bin/python", "install", "--no-deps", "--require-hashes", "--only-binary=:all:", "--requirement", "requirements/runtime.lock"]
RUN ["python", "-m", "pip", "install", "--no-deps", "--require-hashes", "--only-binary=:all:", "--requirement", "requirements/build.lock"]
COPY pyproject.toml README.md ./
COPY src src
RUN ["python", "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", "/wheels", "."]
RUN ["sh", "-c", "python -m pip --python /opt/crmctl/bin/python install --no-deps --no-index /wheels/crmctl-*.whl"]

FROM ${BASE}
ARG VERSION=0.0.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="crmctl" \
      org.opencontainers.image.description="Batch operations of a property developer's CRM: one subcommand, one idempotent transaction" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
ENV PATH=/opt/crmctl/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
COPY --from=build /opt/crmctl /opt/crmctl
# By number, so that Kubernetes can see that it is not root.
USER 10001:10001
WORKDIR /
# Exec form: crmctl is process 1 and gets SIGTERM itself.
ENTRYPOINT ["crmctl"]
CMD ["--help"]
