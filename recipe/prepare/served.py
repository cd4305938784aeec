"""Answers from an OpenAI-compatible server (vLLM, SGLang, …), with retries."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import random
import threading
import urllib.error
import urllib.request
from typing import Any

from recipe.errors import ConfigError
from recipe.prepare.answer import Answer, AnswerError, Sampling

_RETRIED = {408, 409, 425, 429, 500, 502, 503, 504}


class ServerEngine:
    """One chat completion a call; thread-safe. Uses the `openai` package where it is installed, else the standard
    library's HTTP client: the wire format is the same. The key is read from OPENAI_API_KEY and never stored."""

    def __init__(
        self, base_url: str, model: str, retries: int = 6, backoff_s: float = 0.5, timeout_s: float = 600.0
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError("--base-url", base_url, "must begin with http:// or https://", "http://HOST:PORT/v1")
        self.base_url, self.model = base_url.rstrip("/"), model
        self.retries, self.backoff_s, self.timeout_s = retries, backoff_s, timeout_s
        self._asks_ids = True  # for the answers' token ids, until a server refuses the question
        self._stopped = threading.Event()
        self._key = os.environ.get("OPENAI_API_KEY", "none")
        self._client = self._openai() if importlib.util.find_spec("openai") else None

    def _openai(self) -> Any:
        import openai

        return openai.OpenAI(base_url=self.base_url, api_key=self._key, max_retries=0, timeout=self.timeout_s)

    def stop(self) -> None:
        """Let every call end at its next wait: the job is over."""
        self._stopped.set()

    def check(self) -> None:
        """Raises ConfigError when nothing listens there, or when the server lists its models and lacks ours."""
        try:
            listed = self._get("/models").get("data", [])
        except _Failed as failed:
            if failed.status is None:
                fix = "start the server, or mend the address"
                raise ConfigError("--base-url", self.base_url, f"does not answer ({failed})", fix) from failed
            return  # a server without a model list may still answer
        names = [entry.get("id") for entry in listed if isinstance(entry, dict)]
        if names and self.model not in names:
            raise ConfigError(
                "--model", self.model, f"is not served there; served: {', '.join(map(str, names))}", "pick one"
            )

    def answer(self, messages: list[dict[str, Any]], tools: list[Any] | None, sampling: Sampling, seed: int) -> Answer:
        """Raises AnswerError when the server refuses the request or still fails after all retries."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "seed": (sampling.seed + seed) % 2**31,
        }
        if tools:
            body["tools"] = tools
        beyond: dict[str, Any] = {}
        if arguments := sampling.template_arguments():
            beyond["chat_template_kwargs"] = arguments
        attempt = 0
        while True:
            asked = self._asks_ids
            try:
                return _read(self._complete(body, {**beyond, "return_token_ids": True} if asked else beyond))
            except _Failed as failed:
                if asked and failed.status in (400, 422) and "return_token_ids" in str(failed):
                    self._asks_ids = False  # a strict server: from now on without
                    continue
                self._wait(failed, attempt)
                attempt += 1

    def _wait(self, failed: _Failed, attempt: int) -> None:
        """Back off before the next attempt. Raises AnswerError when there is none."""
        if (failed.status is not None and failed.status not in _RETRIED) or attempt >= self.retries:
            raise AnswerError(str(failed)) from failed
        wait = failed.retry_after if failed.retry_after is not None else self.backoff_s * 2**attempt
        if self._stopped.wait(min(wait, 60.0) * (1 + 0.25 * random.random())):  # jitter: timing only, never data
            raise AnswerError(f"stopped after {failed}") from failed

    def _complete(self, body: dict[str, Any], beyond: dict[str, Any]) -> dict[str, Any]:
        if self._client is None:
            return self._send("/chat/completions", {**body, **beyond})
        import openai

        try:
            return self._client.chat.completions.create(**body, extra_body=beyond).model_dump()
        except openai.APIStatusError as error:
            raise _Failed(str(error), error.status_code, _seconds(error.response.headers.get("retry-after"))) from error
        except (openai.OpenAIError, ValueError) as error:  # no answer, or one that is not JSON
            raise _Failed(f"{type(error).__name__}: {error}") from error

    def _get(self, path: str) -> dict[str, Any]:
        return self._send(path, None)

    def _send(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base_url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s if body else 10.0) as response:
                value = json.loads(response.read())
        except urllib.error.HTTPError as error:
            text = error.read()[:300].decode("utf-8", "replace")
            raise _Failed(
                f"HTTP {error.code}: {text}", error.code, _seconds(error.headers.get("Retry-After"))
            ) from error
        except (
            OSError,
            http.client.HTTPException,
            ValueError,
        ) as error:  # refused, reset, timed out, cut in the middle
            raise _Failed(f"{type(error).__name__}: {error}") from error
        if not isinstance(value, dict):
            raise _Failed(f"the answer is {type(value).__name__}, not an object")
        return value


class _Failed(Exception):
    """One failed request; ``status`` None: no HTTP answer came."""

    def __init__(self, text: str, status: int | None = None, retry_after: float | None = None) -> None:
        self.status, self.retry_after = status, retry_after
        super().__init__(text)


def _seconds(text: str | None) -> float | None:
    try:
        seconds = float(text) if text else None
    except ValueError:
        return None
    return seconds if seconds is not None and 0 <= seconds < float("inf") else None


def _read(completion: dict[str, Any]) -> Answer:
    """The answer in a chat completion object."""
    try:
        choice = completion["choices"][0]
        said = choice["message"]
        message: dict[str, Any] = {"role": "assistant", "content": said.get("content") or ""}
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise _Failed(f"no choice in the answer: {str(completion)[:200]}", 502) from error
    thought = said.get("reasoning_content") or said.get("reasoning")
    if thought:
        message["reasoning_content"] = thought
    if said.get("tool_calls"):
        message["tool_calls"] = said["tool_calls"]
    ids = choice.get("token_ids") or choice.get("response_token_ids")  # vLLM, SGLang; some servers' older name
    if not (isinstance(ids, list) and all(type(i) is int for i in ids)):
        ids = None
    usage = completion.get("usage") or {}
    tokens = int(usage.get("completion_tokens") or (len(ids) if ids else 0))
    return Answer(message, choice.get("finish_reason") == "length", ids, tokens)
