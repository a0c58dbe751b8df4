# vLLM's own CUDA image with the blasst backend added.
#   docker build -f deploy/images/engine-gpu.Dockerfile -t blasst-engine-gpu .
FROM python:3.12-slim AS build
WORKDIR /src
COPY . .
ENV PYTHONSAFEPATH=1
RUN python -m pip wheel --no-cache-dir --no-deps -w /wheel .

FROM vllm/vllm-openai:v0.33.0
COPY --from=build /wheel /wheel
ENV PYTHONSAFEPATH=1 PIP_NO_CACHE_DIR=1
# Pinned by the wheel's extra "cuda"; vLLM and torch are those of the image.
RUN python3 -m pip install --no-cache-dir "$(ls /wheel/blasst-*.whl)[cuda]" \
    && rm -rf /wheel \
    && useradd --uid 10001 --create-home --shell /usr/sbin/nologin blasst \
    && install -d -o 10001 -g 10001 -m 0700 /state
ENV VLLM_BLASST_STATE_DIR=/state VLLM_NO_USAGE_STATS=1
USER 10001:10001
WORKDIR /home/blasst
EXPOSE 8000
# vLLM takes the model only as its first word: MODEL --attention-backend blasst follow.
ENTRYPOINT ["vllm", "serve"]
