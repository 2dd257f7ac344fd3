# The base is named by tag; the update bot pins it by digest (renovate.json).
# The installed dependencies come from the first stage; the second has Python, them and the program, and no pip.
FROM python:3.12.11-slim-bookworm AS build
# With the libraries of AWS: one image for every platform, so that S3, SNS and Secrets Manager are a setting and not another
# build. They are 45 MB of the 110 that are added to the base, and only a run that uses them loads them.
# `--build-arg EXTRAS="aws console otlp"` adds what the console needs, 10 MB, and OpenTelemetry, 30 MB.
COPY requirements.txt requirements-aws.txt requirements-console.txt requirements-otlp.txt /
ARG EXTRAS=aws
# hadolint ignore=SC2046
RUN python -m venv --without-pip /venv \
    && pip --python /venv/bin/python install --no-cache-dir --disable-pip-version-check \
    $(printf -- '-r /requirements-%s.txt ' $EXTRAS)

FROM python:3.12.11-slim-bookworm
LABEL org.opencontainers.image.title="dlqbatch" org.opencontainers.image.version="0.1.0" \
    org.opencontainers.image.licenses="MIT"
RUN pip uninstall --yes pip \
    && useradd --system --uid 10001 --no-create-home --home-dir /app --shell /usr/sbin/nologin dlqbatch
COPY --from=build /venv /venv
WORKDIR /app
COPY handler.py application.properties ./
COPY dlqbatch dlqbatch
# Compiled here, because the user below may not write caches, and without them every run starts twice as slowly.
RUN /venv/bin/python -m compileall -q /venv/lib handler.py dlqbatch
# The command that the program's own hints name, for a person in the container; it is on PATH.
RUN printf '#!/bin/sh\nexec python /app/handler.py "$@"\n' >/venv/bin/dlqbatch && chmod 755 /venv/bin/dlqbatch
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1
# It writes nothing but to a database of its own (a read-only root will do), and listens nowhere but for `schedule` and `console`.
USER 10001
ENTRYPOINT ["python", "handler.py"]
CMD ["drain"]
