"""A trainer that stops in the middle of sending, says so, and waits to be killed."""

from __future__ import annotations

import sys
import threading
from typing import Any

from weightplane.trainer_agent import Publisher, SafetensorsSource
from weightplane.transports import registry


def main(address: str, group: str, checkpoint: str, mode: str = "staged") -> None:
    transport = registry.get("shm")
    open_sender = transport.open_sender

    def opened(*args: Any) -> Any:
        channel = open_sender(*args)
        send, sent = channel.send, []

        def slow(bucket: Any, spans: Any) -> None:
            sent.append(bucket)
            if len(sent) == 4:
                print("sending", flush=True)
                threading.Event().wait()
            send(bucket, spans)

        setattr(channel, "send", slow)  # noqa: B010
        return channel

    setattr(transport, "open_sender", opened)  # noqa: B010
    source = SafetensorsSource(checkpoint)
    with Publisher(address, group, source, takeover=True, transport="shm", bucket_bytes=1 << 16) as publisher:
        publisher.publish(step=1000, mode=mode)


if __name__ == "__main__":
    main(*sys.argv[1:])
