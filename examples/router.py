"""A router that knows versions: a request goes only to a replica that holds what it asks for, a session to its own.

    weightplane controlplane --probes 127.0.0.1:7451
    python examples/router.py 127.0.0.1:8000 127.0.0.1:7451 policy
    curl -H 'Weightplane-Min-Version: 12' -H 'X-Session: alice' -d '{"prompts": [[1]], "max_new_tokens": 4}' \
        127.0.0.1:8000/generate

It asks the control plane at each request; who does not answer, or refuses, is passed over.
"""

import contextlib
import hashlib
import http.client
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FLOOR, SESSION = "Weightplane-Min-Version", "X-Session"
PATIENCE_S = 30.0  # with one replica, for a whole answer; a stopped one costs its request as long


def ask(host: str, method: str, path: str, body: bytes, headers: dict[str, str], timeout: float) -> tuple[int, bytes]:
    """Status and body; raises ``OSError`` or ``HTTPException`` when nobody answers."""
    with contextlib.closing(http.client.HTTPConnection(host, timeout=timeout)) as connection:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


def candidates(probes: str, group: str, floor: str, session: str) -> dict[str, str]:
    """Who may serve the request, and where; best first: each session has an order of its own."""
    found = json.loads(ask(probes, "GET", f"/groups/{group}/routable?min_version={floor}", b"", {}, 5)[1])
    order = sorted(found.get("replicas", {}), key=lambda r: hashlib.sha256(f"{session}/{r}".encode()).digest())
    return {r: found["replicas"][r]["address"] for r in order}


class Router(BaseHTTPRequestHandler):
    """One request. ``probes``, ``group``, ``patience`` are the class's."""

    probes, group, patience = "", "", PATIENCE_S

    def do_POST(self) -> None:
        """Pass it on to the first candidate that answers."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        floor, session, tried = self.headers.get(FLOOR, "0"), self.headers.get(SESSION, ""), dict[str, str]()
        try:
            found = candidates(self.probes, self.group, floor, session)
        except (OSError, http.client.HTTPException, ValueError) as e:  # the control plane's own error, in short
            found, tried = {}, {"": str(e)}
        for replica, address in found.items():
            if not address:
                tried[replica] = f"replica {replica} tells no address"
                continue
            try:
                status, said = ask(address, "POST", self.path, body, {FLOOR: floor}, self.patience)
            except (OSError, http.client.HTTPException) as e:
                tried[replica] = f"no answer: {e}"
                continue
            if status != 503:
                self.answer(status, said, replica, tried)
                return
            tried[replica] = said.decode(errors="replace")
        unseen = [tried[r] for r in found if not found[r]]
        error = "; ".join(["nobody serves this version or a newer one now", *unseen])
        self.answer(503, json.dumps({"error": error}).encode(), "", tried)

    def answer(self, status: int, body: bytes, replica: str, tried: dict[str, str]) -> None:
        """``tried``: who was passed over, and why."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Replica", replica)
        self.send_header("X-Tried", json.dumps(tried))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    listen, Router.probes, Router.group = sys.argv[1:4]
    Router.patience = float(sys.argv[4]) if len(sys.argv) > 4 else PATIENCE_S
    server = ThreadingHTTPServer((listen.split(":")[0], int(listen.split(":")[1])), Router)
    print("{}:{}".format(*server.server_address), flush=True)
    server.serve_forever()
