"""Why gRPC or TLS with an address fails, in words that say what to do: gRPC's own are a line of its core.

One handshake is made with Python's ``ssl`` and the same certificates, after a call failed. It decides nothing.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from .addresses import host_of

if TYPE_CHECKING:
    from .dial import Dial

__all__ = ["NO_GRPC", "trouble"]

#: What is said of a port, ours or anybody's, where something else answers.
NO_GRPC = (
    "what answers there is not gRPC: the port of --gateway or --probes, perhaps; name the one that the control plane "
    "listens on (--listen)"
)

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"  # and an empty SETTINGS frame
_RENEW = "renew it: run weightplane certs again, with the folder of the authority"

_EXPIRED, _NOT_YET, _PURPOSE, _HOSTNAME, _IP = 10, 9, 26, 62, 64  # OpenSSL's X509_V_ERR_*


def trouble(dial: Dial, timeout: float = 2.0) -> str:
    """What is wrong between us and ``dial.address``: TLS, or no gRPC; empty if nothing is, or nobody listens there."""
    if dial.address.startswith("unix:"):
        return ""
    try:
        dial = dial.read_again() if dial.files else dial
    except (OSError, ValueError) as e:
        return str(e)
    try:
        with _connect(dial.address, timeout) as plain:
            found = _with_tls(dial, plain) if dial.tls else _without(plain)
        if found or dial.tls:
            return found
        with _connect(dial.address, timeout) as plain:
            plain.sendall(_PREFACE)
            return _other(plain.recv(1))
    except (OSError, ValueError):
        return ""  # nobody there, or it is too busy: not about TLS


def _connect(address: str, timeout: float) -> socket.socket:
    host, port = host_of(address), int(address.rpartition(":")[2])
    made = socket.create_connection((host, port), timeout)
    made.settimeout(timeout)
    return made


def _without(plain: socket.socket) -> str:
    """We speak plaintext: does the server speak TLS?"""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with context.wrap_socket(plain):
            pass
    except ssl.SSLError as e:
        if not any(word in str(e.reason) for word in ("ALERT", "CERTIFICATE")):
            return ""
    return "it speaks TLS and we do not: set WEIGHTPLANE_CA (and WEIGHTPLANE_CERT, _KEY), or give Dial(tls=True, …)"


def _with_tls(dial: Dial, plain: socket.socket) -> str:
    try:
        context = ssl.create_default_context(cadata=dial.ca_pem.decode() if dial.ca_pem else None)
    except (ssl.SSLError, ValueError) as e:
        return f"WEIGHTPLANE_CA: expected PEM certificates of authorities, found otherwise ({e})"
    context.set_alpn_protocols(["h2"])
    if dial.cert_pem:
        with _files(dial.cert_pem, dial.key_pem) as (cert, key):
            try:
                context.load_cert_chain(cert, key, password=lambda: b"")
            except ssl.SSLError as e:
                text = "WEIGHTPLANE_CERT, WEIGHTPLANE_KEY: expected a PEM certificate and its unencrypted key, found"
                return f"{text} otherwise ({e.reason})"
    host = dial.server_name or host_of(dial.address)
    try:
        with context.wrap_socket(plain, server_hostname=host) as made:
            made.sendall(_PREFACE)  # a server of TLS 1.3 looks at our certificate only after our side's handshake
            heard = made.recv(1)
            return _other(heard) if heard else _of_ours(dial)
    except ssl.SSLCertVerificationError as e:
        return _of_the_server(e, host)
    except ssl.SSLError as e:
        reason = str(e.reason or "")
        if "ALERT" in reason:
            return _of_ours(dial)
        if reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_EOF_WHILE_READING"):
            return _plaintext()
        return f"the TLS handshake failed: {reason or e}"
    except (ConnectionResetError, BrokenPipeError):
        return _of_ours(dial)


def _other(heard: bytes) -> str:
    """By the first byte of an answer to a preface: the length of a frame of HTTP/2, of which there are none so long."""
    return NO_GRPC if heard not in (b"", b"\0") else ""


def _plaintext() -> str:
    return (
        "it does not speak TLS and we do: start it with --tls-cert and --tls-key, or, on loopback, unset WEIGHTPLANE_CA"
    )


def _of_the_server(e: ssl.SSLCertVerificationError, host: str) -> str:
    if e.verify_code == _EXPIRED:
        return f"the server's certificate has expired: {_RENEW}; the server takes it without a restart"
    if e.verify_code == _NOT_YET:
        return "the server's certificate is not valid yet: one of the two clocks is wrong"
    if e.verify_code in (_HOSTNAME, _IP):
        return (
            f"the server's certificate is not for {host}: make it with weightplane certs --host {host}, or dial a name "
            "that it is for"
        )
    if e.verify_code == _PURPOSE:
        return "the server's certificate is none for a server: it is to be made with weightplane certs, without --role"
    return (
        f"the server's certificate is not from the authority that we were given ({e.verify_message}): set "
        "WEIGHTPLANE_CA to the ca.pem that lies beside the server's certificate"
    )


def _of_ours(dial: Dial) -> str:
    """The server ended the connection when it saw our certificate, or none; gRPC's server does not say why."""
    if not dial.cert_pem:
        return "the server demands a client certificate: set WEIGHTPLANE_CERT and WEIGHTPLANE_KEY"
    code, said = _verify(dial)
    if code == _EXPIRED:
        return f"our client certificate has expired: {_RENEW}"
    if code == _NOT_YET:
        return "our client certificate is not valid yet: one of the two clocks is wrong"
    if code == _PURPOSE:
        return "our certificate is none for a client: make one with weightplane certs --role"
    why = f", and not from ours ({said})" if code else ""
    return (
        f"the server does not accept our client certificate{why}: use one from the authority that its --tls-client-ca "
        "names"
    )


def _verify(dial: Dial) -> tuple[int, str]:
    """What a server that has our own authority would say of our certificate: OpenSSL's code and words; 0 if it is good.

    A handshake in memory, where our certificate stands in for the server's too.
    """
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode, server.verify_mode = False, ssl.CERT_NONE, ssl.CERT_REQUIRED
    if dial.ca_pem:
        server.load_verify_locations(cadata=dial.ca_pem.decode())
    with _files(dial.cert_pem, dial.key_pem) as (cert, key):
        for context in (server, client):
            context.load_cert_chain(cert, key)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True)
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLCertVerificationError as e:
                return e.verify_code, e.verify_message
    return 0, ""


@contextlib.contextmanager
def _files(cert: bytes, key: bytes) -> Iterator[tuple[Path, Path]]:
    """``ssl`` reads certificates from files only; the key's is ours alone and gone at once."""
    with tempfile.TemporaryDirectory(prefix="weightplane-") as name:
        paths = Path(name, "cert"), Path(name, "key")
        for path, data in zip(paths, (cert, key), strict=True):
            path.touch(0o600)
            path.write_bytes(data)
        yield paths
