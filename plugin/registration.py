"""Makes `--attention-backend blasst` known to vLLM, and nothing more: no engine has started yet."""

from __future__ import annotations

import sys
from typing import Any

from blasst.plugin.log import logger
from blasst.plugin.patching import Method, wrap_method
from blasst.plugin.versions import unsupported_reason

NAME = "BLASST"
PATH = "blasst.plugin.backend.BlasstBackend"


def register() -> None:
    """Never raises for a vLLM that we do not support: other backends must keep working."""
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum
    except ImportError as e:
        logger.warning("blasst: this vLLM has no attention backend registry (%s); not active", e)
        return
    if not _add_alias(AttentionBackendEnum):
        return
    from vllm import __version__

    if unsupported_reason(__version__) is None:
        _honour_selection_on_cpu()
    if "vllm.engine.arg_utils" in sys.modules:
        # Only front ends make engine configurations; they have loaded this module by now.
        from vllm.engine.arg_utils import EngineArgs

        wrap_method(EngineArgs, "create_engine_config", _check_engine_config)


def selected(vllm_config: Any) -> bool:
    """Whether an engine of this configuration was asked to use our backend."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    ours = AttentionBackendEnum.__members__.get(NAME)
    return ours is not None and vllm_config.attention_config.backend is ours


def _add_alias(enum: Any) -> bool:
    """BLASST as an alias of CUSTOM, the member that vLLM keeps for third parties.

    A member of our own would pickle by value, and a spawned child unpickles its configuration
    before it loads plugins: "'...' is not a valid AttentionBackendEnum". CUSTOM survives that.
    """
    from vllm.v1.attention.backends.registry import register_backend

    custom = enum.CUSTOM
    if custom.is_overridden() and custom.get_path() != PATH:
        logger.error(
            "blasst: another plugin owns the CUSTOM attention backend (%s), so blasst cannot be "
            "selected; leave one of the two out of VLLM_PLUGINS",
            custom.get_path(),
        )
        return False
    register_backend(custom, PATH)
    if NAME not in enum.__members__:
        if hasattr(custom, "_add_alias_"):  # Python >= 3.13
            custom._add_alias_(NAME)
        else:
            enum._member_map_[NAME] = custom
    return True


def _honour_selection_on_cpu() -> None:
    """CpuPlatform answers CPU_ATTN whatever was selected. MLA and sparse models stay with it."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return

    def make(stock: Method) -> Method:
        def get_attn_backend_cls(
            cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: Any = None
        ) -> Any:
            from vllm.v1.attention.backends.registry import AttentionBackendEnum

            if selected_backend is not AttentionBackendEnum.__members__.get(NAME):
                return stock(cls, selected_backend, attn_selector_config, num_heads)
            import blasst.plugin.backend  # noqa: F401  hooks the model runner, for the table

            if attn_selector_config.use_mla or attn_selector_config.use_sparse:
                return stock(cls, selected_backend, attn_selector_config, num_heads)
            return selected_backend.get_path()

        return get_attn_backend_cls

    wrap_method(type(current_platform), "get_attn_backend_cls", make)


def _check_engine_config(stock: Method) -> Method:
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        from blasst.plugin import startup

        with startup.known_to_vllm():
            config = stock(self, *args, **kwargs)
        if selected(config):
            with startup.one_line():
                startup.prepare(config)
        else:
            startup.prepare_other(config)
        return config

    return create_engine_config
