"""Hosts made of network namespaces: each with an address of its own, all at one switch, whose ports can be pulled.

Everything is named after this process and gone at the end. The test itself is one more machine at the switch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from types import TracebackType

__all__ = ["CUTS", "Network", "cut_problem", "why_not"]

#: Ways to cut a host off. A link that goes down is seen by the host; a port that is taken away, or DROP, is not.
CUTS = ("link down", "port taken away", "iptables DROP")
_SUBNETS = "198.18.{}"  # of the range for tests between networks (RFC 2544)


def run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


def why_not() -> str:
    """Why namespaces cannot be made here; empty if they can."""
    if os.geteuid():
        return "network namespaces need root"
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            return f"no {command} command"
    try:
        with Network(["probe"]) as network:
            network.slow("probe")
            return ""
    except OSError as e:
        return f"no network namespaces: {e}"


def _sweep() -> None:
    """Namespaces of tests that were killed."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    for name in (line.split()[0] for line in listed.splitlines() if line.startswith("wp")):
        pid = name.removeprefix("wp").partition("-")[0]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def cut_problem(how: str) -> str:
    """Why a host cannot be cut off so here; empty if it can."""
    return "no iptables command" if how.startswith("iptables") and shutil.which("iptables") is None else ""


class Network:
    """A context. ``address[host]`` is the host's; ``eth0`` its interface."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._prefix = f"wp{os.getpid()}"
        self._subnet = _SUBNETS.format(os.getpid() % 256)  # the test's own end of a cable shares our table of routes
        self.hosts = list(hosts)
        self.address = {host: f"{self._subnet}.{n}" for n, host in enumerate(hosts, 1)}
        self._namespaces = [self._name("sw"), *(self._name(h) for h in hosts)]

    def _name(self, host: str) -> str:
        return f"{self._prefix}-{host}"

    def _port(self, host: str) -> str:
        """The switch's end of a host's cable."""
        return f"p{self.hosts.index(host)}"

    def __enter__(self) -> Network:
        _sweep()
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def _make(self) -> None:
        switch = self._namespaces[0]
        for namespace in self._namespaces:
            run("ip", "netns", "add", namespace)
            run("ip", "-n", namespace, "link", "set", "lo", "up")
        run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "br0", "up")
        for host in self.hosts:
            self._plug(self._port(host), self._name(host), "eth0", self.address[host])
        mine = f"{self._prefix}t"
        run("ip", "link", "add", mine, "type", "veth", "peer", "name", "pt", "netns", switch)
        run("ip", "-n", switch, "link", "set", "pt", "master", "br0", "up")
        run("ip", "address", "add", f"{self._subnet}.254/24", "dev", mine)
        run("ip", "link", "set", mine, "up")

    def _plug(self, port: str, namespace: str, name: str, address: str) -> None:
        switch = self._namespaces[0]
        run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", name, "netns", namespace)
        run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
        run("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", name)
        run("ip", "-n", namespace, "link", "set", name, "up")

    def on(self, host: str) -> tuple[str, ...]:
        """What goes before a command that is to run there. It replaces itself: the process id is the command's."""
        return ("ip", "netns", "exec", self._name(host))

    def cut(self, host: str, how: str) -> None:
        """Nothing passes between the host and anyone else; no connection is told."""
        self._change(host, how, True)

    def heal(self, host: str, how: str) -> None:
        self._change(host, how, False)

    def _change(self, host: str, how: str, cut: bool) -> None:
        switch = self._namespaces[0]
        if how == "link down":
            run("ip", "-n", switch, "link", "set", self._port(host), "down" if cut else "up")
        elif how == "port taken away":
            run("ip", "-n", switch, "link", "set", self._port(host), *(["nomaster"] if cut else ["master", "br0"]))
        else:
            for chain in ("INPUT", "OUTPUT"):
                rule = ("-A" if cut else "-D", chain, "-j", "DROP")
                run(*self.on(host), "iptables", *rule)

    def slow(self, host: str) -> None:
        """What goes to the host goes at 0.5 Mbit/s from here on: 256 KiB take four seconds."""
        shape = ("root", "tbf", "rate", "500kbit", "burst", "16kb", "latency", "400ms")
        self._tc("add", host, *shape)

    def fast(self, host: str) -> None:
        self._tc("del", host, "root")

    def _tc(self, verb: str, host: str, *words: str) -> None:
        run("ip", "netns", "exec", self._namespaces[0], "tc", "qdisc", verb, "dev", self._port(host), *words)

    def received(self, host: str) -> int:
        """Bytes that came in by its cable since it was plugged in."""
        words = (*self.on(host), "cat", "/sys/class/net/eth0/statistics/rx_bytes")
        return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)

    def close(self) -> None:
        for namespace in self._namespaces:  # cables go with either end
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
