"""The refusal of a request in the type that vLLM's server turns into HTTP 400."""

from vllm.exceptions import VLLMValidationError

from blasst.plugin.admission import AdmissionError


class RefusedRequestError(AdmissionError, VLLMValidationError):
    """A ValueError for offline callers, a client error for the server (a ValueError is not one
    since vLLM 0.29: it would answer 500)."""
