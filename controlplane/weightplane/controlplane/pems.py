"""Whether PEM files are what they are taken for."""

from __future__ import annotations

import ssl
from pathlib import Path

__all__ = ["check_pair"]


def check_pair(certificate: Path, key: Path, ca: Path | None = None) -> None:
    """``ValueError`` for files that are no certificate and its key, or no authority: gRPC only fails handshakes."""
    for path in (certificate, key, *([ca] if ca is not None else [])):
        path.read_bytes()  # an OSError that names the file
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: b"")
    except (ssl.SSLError, OSError) as e:
        text = f"{certificate} and {key}: expected a PEM certificate and its unencrypted key, found otherwise"
        raise ValueError(f"{text} ({getattr(e, 'reason', None) or e})") from None
    if ca is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(ca)
        except (ssl.SSLError, OSError) as e:
            raise ValueError(f"{ca}: expected PEM certificates of authorities ({e})") from None
