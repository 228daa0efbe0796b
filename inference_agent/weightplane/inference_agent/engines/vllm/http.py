"""A vLLM server over HTTP: its RL endpoints, which it has when it is started with ``VLLM_SERVER_DEV_MODE=1``."""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from weightplane.controlplane.core.states import PauseMode

from .drivers import Driver, DriverError, DriverTimeout, Label
from .foreign import in_words, printable
from .reading import EngineUnreadable, read_server
from .settings import EngineSettings

__all__ = ["HttpDriver"]

_MOST_BODY = 1 << 20
_MOST_SHOWN = 500
_REQUESTS = re.compile(r"^vllm:num_requests_running(?:\{[^}\n]*\})? ([0-9.e+]+)$", re.MULTILINE)


class HttpDriver(Driver):
    """One URL per instance: a server whose load balancer is external needs each of its instances named."""

    def __init__(self, urls: Sequence[str]) -> None:
        if not urls:
            raise ValueError("url: expected where vLLM's server listens, e.g. http://127.0.0.1:8000")
        self._urls = [urlsplit(u if "//" in u else f"http://{u}") for u in urls]
        for u in self._urls:
            if u.scheme not in ("http", "https") or not u.hostname:
                raise ValueError(f"url {u.geturl()!r}: expected http://host:port")
        self._pool = ThreadPoolExecutor(max_workers=4 * len(urls), thread_name_prefix="weightplane-vllm-http")
        self.name = "HTTP"

    @property
    def addresses(self) -> tuple[str, ...]:
        """host:port of each instance."""
        return tuple(u.netloc for u in self._urls)

    @property
    def instances(self) -> int:
        """See ``Driver``."""
        return len(self._urls)

    @property
    def pause_modes(self) -> tuple[PauseMode, ...]:
        """All three."""
        return (PauseMode.KEEP, PauseMode.WAIT, PauseMode.ABORT)

    def alive(self, timeout: float) -> bool:
        """See ``Driver``."""
        try:
            self._all("GET", "/health", timeout)
        except DriverError as e:
            self.trouble = str(e)
            return False
        return True

    def initialise(self, infos: Sequence[Mapping[str, Any]], timeout: float) -> None:
        """See ``Driver``. Names what to do where the endpoint is not there."""
        try:
            self._each(
                lambda i: self._call(i, "POST", "/init_weight_transfer_engine", timeout, {"init_info": dict(infos[i])})
            )
        except DriverError as e:
            if "404" in str(e) or "not configured" in str(e):
                raise DriverError(
                    f"{e}. Start vLLM with VLLM_SERVER_DEV_MODE=1 and "
                    f'--weight-transfer-config \'{{"backend": "weightplane"}}\''
                ) from e
            raise

    def pause(self, mode: PauseMode, clear_cache: bool, timeout: float) -> None:
        """See ``Driver``."""
        self._all("POST", f"/pause?mode={mode.value.lower()}&clear_cache={str(clear_cache).lower()}", timeout)

    def resume(self, timeout: float) -> None:
        """See ``Driver``."""
        self._all("POST", "/resume", timeout)

    def is_paused(self, timeout: float) -> bool:
        """See ``Driver``."""
        return all(a.get("is_paused") is True for a in self._all("GET", "/is_paused", timeout))

    def in_flight(self, timeout: float) -> int:
        """See ``Driver``. Those that run, from its metrics, which ``--disable-log-stats`` takes away."""
        told = self._each(lambda i: self._ask(i, "GET", "/metrics", timeout))
        return sum(int(float(n)) for text in told for n in _REQUESTS.findall(text))

    def is_sleeping(self, timeout: float) -> bool:
        """See ``Driver``."""
        return any(a.get("is_sleeping") is True for a in self._all("GET", "/is_sleeping", timeout))

    def sleep(self, level: int, timeout: float) -> None:
        """See ``Driver``."""
        self._all("POST", f"/sleep?level={level}&mode=keep", timeout)

    def wake(self, tags: Sequence[str], last: bool, timeout: float) -> None:
        """See ``Driver``."""
        self._all("POST", f"/wake_up?{'&'.join(f'tags={t}' for t in tags)}", timeout)
        if last:
            self._all("POST", "/resume", timeout)  # releases before 0.32 leave that to the caller

    def update(self, info: Mapping[str, Any], label: Label, timeout: float) -> None:
        """See ``Driver``. An update that somebody left open is closed first: ours has no effect before its middle."""
        end = time.monotonic() + timeout
        body = {"update_info": dict(info)}

        def one(i: int) -> Any:
            try:
                self._call(i, "POST", "/start_weight_update", _left(end))
            except DriverTimeout:
                raise
            except DriverError:
                self._call(i, "POST", "/finish_weight_update", _left(end), {"weight_version": None})
                self._call(i, "POST", "/start_weight_update", _left(end))
            self._call(i, "POST", "/update_weights", _left(end), body)
            return self._call(i, "POST", "/finish_weight_update", _left(end), {"weight_version": label()})

        self._each(one)

    def clear_cache(self, timeout: float) -> None:
        """See ``Driver``."""
        for answer in self._all("POST", "/reset_prefix_cache?reset_running_requests=true", timeout):
            if answer.get("success") is False:
                raise DriverError("vLLM did not clear its prefix cache: blocks are still held")

    def settings(self, timeout: float) -> Sequence[EngineSettings]:
        """See ``Driver``."""

        def one(i: int) -> EngineSettings:
            try:
                return read_server(self._urls[i].geturl(), timeout=timeout)
            except EngineUnreadable as e:
                raise DriverError(str(e)) from e

        return self._each(one)

    def close(self) -> None:
        """See ``Driver``."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    # --- calls

    def _all(self, method: str, path: str, timeout: float, body: Any = None) -> list[dict[str, Any]]:
        return self._each(lambda i: self._call(i, method, path, timeout, body))

    def _each(self, one: Callable[[int], Any]) -> list[Any]:
        """On every instance at once; the first failure is raised once all are done."""
        if self.instances == 1:
            return [one(0)]
        futures = [self._pool.submit(one, i) for i in range(self.instances)]
        errors = [e for f in futures if (e := f.exception()) is not None]
        if errors:
            raise errors[0]
        return [f.result() for f in futures]

    def _call(self, i: int, method: str, path: str, timeout: float, body: Any = None) -> dict[str, Any]:
        """One request to one instance; its JSON answer (an empty one if it has none)."""
        text = self._ask(i, method, path, timeout, body)
        try:
            answer = json.loads(text) if text else {}
        except ValueError:
            answer = {}
        return answer if isinstance(answer, dict) else {}

    def _ask(self, i: int, method: str, path: str, timeout: float, body: Any = None) -> str:
        """One request to one instance; what it answered."""
        u = self._urls[i]
        where = f"{method} {u.scheme}://{u.netloc}{path.partition('?')[0]}"
        kind = http.client.HTTPSConnection if u.scheme == "https" else http.client.HTTPConnection
        connection = kind(u.hostname or "", u.port, timeout=max(0.05, timeout))
        try:
            data = None if body is None else json.dumps(body).encode()
            headers = {"Content-Type": "application/json"} if data is not None else {}
            connection.request(method, u.path.rstrip("/") + path, data, headers)
            response = connection.getresponse()
            text = response.read(_MOST_BODY).decode("utf-8", "replace")
        except TimeoutError as e:
            raise DriverTimeout(f"{where}: no answer within {timeout:.1f} s") from e
        except (OSError, http.client.HTTPException) as e:
            raise DriverError(f"{where}: {in_words(e)}") from e
        finally:
            connection.close()
        if response.status != 200:
            raise DriverError(f"{where}: HTTP {response.status}: {printable(text[:_MOST_SHOWN])}")
        return text


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise DriverTimeout("the time for this update of vLLM is over")
    return left
