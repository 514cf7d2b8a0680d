"""OpenAI's requests to prompt RPC requests, and the answers' objects. Pure.

What the API has and we have not is refused by name, unless it asks for what happens anyway (n = 1, penalties of 0).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

STOP_STRINGS_MAX = 16
COMPLETION_TOKENS_DEFAULT = 16  # what OpenAI's /v1/completions does without max_tokens
TEMPERATURE_DEFAULT = 1.0
U32_MAX, U64_MAX = 2**32 - 1, 2**64 - 1
ROLES = {"developer": "system", "function": "tool"}
FINISH = {"context": "length"}

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
_COMMON = frozenset({"model", "stream", "stream_options", "max_tokens", "stop", "user", *_SAMPLING})
_IGNORED = frozenset({"metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "verbosity"})
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None, "none"),
    "echo": (None, False),
    "suffix": (None, ""),
}


class BadRequest(Exception):
    """The request cannot be served. param: the field that is wrong, "" for the whole."""

    def __init__(self, message: str, param: str = "", *, status: int = 400, code: str = "") -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that can be served. rpc: fields of the prompt RPC's request."""

    rpc: dict[str, Any]
    stream: bool
    include_usage: bool


def error_body(message: str, *, kind: str, param: str = "", code: str = "") -> bytes:
    """OpenAI's error object."""
    error = {"message": message, "type": kind, "param": param or None, "code": code or None}
    return msgspec.json.encode({"error": error})


def error_kind(status: int) -> str:
    """The `type` of an error with this HTTP status."""
    kinds = {401: "authentication_error", 404: "invalid_request_error", 429: "rate_limit_error"}
    return kinds.get(status, "invalid_request_error" if status < 500 else "server_error")


# --- requests -----------------------------------------------------------------------------------------------------
def parse_chat(body: bytes, model: str) -> Asked:
    """POST /v1/chat/completions. Raises BadRequest."""
    fields = _fields(body, model, frozenset({"messages", "max_completion_tokens"}))
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list with at least one message", "messages")
    rpc = _generation(fields)
    if (cap := _whole(fields, "max_completion_tokens", 1, U32_MAX)) is not None:
        rpc["max_tokens"] = cap
    rpc["messages"] = [_turn(message, f"messages[{at}]") for at, message in enumerate(messages)]
    return Asked(rpc, *_streaming(fields))


def parse_completion(body: bytes, model: str) -> Asked:
    """POST /v1/completions: the text as it is, without the chat template. Raises BadRequest."""
    fields = _fields(body, model, frozenset({"prompt"}))
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise BadRequest("prompt must be one text; several prompts or token ids are not supported", "prompt")
    rpc = {"max_tokens": COMPLETION_TOKENS_DEFAULT, **_generation(fields), "prompt_text": prompt, "raw": True}
    return Asked(rpc, *_streaming(fields))


def _fields(body: bytes, model: str, own: frozenset[str]) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BadRequest("the body must be a JSON object")
    for name, value in fields.items():
        if name in _NEUTRAL:
            if not any(
                value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in _NEUTRAL[name]
            ):
                raise BadRequest(f"{name} is not supported by this server", name, code="unsupported_parameter")
        elif name not in _COMMON | _IGNORED | own:
            raise BadRequest(f"unrecognized request argument: {name[:60]}", name[:60], code="unknown_parameter")
    asked = fields.get("model", model)
    if not isinstance(asked, str):
        raise BadRequest("model must be a text", "model")
    if asked != model:
        message = f"the model '{asked[:100]}' is not served here; '{model}' is"
        raise BadRequest(message, "model", status=404, code="model_not_found")
    return fields


