"""The shared-memory segment of one sender: a ring of reused, prefaulted slots that N receivers read.

Layout, little-endian, offsets in bytes (``S`` slots, ``R`` receivers)::

    0       magic u64, slots u64, slot_bytes u64, receivers u64, pid u64, pid namespace u64
    64      proof of the sender, 32 bytes
    128     bell u64: slots written so far; receivers sleep on its low half (futex)
    136     state u64: what became of the sender
    4096    slot headers, 64 bytes each: seq u64, bucket u64, offset u64, nbytes u64, fence 16 bytes
    A       receivers, _R_BYTES + 8 S (rounded up to 64) each: see the ``_R_*`` offsets
    B       the slots, page-aligned

A slot serves the receivers it is written for: the sender puts its number into each one's queue, and writes the slot
again only when all of them that are still in have read it. A number, and everything it announces, is written before the
count that publishes it. Every word has one writer.

**Life.** Each member holds an open-file-description lock on one byte of the segment (sender 0, receiver r 1 + r). The
kernel drops it whoever dies, in any pid namespace; where the namespace is shared a pidfd sees the death too (a lock
lives on in forked children). The file is born without a name (O_TMPFILE), private (0600), locked and complete; it is
linked once and unlinked when every receiver has it open; a name whose sender's lock is free is stale and swept.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hmac
import mmap
import os
import platform
import select
import struct
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Final

__all__ = [
    "ABORTED",
    "CLOSED",
    "OPEN",
    "Peer",
    "Segment",
    "SegmentError",
    "SenderDied",
    "fence_of",
    "futex_wait",
    "segment_name",
    "sweep",
]

PREFIX: Final = "weightplane-"
OPEN, ABORTED, CLOSED = 1, 2, 3  # states of a sender or receiver; 0 = not there yet
WAIT_SLICE: Final = 0.05  # longest sleep between two looks at abort flag, deadline and peers
SPINS: Final = 4000  # looks, about 0.3 ms, instead of a sleep that would cost the GIL for 5 ms
_MAGIC: Final = int.from_bytes(b"WPSHM\0\0\1", "little")
_PAGE: Final = 4096
_BELL, _STATE = 128 // 8, 136 // 8
_R_STATE, _R_READ, _R_SKIPPED, _R_ARMS = 48 // 8, 64 // 8, 72 // 8, 80 // 8
_R_FENCE = 96
_R_COUNT, _R_DROPPED, _R_QUEUE = 128 // 8, 136 // 8, 144 // 8
_R_BYTES: Final = 144

_SYSCALL_ARGS = (ctypes.c_long, ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.c_void_p, *(ctypes.c_long,) * 2)
_sleeping_call = ctypes.CDLL(None).syscall
_quick_call = ctypes.PyDLL(None).syscall  # keeps the GIL: freed for a microsecond, it could be gone for 5 ms
for _call in (_sleeping_call, _quick_call):
    _call.restype, _call.argtypes = ctypes.c_long, _SYSCALL_ARGS
_machine = platform.machine()
#: System call number of futex, None where it is not known and waiting is by short sleeps.
_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221}.get(_machine)
_ORDERED = _machine == "x86_64"  # stores are seen in order: no fence needed
_slice = (ctypes.c_long * 2)(0, int(WAIT_SLICE * 1e9))
_slice_at = ctypes.addressof(_slice)
_dummy = ctypes.c_uint32()
_dummy_at = ctypes.addressof(_dummy)


class SegmentError(Exception):
    """The segment cannot be made or used; the text says why and what to do."""


class SenderDied(SegmentError):
    """The segment is what a dead sender left behind; its name was removed."""


def futex_wait(address: int, value: int) -> None:
    """Sleep until woken, at most ``WAIT_SLICE``, unless the low 32 bits at ``address`` differ from ``value``'s."""
    if _FUTEX is None:
        select.select((), (), (), 0.0005)
    else:
        _sleeping_call(_FUTEX, address, 0, value & 0xFFFFFFFF, _slice_at, 0, 0)


def futex_wake(address: int) -> None:
    """Wake every sleeper on ``address``, in any process."""
    if _FUTEX is not None:
        _quick_call(_FUTEX, address, 1, 0x7FFFFFFF, 0, 0, 0)


def _memory_fence() -> None:
    """Order memory accesses before and after, where the machine does not: the kernel's futex wake is a full barrier."""
    if not _ORDERED:
        _quick_call(_FUTEX or 0, _dummy_at, 1, 0, 0, 0, 0)


def _digest(key: bytes, size: int, *parts: str) -> bytes:
    text = b"".join(struct.pack("<Q", len(p := part.encode("utf-8", "surrogatepass"))) + p for part in parts)
    return blake2b(text, key=key, digest_size=size).digest()


