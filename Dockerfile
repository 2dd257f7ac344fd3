# The installed dependencies come from the first stage; the second has Python, them and the program, and no pip.
FROM python:3.12.11-slim-bookworm AS build
COPY requirements.txt /
RUN python -m venv --without-pip /venv \
    && pip --python /venv/bin/python install --no-cache-dir --disable-pip-version-check -r /requirements.txt

FROM python:3.12.11-slim-bookworm
RUN pip uninstall --yes pip \
    && useradd --system --uid 10001 --no-create-home --home-dir /app --shell /usr/sbin/nologin dlqbatch
COPY --from=build /venv /venv
WORKDIR /app
COPY handler.py application.properties ./
COPY dlqbatch dlqbatch
# Compiled here, because the user below may not write caches, and without them every run starts twice as slowly.
RUN /venv/bin/python -m compileall -q /venv/lib handler.py dlqbatch
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1
USER 10001
ENTRYPOINT ["python", "handler.py"]
CMD ["drain"]
