# The sidecar alone: no torch, no vLLM, no shell needed to run.
#   docker build -f deploy/images/sidecar.Dockerfile -t blasst-sidecar .
FROM python:3.12-slim AS build
WORKDIR /src
COPY . .
ENV PYTHONSAFEPATH=1
RUN python -m venv /opt/blasst \
    && /opt/blasst/bin/pip install --no-cache-dir -c deploy/cpu/lock.txt '.[server,traces]'

FROM python:3.12-slim
COPY --from=build /opt/blasst /opt/blasst
# A fixed number, the same as of the engines: the state folder is private to its user.
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin blasst \
    && install -d -o 10001 -g 10001 -m 0700 /state
ENV PATH=/opt/blasst/bin:$PATH PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
EXPOSE 8300
HEALTHCHECK --interval=10s --timeout=3s CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8300/healthz', timeout=2)"]
ENTRYPOINT ["blasst", "sidecar", "--state-dir", "/state"]
