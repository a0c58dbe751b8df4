# vLLM with the blasst backend on a CPU, from the lock that the tests use.
#   docker build -f deploy/images/engine-cpu.Dockerfile -t blasst-engine-cpu \
#     --build-arg PIP_EXTRA_INDEX_URL=INDEX .
# INDEX: PyTorch's index of CPU wheels. Without it torch's CUDA build comes, 4 GB more.
FROM python:3.12-slim
# The C kernel is compiled for the machine that runs it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home --shell /usr/sbin/nologin blasst \
    && install -d -o 10001 -g 10001 -m 0700 /state
ARG PIP_EXTRA_INDEX_URL
WORKDIR /opt/blasst
COPY . .
ENV PYTHONSAFEPATH=1 PIP_NO_CACHE_DIR=1
RUN PYTHON=python deploy/cpu/install.sh /opt/venv
ENV PATH=/opt/venv/bin:$PATH \
    VLLM_BLASST_STATE_DIR=/state \
    VLLM_CPU_KVCACHE_SPACE=4 \
    VLLM_NO_USAGE_STATS=1
USER 10001:10001
WORKDIR /home/blasst
EXPOSE 8000
# vLLM takes the model only as its first word: MODEL --attention-backend blasst follow.
ENTRYPOINT ["vllm", "serve"]
