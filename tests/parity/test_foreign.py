"""Messages about somebody else's server name it, say what is wrong, and hold nothing that a terminal acts on."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.inference_agent.server import server
from weightplane.inference_agent.engines.vllm.drivers import DriverError
from weightplane.inference_agent.engines.vllm.foreign import printable
from weightplane.inference_agent.engines.vllm.http import HttpDriver
from weightplane.inference_agent.engines.vllm.reading import EngineUnreadable, read_server
from weightplane.inference_agent.engines.vllm.rollouts import RolloutError, Rollouts


@contextmanager
def answers(data: bytes) -> Iterator[str]:
    """A server that says the same to everybody."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(data)

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


def told(address: str) -> list[str]:
    """By each of those who ask a vLLM server."""
    url = f"http://{address}"
    driver = HttpDriver([url])
    with pytest.raises(DriverError) as by_driver:
        driver.is_paused(5)
    driver.close()
    with pytest.raises(EngineUnreadable) as by_reader:
        read_server(url, timeout=5)
    with pytest.raises(RolloutError) as by_rollouts:
        Rollouts(url, timeout=5).generate([1], max_tokens=1)
    return [str(e.value) for e in (by_driver, by_reader, by_rollouts)]


def test_a_control_planes_port_given_as_vllms_is_told_as_one() -> None:
    with server() as plane:
        for text in told(plane.address):
            assert plane.address in text and "is no vLLM: it speaks HTTP/2, as gRPC does" in text, text
            assert text.isprintable(), repr(text)


@pytest.mark.parametrize(
    "data", [b"\x1b[2J\x07SSH-2.0\r\n", b"HTTP/1.1 503 Down\r\n\r\n\x1b[31mred\x07", b"\x00\xff\n"]
)
def test_no_byte_of_another_server_reaches_a_terminal_as_a_command(data: bytes) -> None:
    with answers(data) as address:
        for text in told(address):
            assert address in text and text.isprintable(), repr(text)


def test_text_stays_as_it_is() -> None:
    assert printable("größer als 3 ≥ 2\nnext line") == "größer als 3 ≥ 2\nnext line"
    assert printable("a\tb\x1b[0m\x9b\u202e") == r"a\tb\x1b[0m\x9b\u202e"
