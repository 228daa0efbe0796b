"""Rollouts from a vLLM server by token ids, each output with its log-probabilities and the versions that made it.

It speaks ``/inference/v1/generate``, the one endpoint of vLLM that names weight versions per output; the server has it
with ``--enable-scale-out`` (or ``--tokens-only``). Cached tokens are told with ``--enable-prompt-tokens-details``.
Standard library only.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from weightplane.inference_agent.spans import Span

from ..gate import VersionTag
from .foreign import in_words, printable
from .spans import cache_salt, spans_of_labels, version_of_label

__all__ = ["RolloutError", "RolloutUnreachable", "Rollouts", "VllmOutput"]

_MOST_SHOWN = 500
#: What reading an answer of another shape than vLLM's raises.
_MISSHAPEN = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)


class RolloutError(RuntimeError):
    """vLLM refused a request, answered something else than expected, or cannot be reached."""


class RolloutUnreachable(RolloutError):
    """Nobody answers there: no connection came about."""


@dataclass(frozen=True)
class VllmOutput:
    """One completion. ``finish``: length | stop | abort (a pause ended it: the tokens are those made until then).

    ``cached_tokens``: of the prompt, found in the prefix cache; None where the server does not tell.
    """

    tokens: list[int]
    logprobs: list[float]
    spans: tuple[Span, ...]
    finish: str
    prompt_tokens: int = 0
    cached_tokens: int | None = None


@dataclass
class Rollouts:
    """A vLLM server, as a trainer's rollout worker asks it. Thread-safe.

    ``timeout``: seconds until the whole answer is there, of a stream until its next bytes. ``about``: what is known of
    versions (``spans_of_labels``); may grow while requests run.
    """

    url: str
    timeout: float = 120.0
    about: dict[int, VersionTag] = field(default_factory=dict)

    def held(self) -> int:
        """The version whose weights the server has now; 0 = those that it was started with."""
        label = self._call("GET", "/weight_info").get("weight_version")
        version = version_of_label(label)
        if version is None:
            raise RolloutError(f"{self.url}: its weights are labelled {label!r:.100}, which is no version of ours")
        return version

    def salt(self, started: int) -> str:
        """The ``cache_salt`` for the next request of a trajectory that started at version ``started``."""
        return cache_salt(started, self.held())

    def generate(self, prompt: Sequence[int], *, max_tokens: int, **options: Any) -> list[VllmOutput]:
        """Answer a prompt ``n`` times; returns when all are done. ``options``: see ``stream``, and ``n`` (1).

        End-of-sequence tokens count as others unless ``ignore_eos=False`` is among them.
        """
        answer = self._call("POST", "/inference/v1/generate", _body(prompt, max_tokens, options, stream=False))
        try:
            usage = answer["usage"]
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            choices = sorted(answer["choices"], key=lambda c: int(c["index"]))
            return [self._output(c, usage["prompt_tokens"], cached) for c in choices]
        except _MISSHAPEN as e:
            why = in_words(e)[:200]
            raise RolloutError(f"{self.url}: not an answer of /inference/v1/generate ({why}): {answer!s:.300}") from e

    def prompt_logprobs(self, tokens: Sequence[int], first: int) -> list[float]:
        """The log-probabilities of ``tokens[first:]`` as parts of a prompt, nats; ``first``: 1 or more."""
        sampling = {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        body = {"token_ids": list(tokens), "sampling_params": sampling, "stream": False}
        answer = self._call("POST", "/inference/v1/generate", body)
        try:
            told = list(zip(tokens, answer["prompt_logprobs"], strict=True))
            return [float(entry[str(token)]["logprob"]) for token, entry in told[first:]]
        except _MISSHAPEN as e:
            why = in_words(e)[:200]
            raise RolloutError(f"{self.url}/inference/v1/generate: no prompt_logprobs of each token ({why})") from e

    def stream(self, prompt: Sequence[int], *, max_tokens: int, **options: Any) -> Iterator[VllmOutput]:
        """Answer a prompt once; yields the output so far whenever tokens come, and at last the whole one.

        Spans come with the last (``finish`` is not empty then); until then every token is unknown. ``options``: those
        of vLLM's sampling parameters (``temperature``, ``seed``, …) and ``cache_salt``.
        """
        if options.get("n", 1) != 1:
            raise ValueError("stream: one completion at a time; use generate for n of them")
        tokens: list[int] = []
        logprobs: list[float] = []
        connection, response = self._open("POST", "/inference/v1/generate", _body(prompt, max_tokens, options, True))
        try:
            finish = ""
            for line in response:
                text = line.decode().removeprefix("data:").strip()
                if not text or text == "[DONE]":
                    continue
                event = json.loads(text)
                if "error" in event:
                    raise RolloutError(f"{self.url}: {printable(str(event['error'])[:_MOST_SHOWN])}")
                for choice in event.get("choices", ()):
                    part = self._output(choice, len(prompt), None)
                    tokens += part.tokens
                    logprobs += part.logprobs
                    finish = part.finish
                    spans = spans_of_labels(choice.get("weight_versions"), len(tokens), self.about) if tokens else ()
                    yield VllmOutput(list(tokens), list(logprobs), spans, finish, len(prompt))
            if not finish:
                raise RolloutError(f"{self.url}: the answer broke off after {len(tokens)} tokens")
        except (OSError, http.client.HTTPException, *_MISSHAPEN) as e:
            raise RolloutError(f"{self.url}: {in_words(e)[:200]} after {len(tokens)} tokens") from e
        finally:
            connection.close()

    def _output(self, choice: Mapping[str, Any], prompt_tokens: int, cached: int | None) -> VllmOutput:
        tokens: list[int] = list(choice["token_ids"] or ())
        if strange := [t for t in tokens if type(t) is not int or t < 0]:
            raise ValueError(f"token_ids: expected whole numbers, 0 or more, found {strange[0]!r:.100}")
        content = (choice.get("logprobs") or {}).get("content") or ()
        return VllmOutput(
            tokens,
            [float(c["logprob"]) for c in content],
            spans_of_labels(choice.get("weight_versions"), len(tokens), self.about) if tokens else (),
            str(choice.get("finish_reason") or ""),
            prompt_tokens,
            cached,
        )

    def _call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        connection = self._connect(method, path)
        with _within(connection, self.timeout) as late:
            try:
                answer = json.loads(self._answer(connection, method, path, body).read())
            except (OSError, ValueError, RecursionError, http.client.HTTPException, RolloutError) as e:
                # A read that takes as long by itself may be noticed a moment before.
                if late.is_set() or isinstance(e, TimeoutError) or isinstance(e.__cause__, TimeoutError):
                    why = f"no whole answer within {self.timeout:g} s"
                    raise RolloutError(f"{method} {self.url}{path}: {why}") from e
                if isinstance(e, RolloutError):
                    raise
                raise RolloutError(f"{self.url}{path}: {in_words(e)}"[:_MOST_SHOWN]) from e
            finally:
                connection.close()
        if not isinstance(answer, dict):
            raise RolloutError(f"{self.url}{path}: expected a JSON object")
        return answer

    def _open(self, method: str, path: str, body: Any) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """A connection and its answer, which is a good one."""
        connection = self._connect(method, path)
        try:
            return connection, self._answer(connection, method, path, body)
        except RolloutError:
            connection.close()
            raise

    def _connect(self, method: str, path: str) -> http.client.HTTPConnection:
        try:
            u = urlsplit(self.url if "//" in self.url else f"http://{self.url}")
            if u.scheme not in ("http", "https") or not u.hostname:
                raise ValueError("expected http://host:port")
            kind = http.client.HTTPSConnection if u.scheme == "https" else http.client.HTTPConnection
            connection = kind(u.hostname, u.port, timeout=self.timeout)
            connection.connect()
        except (OSError, ValueError, http.client.HTTPException) as e:
            raise RolloutUnreachable(f"{method} {self.url}{path}: {in_words(e)}") from e
        return connection

    def _answer(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any
    ) -> http.client.HTTPResponse:
        """The answer, which is a good one."""
        prefix = urlsplit(self.url if "//" in self.url else f"http://{self.url}").path.rstrip("/")
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, prefix + path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                text = response.read(_MOST_SHOWN).decode("utf-8", "replace")
                hint = ". Start vLLM with --enable-scale-out" if response.status == 403 else ""
                raise RolloutError(f"{method} {self.url}{path}: HTTP {response.status}: {printable(text)}{hint}")
        except (OSError, http.client.HTTPException) as e:
            raise RolloutError(f"{method} {self.url}{path}: {in_words(e)}") from e
        return response


@contextlib.contextmanager
def _within(connection: http.client.HTTPConnection, seconds: float) -> Iterator[threading.Event]:
    """Cut the connection after so many seconds, and set the event: its own timeout is of one read, and a server that
    sends a byte now and then never meets it."""
    late, sock = threading.Event(), connection.sock  # the answer takes the socket away from its connection

    def cut() -> None:
        late.set()
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()


def _body(prompt: Sequence[int], max_tokens: int, options: Mapping[str, Any], stream: bool) -> dict[str, Any]:
    sampling = {"max_tokens": max_tokens, "ignore_eos": True, "logprobs": 0, "detokenize": False, **options}
    salt = sampling.pop("cache_salt", None)
    body: dict[str, Any] = {"token_ids": list(prompt), "sampling_params": sampling, "stream": stream}
    return body if salt is None else {**body, "cache_salt": salt}
