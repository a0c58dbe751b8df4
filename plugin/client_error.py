"""The refusal of a request in the type that vLLM's server turns into HTTP 400."""

from vllm.exceptions import VLLMValidationError

from blasst.plugin.admission import AdmissionError


class RefusedRequestError(VLLMValidationError, AdmissionError):
    """A client error for the server, a ValueError for offline callers. The server answers a plain
    ValueError with 500 since it tells client errors by class (vLLM 0.26 did not)."""
