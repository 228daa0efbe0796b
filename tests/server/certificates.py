"""A throw-away authority with a server's and clients' certificates, by the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

__all__ = ["HAS_OPENSSL", "authority", "certificate"]

HAS_OPENSSL = shutil.which("openssl") is not None


def _openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=60)


def authority(folder: Path) -> Path:
    """Make ``ca.pem`` (and its key) in ``folder``."""
    ca = folder / "ca.pem"
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", str(folder / "ca.key")]
    _openssl("req", "-x509", *key, "-out", str(ca), "-subj", "/CN=weightplane test authority", "-days", "2")
    return ca


def certificate(folder: Path, file: str, common_name: str) -> tuple[Path, Path]:
    """A certificate and key signed by the folder's authority, valid for 127.0.0.1 and localhost."""
    cert, key, request = folder / f"{file}.pem", folder / f"{file}.key", folder / f"{file}.csr"
    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", str(key)]
    subject = "/CN=" + common_name.replace("/", r"\/").replace("+", r"\+")
    _openssl("req", *new, "-out", str(request), "-subj", subject)
    names = folder / f"{file}.ext"
    names.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    _openssl(
        *("x509", "-req", "-in", str(request), "-CA", str(folder / "ca.pem"), "-CAkey", str(folder / "ca.key")),
        *("-CAcreateserial", "-out", str(cert), "-days", "2", "-extfile", str(names)),
    )
    return cert, key
