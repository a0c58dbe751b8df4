"""The plugin's logger: a child of vLLM's, so that its lines appear with vLLM's own."""

import logging

logger = logging.getLogger("vllm.blasst")
