"""The vLLM plugin: `--attention-backend blasst`. The only package that imports vLLM."""
