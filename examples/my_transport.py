"""A transport of your own in 100 lines: buckets are files in a shared folder. ``docs/transports.md`` explains it."""

import hashlib
import os
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from weightplane.controlplane import failpoints
from weightplane.controlplane.core.plan import Bucket
from weightplane.transports import base
from weightplane.v1.transport_pb2 import Rendezvous


class _Side:
    """What both sides share: a folder per sender and update that members alone can name, a deadline, a way out."""

    def __init__(self, spec: base.ChannelSpec, member: str) -> None:
        self.spec, self.member, self.words = spec, member, ""
        self.deadline, self.reason, self.aborted, self.landed = 0.0, "", threading.Event(), 0

    def arm(self, token: base.ArmToken, buckets: Sequence[Bucket], deadline: float) -> None:
        self.check(-1, ())
        self.words = f"{self.spec.key.hex()} {token.update_id} {token.epoch} {token.generation}"  # secret and fence
        self.deadline = deadline

    def folder(self, sender: str) -> Path:
        name = hashlib.sha256(f"{self.words} {sender}".encode()).hexdigest()[:32]
        return Path(os.environ.get("FOLDER_TRANSPORT", "/dev/shm")) / f"folder-{name}"

    def abort(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.aborted.set()

    def check(self, bucket: int, peers: Sequence[str]) -> None:
        if self.aborted.is_set():
            raise base.ChannelAborted(self.reason, bucket=bucket)
        if self.deadline and time.monotonic() > self.deadline:
            raise base.ChannelTimeout(f"waited for {', '.join(peers)}", peers=tuple(peers), bucket=bucket)

    def wait(self, path: Path, bucket: int, peer: str) -> None:
        while not path.exists():
            self.check(bucket, (peer,))
            self.aborted.wait(0.005)

    def done(self, bucket: Bucket, member: str) -> Path:
        return self.folder(bucket.sender) / f"{bucket.index}.{member.replace('/', '.')}"

    def close(self) -> None:
        self.aborted.set()


class _Sender(_Side, base.SendChannel):
    sent: tuple[Bucket, ...] = ()
    token: base.ArmToken | None = None

    def arm(self, token: base.ArmToken, buckets: Sequence[Bucket], deadline: float) -> None:
        if token != self.token:  # what an earlier update left is nobody's any more
            self.clear()
        self.token = token
        super().arm(token, buckets, deadline)
        self.folder(self.member).mkdir(mode=0o700, exist_ok=True)

    def send(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> None:
        while len(self.sent) >= 4:  # bounds what lies in the folder
            self.settle()
        part = self.folder(self.member) / "part"
        with part.open("wb", buffering=0) as file:
            for piece in (p for span in spans for p in span.split(1 << 20)):
                self.check(bucket.index, bucket.receivers)
                file.write(memoryview(piece.numpy()))
                failpoints.hit("folder.send.inside")
        part.rename(part.with_name(str(bucket.index)))
        self.sent += (bucket,)

    def settle(self) -> None:
        bucket, *rest = self.sent
        for receiver in bucket.receivers:
            self.wait(self.done(bucket, receiver), bucket.index, receiver)
            self.done(bucket, receiver).unlink()
        (self.folder(self.member) / str(bucket.index)).unlink()
        self.sent = tuple(rest)

    def flush(self) -> None:
        while self.sent:
            self.settle()

    def clear(self) -> None:
        self.sent = ()
        if self.words:
            shutil.rmtree(self.folder(self.member), ignore_errors=True)

    def close(self) -> None:
        super().close()
        self.clear()


class _Receiver(_Side, base.ReceiveChannel):
    @property
    def bytes_landed(self) -> int:
        return self.landed

    def receive(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> None:
        path = self.folder(bucket.sender) / str(bucket.index)
        self.wait(path, bucket.index, bucket.sender)
        with path.open("rb", buffering=0) as file:
            for piece in (p for span in spans for p in span.split(1 << 20)):
                self.check(bucket.index, (bucket.sender,))
                self.landed += file.readinto(memoryview(piece.numpy()))
                failpoints.hit("folder.receive.inside")
        self.done(bucket, self.member).touch()


class FolderTransport(base.Transport):
    """One send serves all receivers. An example, not a product: a sender that is killed leaves its folder behind."""

    name = "folder"
    capabilities = base.Capabilities(
        frozenset({"cpu"}), one_to_many=True, one_sided=False, cross_host=True, buffered=True
    )

    def probe(self) -> base.Probe:
        return base.Probe(True)

    def offer(self, member: str) -> Rendezvous:
        return Rendezvous(transport=self.name)

    def open_sender(self, spec: base.ChannelSpec, member: str) -> base.SendChannel:
        return _Sender(spec, member)

    def open_receiver(self, spec: base.ChannelSpec, member: str) -> base.ReceiveChannel:
        return _Receiver(spec, member)
