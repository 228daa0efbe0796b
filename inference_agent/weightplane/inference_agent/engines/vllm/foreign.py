"""What somebody else's server said, fit for a message or a log of ours: it may be any bytes."""

from __future__ import annotations

import http.client

__all__ = ["in_words", "printable"]

_SETTINGS = "\x04\x00\x00\x00\x00\x00"  # what an HTTP/2 server says first: a frame of this type, of stream 0


def printable(text: str) -> str:
    """The text on its lines, with every character that a terminal might act on written as an escape."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def in_words(error: Exception) -> str:
    """The kind of an error and its text. A server that does not speak HTTP/1 is told as one."""
    strange = isinstance(error, http.client.BadStatusLine) and not isinstance(error, http.client.RemoteDisconnected)
    if not strange:
        return f"{type(error).__name__}: {printable(str(error))}"
    if _SETTINGS in str(error):
        return "what answers there is no vLLM: it speaks HTTP/2, as gRPC does. Is that a control plane's port?"
    return f"what answers there is no vLLM: it does not speak HTTP, and said {printable(str(error)[:80])!r}"
