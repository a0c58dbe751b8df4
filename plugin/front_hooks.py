"""Where the front end meets vLLM: InputProcessor for requests, OutputProcessor for their outputs.

LLM and AsyncLLM both use the two. A request's classes hang on vLLM's own record of it, so
they go when it goes, however it ends.
"""

from __future__ import annotations

import multiprocessing.util
import os
import time
from collections.abc import Mapping
from typing import Any

from blasst.plugin.admission import PREFIX, AdmissionError, Wish, salted
from blasst.plugin.capability import model_reasons
from blasst.plugin.front_end import FrontEnd, cell
from blasst.plugin.patching import Method, wrap_method
from blasst.plugin.registration import selected
from blasst.plugin.settings import Settings
from blasst.plugin.stamp import read_stamp, stamped

_ATTRIBUTE = "_blasst"
_NEEDS_OURS = "blasst_* arguments need an engine started with --attention-backend blasst"
_current: tuple[int, FrontEnd | None] | None = None
"""(process id, front end of the engine made last, None if it has another backend). A forked child
must not take its parent's for its own."""
_fronts: list[tuple[int, FrontEnd]] = []
"""All of them, so that an engine like an earlier one takes over its front end."""


def install() -> None:
    """Idempotent. Before the first InputProcessor is made: it binds its methods then."""
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.output_processor import OutputProcessor

    wrap_method(InputProcessor, "__init__", _make_front_end)
    wrap_method(InputProcessor, "process_inputs", _admit)
    wrap_method(OutputProcessor, "__init__", _join_front_end)
    wrap_method(OutputProcessor, "add_request", _remember)
    wrap_method(OutputProcessor, "process_outputs", _watch_first_tokens)


def current() -> FrontEnd | None:
    """The front end of the engine that this process made last, if it uses our backend."""
    return _current[1] if _current is not None and _current[0] == os.getpid() else None


def _front_end_for(vllm_config: Any) -> FrontEnd:
    settings = Settings.from_env()
    name = served_name(vllm_config.model_config)
    refusal = "; ".join(model_reasons(vllm_config, settings.impl)) or None
    wanted = (os.getpid(), settings, name, refusal)
    for pid, front in _fronts:
        if (pid, front.settings, front.model_name, front.refusal) == wanted:
            return front
    from vllm import __version__

    max_prompt = vllm_config.model_config.max_model_len
    front = FrontEnd(settings, name, __version__, refusal, max_prompt)
    _fronts.append((os.getpid(), front))
    # Runs at the end of the main process and of multiprocessing's children, where atexit does not.
    multiprocessing.util.Finalize(front, front.close, exitpriority=10)
    return front


def served_name(model_config: Any) -> str:
    """The model's name in metrics, as in vLLM's own."""
    names = model_config.served_model_name
    return str(names if isinstance(names, str) else names[0])


def _make_front_end(stock: Method) -> Method:
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        global _current
        stock(self, vllm_config, *args, **kwargs)
        front = _front_end_for(vllm_config) if selected(vllm_config) else None
        setattr(self, _ATTRIBUTE, front)
        _current = (os.getpid(), front)

    return __init__


def _join_front_end(stock: Method) -> Method:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        # LLMEngine and AsyncLLM make it right after the InputProcessor of the same engine.
        setattr(self, _ATTRIBUTE, current())

    return __init__


def _admit(stock: Method) -> Method:
    def process_inputs(
        self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        front: FrontEnd | None = getattr(self, _ATTRIBUTE, None)
        extra_args = getattr(params, "extra_args", None)
        if front is None:
            if extra_args and _refusable(extra_args):
                raise _refused(AdmissionError(_NEEDS_OURS))
            return stock(self, request_id, prompt, params, *args, **kwargs)
        try:
            wish = front.wish(extra_args)
        except AdmissionError as e:
            raise _refused(e) from None
        request = stock(self, request_id, prompt, params, *args, **kwargs)
        if request.sampling_params is not None:
            _stamp(front, wish, request)
        else:
            front.count_dense("pooling")
        return request

    return process_inputs


def _stamp(front: FrontEnd, wish: Wish, request: Any) -> None:
    try:
        if getattr(request, "resumable", False):
            wish = front.wish_of_streamed(wish)
        stamp = front.admit(wish, _prompt_tokens(request))
    except AdmissionError as e:
        raise _refused(e) from None
    # vLLM made these parameters for this request; the dict in them may still be shared.
    request.sampling_params.extra_args = stamped(request.sampling_params.extra_args, stamp)
    request.cache_salt = salted(request.cache_salt, stamp, front.settings.share_prefix_cache)


def _refusable(extra_args: Mapping[str, Any]) -> bool:
    return any(str(key).startswith(PREFIX) for key in extra_args)


def _refused(error: AdmissionError) -> AdmissionError:
    from blasst.plugin.client_error import RefusedRequestError

    return RefusedRequestError(str(error))


def _prompt_tokens(request: Any) -> int:
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    return int(request.prompt_embeds.shape[0])


def _remember(stock: Method) -> Method:
    def add_request(
        self: Any,
        request: Any,
        prompt: Any,
        parent_req: Any = None,
        request_index: int = 0,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        stock(self, request, prompt, parent_req, request_index, *args, **kwargs)
        front: FrontEnd | None = getattr(self, _ATTRIBUTE, None)
        if front is None or request_index or request.sampling_params is None:
            return  # of n completions of one prompt, the first is the one that is timed
        stamp = read_stamp(request.sampling_params.extra_args)
        state = self.request_states.get(request.request_id)
        if stamp is not None and state is not None:
            # vLLM's time of arrival is of the wall clock, which may jump before the first token.
            arrived = time.monotonic() - max(0.0, time.time() - request.arrival_time)
            setattr(state, _ATTRIBUTE, (cell(stamp, _prompt_tokens(request)), arrived))

    return add_request


def _watch_first_tokens(stock: Method) -> Method:
    def process_outputs(self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        front: FrontEnd | None = getattr(self, _ATTRIBUTE, None)
        first = []
        if front is not None:
            for output in engine_core_outputs:
                state = self.request_states.get(output.request_id)
                if state is not None and _ATTRIBUTE in state.__dict__ and output.new_token_ids:
                    at, arrived = state.__dict__.pop(_ATTRIBUTE)
                    front.first_token(at, time.monotonic() - arrived)
                    first.append((at, state))
        result = stock(self, engine_core_outputs, *args, **kwargs)
        for at, state in first:
            # vLLM keeps its own times only where it logs statistics; the call above set them.
            times = getattr(state, "stats", None)
            if front is not None and times is not None and times.scheduled_ts > 0:
                front.prefill(at, max(0.0, times.first_token_ts - times.scheduled_ts))
        return result

    return process_outputs
