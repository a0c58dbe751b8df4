"""The vLLM plugin: `--attention-backend blasst`. The only package that imports vLLM."""


def register() -> None:
    """Entry point of vLLM's general plugins: runs in every vLLM process, maybe more than once."""
    from blasst.plugin.registration import register as run

    run()