def segment_name(channel_id: str, sender: str) -> str:
    """File name of a sender's segment of a channel."""
    return PREFIX + _digest(b"", 16, channel_id, sender).hex()


def fence_of(update_id: str, epoch: int, generation: int) -> bytes:
    """The 16 bytes that stand for an ``ArmToken`` in the segment."""
    return _digest(b"", 16, update_id, str(epoch), str(generation))


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _lock(kind: int, byte: int) -> bytes:
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, byte, 1, 0)


def lock_is_free(fd: int, byte: int) -> bool:
    """Whether nobody holds that byte's lock through another open of the file."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK, byte))
    kind: int = struct.unpack_from("h", answer)[0]
    return kind == fcntl.F_UNLCK


class Peer:
    """Tells whether the member behind one lock byte is still alive. Stopped counts as alive."""

    def __init__(self, fd: int, byte: int, pid: int, namespace: int) -> None:
        self._fd, self._byte = fd, byte
        self._pidfd, self._gone = -1, False
        if namespace and namespace == _pid_namespace() and pid != os.getpid():
            try:
                self._pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                self._gone = True
            except OSError:
                pass  # no pidfds here (old kernel, descriptor limit): the lock is enough

    def dead(self) -> bool:
        """True once the process has died or closed its side. About 2 µs."""
        if not self._gone and self._pidfd >= 0:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            self._gone = bool(poll.poll(0))
        return self._gone or lock_is_free(self._fd, self._byte)

    def close(self) -> None:
        """Free the pidfd."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


