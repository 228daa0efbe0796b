"""What stands in for a vLLM that was freshly started from a checkpoint: it answers for a prompt's log-probabilities."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from weightplane.parity.samples import Sample, Sampling
from weightplane.parity.scorer import TransformersScorer


@contextmanager
def standing_in(scorer: TransformersScorer) -> Iterator[str]:
    """Its URL."""
    one = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/inference/v1/generate" and asked["sampling_params"]["prompt_logprobs"] == 0
            first, *rest = asked["token_ids"]
            sample = Sample((first,), tuple(rest), (0.0,) * len(rest), Sampling())
            with one:
                (values,) = scorer.score([sample])
            entries = [None, *({str(t): {"logprob": v}} for t, v in zip(rest, values, strict=True))]
            said = json.dumps({"prompt_logprobs": entries}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, format: str, *args: object) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