def _generation(fields: dict[str, Any]) -> dict[str, Any]:
    sampling: dict[str, Any] = {"temperature": _number(fields, "temperature", 0, 100)}
    if sampling["temperature"] is None:
        sampling["temperature"] = TEMPERATURE_DEFAULT
    optional = {
        "top_p": _number(fields, "top_p", 0, 1),
        "min_p": _number(fields, "min_p", 0, 1),
        "repetition_penalty": _number(fields, "repetition_penalty", 0.01, 100),
        "top_k": _whole(fields, "top_k", 0, U32_MAX),
        "seed": _whole(fields, "seed", -(2**63), U64_MAX),
    }
    sampling |= {name: value for name, value in optional.items() if value is not None}
    if sampling.get("top_p") == 0:
        raise BadRequest("top_p must be above 0 and at most 1", "top_p")
    if sampling.get("seed", 0) < 0:
        sampling["seed"] += 2**64
    rpc: dict[str, Any] = {"sampling": sampling}
    if (cap := _whole(fields, "max_tokens", 1, U32_MAX)) is not None:
        rpc["max_tokens"] = cap
    stop = fields.get("stop")
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise BadRequest("stop must be a text or a list of texts, none empty", "stop")
    if len(stops) > STOP_STRINGS_MAX:
        raise BadRequest(f"stop may have at most {STOP_STRINGS_MAX} texts", "stop")
    return {**rpc, "stop": stops} if stops else rpc


def _streaming(fields: dict[str, Any]) -> tuple[bool, bool]:
    stream, options = fields.get("stream") or False, fields.get("stream_options") or {}
    if not isinstance(stream, bool):
        raise BadRequest("stream must be true or false", "stream")
    if not isinstance(options, dict) or (options and not stream):
        raise BadRequest("stream_options goes with stream = true and is an object", "stream_options")
    return stream, bool(options.get("include_usage"))


def _number(fields: dict[str, Any], name: str, low: float, high: float) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or not low <= value <= high
    ):
        raise BadRequest(f"{name} must be a number from {low} to {high}", name)
    return float(value)


def _whole(fields: dict[str, Any], name: str, low: int, high: int) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadRequest(f"{name} must be a whole number from {low} to {high}", name)
    return value


def _turn(message: Any, param: str) -> dict[str, str]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRequest(f"{param} must be an object with role and content", param)
    role = ROLES.get(str(message["role"]), str(message["role"]))
    if role not in ("system", "user", "assistant", "tool"):
        raise BadRequest(f"{param}.role is '{role[:40]}', it must be system, user, assistant or tool", param)
    if message.get("tool_calls") or message.get("function_call"):
        raise BadRequest("tool calls are not supported by this server", param, code="unsupported_parameter")
    return {"role": role, "content": _content(message.get("content"), param)}


def _content(content: Any, param: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    parts = content if isinstance(content, list) else [None]
    texts = []
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BadRequest(f"{param}.content must be a text or a list of text parts", param)
        texts.append(part["text"])
    return "".join(texts)


# --- answers ------------------------------------------------------------------------------------------------------
class Answer:
    """The objects of one answer. chat: of /v1/chat/completions, else of /v1/completions."""

    def __init__(self, *, chat: bool, answer_id: str, created: int, model: str) -> None:
        self._chat = chat
        kind = "chat.completion" if chat else "text_completion"
        self._head = {"id": f"{'chatcmpl' if chat else 'cmpl'}-{answer_id}", "created": created, "model": model}
        self._whole, self._chunk = kind, f"{kind}.chunk" if chat else kind

    def whole(self, text: str, finish: str, usage: dict[str, int]) -> dict[str, Any]:
        """The answer of a request without stream."""
        content = {"message": {"role": "assistant", "content": text, "refusal": None}} if self._chat else {"text": text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": FINISH.get(finish, finish)}
        return {**self._head, "object": self._whole, "choices": [choice], "usage": usage}

    def first(self) -> dict[str, Any] | None:
        """The chunk before any text: only chats have one."""
        return self._choice({"delta": {"role": "assistant", "content": ""}}) if self._chat else None

    def delta(self, text: str) -> dict[str, Any]:
        """New text."""
        return self._choice({"delta": {"content": text}} if self._chat else {"text": text})

    def last(self, finish: str) -> dict[str, Any]:
        """The chunk that says why it ended."""
        return self._choice({"delta": {}} if self._chat else {"text": ""}, FINISH.get(finish, finish))

    def usage(self, usage: dict[str, int]) -> dict[str, Any]:
        """The chunk of stream_options.include_usage."""
        return {**self._head, "object": self._chunk, "choices": [], "usage": usage}

    def _choice(self, content: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish}
        return {**self._head, "object": self._chunk, "choices": [choice]}


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """OpenAI's usage object."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}
