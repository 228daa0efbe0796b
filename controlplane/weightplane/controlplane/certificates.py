"""A development authority, and certificates with roles from it, by the ``openssl`` command.

What is made is what the server reads: a common name ``ROLE[+ROLE...]/NAME``, groups as ``URI:weightplane:group:GROUP``.
Making a certificate again renews it: files are replaced whole, key first, and a running server takes them by itself.
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from .names import NAME_RULE, is_name

__all__ = ["Authority", "CertificateError", "Made"]

_ROLES = ("trainer", "inference", "operator", "viewer")
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
_HOST = re.compile(r"[A-Za-z0-9*]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
_AUTHORITY_DAYS = 3650
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


class CertificateError(Exception):
    """Nothing was made; the text says why and what to do."""


@dataclass(frozen=True)
class Made:
    """A certificate and its key."""

    certificate: Path
    key: Path
    subject: str


class Authority:
    """One folder: ``ca.pem``, ``ca.key`` and what was made by them."""

    def __init__(self, folder: Path, days: int = 90) -> None:
        if not 1 <= days <= 825:
            raise CertificateError(f"days: expected 1 to 825, found {days}")
        self.folder, self.days = folder, days
        self.ca = folder / "ca.pem"

    def ensure(self) -> bool:
        """Make the authority unless it is there; whether it was made."""
        if shutil.which("openssl") is None:
            raise CertificateError("the command openssl is not here: install it (apt install openssl), or use your own")
        key = self.folder / "ca.key"
        if self.ca.exists() != key.exists():
            there, gone = (self.ca, key) if self.ca.exists() else (key, self.ca)
            raise CertificateError(f"{there} is there and {gone} is not: bring it back, or name another folder")
        if self.ca.exists():
            return False
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as e:
            raise CertificateError(f"{self.folder}: {e.strerror}") from e
        name = f"weightplane development authority {secrets.token_hex(4)}"
        extensions = ("basicConstraints=critical,CA:TRUE,pathlen:0", "keyUsage=critical,keyCertSign,cRLSign")
        with self._desk() as desk:
            config = _config(desk, name, extensions)
            out = ("-keyout", str(desk / "ca.key"), "-out", str(desk / "ca.pem"))
            _run("req", "-x509", *_NEW_KEY, *out, "-days", str(_AUTHORITY_DAYS), "-config", str(config))
            self._place(desk, "ca.key", "ca.pem")
        return True

    def server(self, hosts: Sequence[str]) -> Made:
        """The control plane's own, valid for these hosts and this one."""
        return self._make("server", "weightplane", _hosts(hosts), ("serverAuth",))

    def member(self, roles: Sequence[str], name: str, groups: Sequence[str] = (), hosts: Sequence[str] = ()) -> Made:
        """A caller's. One of a replica is valid as a server's too: its data port shows it."""
        for role in roles:
            if role not in _ROLES:
                raise CertificateError(f"role: expected one of {', '.join(_ROLES)}, found {role!r}")
        if not roles or not _PLAIN.fullmatch(name):
            raise CertificateError(f"name: expected 1 to 32 letters, digits, '.', '_', '-', found {name!r}")
        for group in groups:
            if not is_name(group):
                raise CertificateError(f"group: expected {NAME_RULE}, found {group!r}")
        uris = [f"URI:weightplane:group:{quote(g, safe='')}" for g in groups]
        serves = "inference" in roles
        names = [*uris, *(_hosts(hosts) if serves else [])]
        usage = ("clientAuth", "serverAuth") if serves else ("clientAuth",)
        file = "-".join(roles) + ("" if name == "dev" else f"-{name}")
        return self._make(file, f"{'+'.join(roles)}/{name}", names, usage)

    def _make(self, file: str, subject: str, names: Sequence[str], usage: Sequence[str]) -> Made:
        extensions = [
            "basicConstraints=critical,CA:FALSE",
            "keyUsage=critical,digitalSignature",
            f"extendedKeyUsage={','.join(usage)}",
            *([f"subjectAltName={','.join(names)}"] if names else []),
        ]
        with self._desk() as desk:
            config = _config(desk, subject, extensions)
            key, request, made = (desk / f"{file}.{end}" for end in ("key", "csr", "pem"))
            _run("req", "-new", *_NEW_KEY, "-keyout", str(key), "-out", str(request), "-config", str(config))
            signer = ("-CA", str(self.ca), "-CAkey", str(self.folder / "ca.key"), "-set_serial", _serial())
            ends = ("-days", str(self.days), "-extfile", str(config), "-extensions", "made")
            _run("x509", "-req", "-in", str(request), "-out", str(made), *signer, *ends)
            self._place(desk, key.name, made.name)
        return Made(self.folder / f"{file}.pem", self.folder / f"{file}.key", subject)

    def _desk(self) -> _Desk:
        return _Desk(self.folder)

    def _place(self, desk: Path, *files: str) -> None:
        for file in files:
            if file.endswith(".pem"):
                (desk / file).chmod(0o644)
            os.replace(desk / file, self.folder / file)


class _Desk:
    """A folder beside the certificates, for as long as they are being made."""

    def __init__(self, folder: Path) -> None:
        try:
            self._made = tempfile.TemporaryDirectory(prefix=".making-", dir=folder)
        except OSError as e:
            raise CertificateError(f"{folder}: {e.strerror}") from e

    def __enter__(self) -> Path:
        return Path(self._made.name)

    def __exit__(self, *_: object) -> None:
        self._made.cleanup()


def _hosts(hosts: Sequence[str]) -> list[str]:
    """Subject alternative names of these hosts and of loopback."""
    out = []
    for host in dict.fromkeys((*hosts, "localhost", "127.0.0.1", "::1")):
        try:
            out.append(f"IP:{ipaddress.ip_address(host.strip('[]'))}")
        except ValueError:
            if not _HOST.fullmatch(host):
                raise CertificateError(f"host: expected a name or an IP address, found {host!r}") from None
            out.append(f"DNS:{host}")
    return out


def _config(desk: Path, subject: str, extensions: Sequence[str]) -> Path:
    lines = ("[req]", "prompt=no", "distinguished_name=who", "x509_extensions=made", "string_mask=utf8only")
    path = desk / "config"
    path.write_text("\n".join((*lines, "[who]", f"CN={subject}", "[made]", *extensions, "")))
    return path


def _serial() -> str:
    return f"0x{secrets.randbits(126) | 1 << 125:x}"


def _run(*words: str) -> None:
    try:
        subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=60, umask=0o077, text=True)
    except subprocess.CalledProcessError as e:
        said = " ".join(str(e.stderr).split())[-400:]
        raise CertificateError(f"openssl {words[0]} failed: {said}") from None
    except subprocess.TimeoutExpired:
        raise CertificateError(f"openssl {words[0]} did not end within 60 s") from None