class Segment:
    """One mapped segment, on either side. See the module text; who may write what is said there.

    One thread, but for ``state``, ``drop``, ``publish_state`` and the wakes. After ``close`` every method raises
    ``ValueError``.
    """

    def __init__(self, fd: int, size: int, slots: int, slot_bytes: int, receivers: int) -> None:
        self.fd = fd
        self.slots, self.slot_bytes, self.receivers = slots, slot_bytes, receivers
        self._map = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        self.bytes = memoryview(self._map)
        self.words = self.bytes.cast("Q")
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._stride = _receiver_stride(slots)
        self._first = _PAGE + _round(slots * 64, 64)
        self._data = size - slots * slot_bytes

    # -- birth

    @classmethod
    def create(
        cls, path: Path, key: bytes, channel_id: str, sender: str, receivers: int, slots: int, slot_bytes: int
    ) -> Segment:
        """Make, prefault, lock and link a segment. ``SegmentError`` says what the machine lacks."""
        size = _round(_PAGE + slots * 64 + receivers * _receiver_stride(slots), _PAGE) + slots * slot_bytes
        try:
            fd = os.open(path.parent, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        except OSError as e:
            raise SegmentError(f"{path.parent}: cannot make a file: {e.strerror}") from e
        try:
            os.posix_fallocate(fd, 0, size)
            segment = cls(fd, size, slots, slot_bytes, receivers)
        except OSError as e:
            os.close(fd)
            free = os.statvfs(path.parent)
            raise SegmentError(
                f"{path.parent}: {size >> 10} KiB are needed, {free.f_bavail * free.f_frsize >> 10} KiB are free: "
                f"{e.strerror}; give the container more shared memory (docker run --shm-size, an emptyDir in memory)"
            ) from e
        struct.pack_into("<6Q", segment.bytes, 0, _MAGIC, slots, slot_bytes, receivers, os.getpid(), _pid_namespace())
        segment.bytes[64:96] = _digest(key, 32, "sender", channel_id, sender)
        segment.words[_STATE] = OPEN
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _lock(fcntl.F_WRLCK, 0))
        directory = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:  # a dirfd makes Python use linkat, which follows the link of /proc
            os.link(f"/proc/self/fd/{fd}", path.name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=True)
        except OSError as e:
            segment.close()
            raise SegmentError(f"{path}: cannot name the segment: {e.strerror}") from e
        finally:
            os.close(directory)
        return segment

    @classmethod
    def attach(
        cls, path: Path, key: bytes, channel_id: str, sender: str, receivers: int, rank: int, member: str
    ) -> Segment:
        """Open a sender's segment as receiver ``rank``. ``FileNotFoundError``: not there (yet)."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except PermissionError as e:
            raise SegmentError(
                f"{path}: user {os.geteuid()} may not open the segment of {sender!r}; shm needs one user on both sides"
            ) from e
        try:
            stat = os.fstat(fd)
            if stat.st_uid != os.geteuid() or stat.st_mode & 0o077:
                raise SegmentError(f"{path}: owned by user {stat.st_uid}, mode {stat.st_mode & 0o777:o}: not ours")
            header = os.pread(fd, 96, 0)
            if len(header) < 96:
                raise SegmentError(f"{path}: too short to be a segment")
            magic, slots, slot_bytes, count = struct.unpack_from("<4Q", header)
            if magic != _MAGIC or count != receivers:
                raise SegmentError(f"{path}: not a segment for {receivers} receiver(s)")
            if not hmac.compare_digest(header[64:], _digest(key, 32, "sender", channel_id, sender)):
                raise SegmentError(f"{path}: the channel key of {sender!r} is not ours")
            if lock_is_free(fd, 0):
                path.unlink(missing_ok=True)
                raise SenderDied(f"{sender!r} died before {member!r} could open its segment")
            segment = cls(fd, stat.st_size, slots, slot_bytes, receivers)
        except BaseException:
            os.close(fd)
            raise
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _lock(fcntl.F_WRLCK, 1 + rank))
        except OSError as e:
            segment.close()
            if e.errno in (errno.EAGAIN, errno.EACCES):
                raise SegmentError(f"{path}: {member!r} has it open already") from e
            raise
        at = segment.receiver_at(rank)
        segment.bytes[at : at + 32] = _digest(key, 32, "receiver", channel_id, member)
        struct.pack_into("<2Q", segment.bytes, at + 32, os.getpid(), _pid_namespace())
        _memory_fence()
        segment.words[at // 8 + _R_STATE] = OPEN
        segment.wake_receiver_words(rank)
        if all(segment.words[segment.receiver_at(r) // 8 + _R_STATE] for r in range(receivers)):
            path.unlink(missing_ok=True)
        return segment

    def sender_peer(self) -> Peer:
        """The sender, as seen by a receiver."""
        return Peer(self.fd, 0, self.words[4], self.words[5])

    def receiver_peer(self, rank: int, key: bytes, channel_id: str, member: str) -> Peer:
        """An attached receiver, as seen by the sender. ``SegmentError`` if it does not know the key."""
        at = self.receiver_at(rank)
        if not hmac.compare_digest(self.bytes[at : at + 32], _digest(key, 32, "receiver", channel_id, member)):
            raise SegmentError(f"{member!r} attached without the channel's key")
        return Peer(self.fd, 1 + rank, self.words[at // 8 + 4], self.words[at // 8 + 5])

    def close(self) -> None:
        """Unmap and close (which drops our lock). Idempotent."""
        if self.fd < 0:
            return
        self.words.release()
        self.bytes.release()
        self._map.close()
        os.close(self.fd)
        self.fd = -1

    # -- addresses

    def receiver_at(self, rank: int) -> int:
        """Offset of a receiver's block."""
        return self._first + rank * self._stride

    def slot_at(self, slot: int) -> int:
        """Address of a slot's bytes."""
        return self.base + self._data + slot * self.slot_bytes

    # -- sender's side

    @property
    def state(self) -> int:
        """What became of the sender: ``OPEN``, ``ABORTED``, ``CLOSED``."""
        return self.words[_STATE]

    @state.setter
    def state(self, value: int) -> None:
        self.words[_STATE] = value
        futex_wake(self.base + _BELL * 8)

    def write_header(self, slot: int, bucket: int, offset: int, nbytes: int, fence: bytes, seq: int) -> None:
        """Say what a slot holds; the number comes last."""
        at = _PAGE + slot * 64
        struct.pack_into("<3Q16s", self.bytes, at + 8, bucket, offset, nbytes, fence)
        _memory_fence()
        self.words[at // 8] = seq

    def invalidate(self, slot: int) -> None:
        """Take the slot's number away before its bytes change."""
        self.words[(_PAGE + slot * 64) // 8] = 0
        _memory_fence()

    def post(self, ranks: Sequence[int], seq: int) -> list[tuple[int, int]]:
        """Announce slot number ``seq`` (from 1) to receivers; returns ``(rank, its count)`` to wait for."""
        words, out = self.words, []
        for rank in ranks:
            at = self.receiver_at(rank) // 8
            count = words[at + _R_COUNT]
            words[at + _R_QUEUE + count % self.slots] = seq
            out.append((rank, count + 1))
        _memory_fence()
        for rank, count in out:
            words[self.receiver_at(rank) // 8 + _R_COUNT] = count
        words[_BELL] = seq
        futex_wake(self.base + _BELL * 8)
        return out

    def drop(self, rank: int) -> None:
        """Tell a receiver that it is out."""
        self.words[self.receiver_at(rank) // 8 + _R_DROPPED] = 1
        futex_wake(self.base + _BELL * 8)

    def count(self, rank: int) -> int:
        """Slots announced to a receiver."""
        return self.words[self.receiver_at(rank) // 8 + _R_COUNT]

    def wait_read(self, rank: int, seen: int) -> None:
        """Sleep (one slice) unless the receiver has read more than ``seen``."""
        futex_wait(self.base + self.receiver_at(rank) + _R_READ * 8, seen)

    def spin_read(self, rank: int, count: int) -> bool:
        """Look for a fraction of a millisecond, keeping the GIL, whether the receiver has read ``count``."""
        return self._spin(self.receiver_at(rank) // 8 + _R_READ, count)

    def spin_count(self, rank: int, count: int) -> bool:
        """The same for slots announced to a receiver."""
        return self._spin(self.receiver_at(rank) // 8 + _R_COUNT, count)

    def _spin(self, word: int, count: int) -> bool:
        words = self.words
        return any(words[word] >= count for _ in range(SPINS))

    def wait_arm(self, rank: int, seen: int) -> None:
        """Sleep (one slice) unless the receiver armed (or attached) since ``seen``."""
        futex_wait(self.base + self.receiver_at(rank) + _R_ARMS * 8, seen)

    # -- receiver's side

    def wake_bell(self) -> None:
        """Wake every receiver, to look around."""
        futex_wake(self.base + _BELL * 8)

    @property
    def bell(self) -> int:
        """Slots written so far: what a receiver sleeps on."""
        return self.words[_BELL]

    def wait_bell(self, seen: int) -> None:
        """Sleep (one slice) unless the bell rang since ``seen``."""
        futex_wait(self.base + _BELL * 8, seen)

    def read_header(self, slot: int) -> tuple[int, int, int, int, bytes]:
        """``(seq, bucket, offset, nbytes, fence)`` of a slot."""
        header: tuple[int, int, int, int, bytes] = struct.unpack_from("<4Q16s", self.bytes, _PAGE + slot * 64)
        return header

    def queued(self, rank: int, index: int) -> int:
        """Slot number at place ``index`` of a receiver's queue."""
        _memory_fence()
        return self.words[self.receiver_at(rank) // 8 + _R_QUEUE + index % self.slots]

    def publish_read(self, rank: int, count: int) -> None:
        """A receiver is done with ``count`` slots in all."""
        at = self.receiver_at(rank) // 8 + _R_READ
        _memory_fence()
        self.words[at] = count
        futex_wake(self.base + at * 8)

    def publish_skipped(self, rank: int, count: int) -> None:
        """A receiver does not take slot ``count`` (from 1): it was another update's. Before ``publish_read``."""
        self.words[self.receiver_at(rank) // 8 + _R_SKIPPED] = count

    def publish_arm(self, rank: int, fence: bytes) -> None:
        """A receiver is armed for ``fence``."""
        at = self.receiver_at(rank)
        self.bytes[at + _R_FENCE : at + _R_FENCE + 16] = fence
        _memory_fence()
        self.words[at // 8 + _R_ARMS] += 1
        self.wake_receiver_words(rank)

    def publish_state(self, rank: int, state: int) -> None:
        """A receiver aborted or closed."""
        self.words[self.receiver_at(rank) // 8 + _R_STATE] = state
        self.wake_receiver_words(rank)

    def dropped(self, rank: int) -> bool:
        """Whether the sender dropped a receiver."""
        return bool(self.words[self.receiver_at(rank) // 8 + _R_DROPPED])

    # -- both

    def receiver_state(self, rank: int) -> int:
        """0 (not attached), ``OPEN``, ``ABORTED`` or ``CLOSED``."""
        return self.words[self.receiver_at(rank) // 8 + _R_STATE]

    def read(self, rank: int) -> int:
        """Slots a receiver has read or skipped."""
        return self.words[self.receiver_at(rank) // 8 + _R_READ]

    def skipped(self, rank: int) -> int:
        """The last slot (from 1) that a receiver did not take; 0 if it took all."""
        return self.words[self.receiver_at(rank) // 8 + _R_SKIPPED]

    def arms(self, rank: int) -> int:
        """How often a receiver armed."""
        return self.words[self.receiver_at(rank) // 8 + _R_ARMS]

    def armed(self, rank: int) -> bytes:
        """The fence a receiver is armed for."""
        at = self.receiver_at(rank) + _R_FENCE
        return bytes(self.bytes[at : at + 16])

    def wake_receiver_words(self, rank: int) -> None:
        """Wake a sender that sleeps on a receiver's words."""
        at = self.base + self.receiver_at(rank)
        futex_wake(at + _R_READ * 8)
        futex_wake(at + _R_ARMS * 8)


def sweep(directory: Path) -> list[str]:
    """Unlink our user's segments whose sender is dead; returns their names."""
    swept = []
    for name in os.listdir(directory):
        if not name.startswith(PREFIX):
            continue
        path = directory / name
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # another user's, or gone by now
        try:
            if os.fstat(fd).st_uid == os.geteuid() and lock_is_free(fd, 0):
                path.unlink(missing_ok=True)
                swept.append(name)
        finally:
            os.close(fd)
    return swept


def _round(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def _receiver_stride(slots: int) -> int:
    return _round(_R_BYTES + 8 * slots, 64)
