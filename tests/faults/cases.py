"""The matrix. ``ci`` marks the cases that run as tests; ``make chaos`` runs all."""

from __future__ import annotations

from dataclasses import replace

from tests.faults.case import Case

__all__ = ["CASES"]

LOST = ("MEMBER_LOST", "TRANSPORT")
BROKEN = ("ENGINE", "TRANSPORT", "RESOURCE", "INTERNAL")
RESTARTED = ("COORDINATOR_RESTARTED",)
BUCKET = 20  # of 64: every receiver has some, none has all
ONE_OR_FOUR = (1, 4)


def _replica() -> list[Case]:
    out = []
    for phase in ("start", "arm", "update", "verify", "voted"):
        nth = BUCKET if phase == "update" else 1
        ci = phase in ("start", "update", "voted")
        out += [
            Case("SIGKILL", "r1", phase, "kill", "ABORTED", LOST, ("r1",), nth, dies=True, left=("r1",), ci=ci),
            Case("SIGSTOP", "r1", phase, "stop", "ABORTED", (*LOST, "DEADLINE"), ("r1",), nth, left=("r1",), timeout=5,
                 ci=phase == "update"),
            Case("engine restarts", "r1", phase, "restart", "ABORTED|COMMITTED", ("MEMBER_RESTARTED", *BROKEN, *LOST),
                 ("r1",), nth, left=("r1",), ci=phase == "update"),
        ]  # fmt: skip
        if phase != "voted":
            out += [
                Case("exception", "r1", phase, "raise", "ABORTED", ("ENGINE",), ("r1",), nth, left=("r1",),
                     ci=phase in ("arm", "update", "verify")),
                Case("blocked thread", "r1", phase, "block:7", "ABORTED", ("DEADLINE", *LOST), ("r1",), nth,
                     left=("r1",), timeout=4, ci=phase == "update"),
                Case("GIL held", "r1", phase, "hold-gil:7", "ABORTED", ("DEADLINE", *LOST), ("r1",), nth, left=("r1",),
                     timeout=4, ci=phase == "update"),
            ]  # fmt: skip
    for phase in ("arm", "update"):
        nth = BUCKET if phase == "update" else 1
        out.append(Case("shared memory full", "r1", phase, "full", "ABORTED", ("RESOURCE",), ("r1",), nth, left=("r1",),
                        ci=phase == "arm"))  # fmt: skip
    out += [
        Case("SIGKILL", "r1", "decided", "kill", "COMMITTED", dies=True, left=("r1",), ci=True),
        Case("SIGSTOP", "r1", "decided", "stop", "COMMITTED", left=("r1",), timeout=4, ci=True),
        Case("exception", "r1", "applying", "raise", "COMMITTED", left=("r1",), ci=True, nth=3),
        Case("SIGKILL", "r1", "applying", "kill", "COMMITTED", dies=True, left=("r1",), nth=3),
        Case("SIGKILL", "r2", "update", "kill", "ABORTED", LOST, ("r2",), BUCKET, dies=True, left=("r2",), ci=True),
        Case("SIGKILL", "r1", "update", "kill", "ABORTED", LOST, ("r1",), BUCKET, dies=True, left=("r1",),
             mode="in_place", ci=True),
        Case("SIGSTOP", "r1", "update", "stop", "ABORTED", (*LOST, "DEADLINE"), ("r1",), BUCKET, left=("r1",),
             mode="in_place", timeout=5),
        Case("exception", "r1", "update", "raise", "ABORTED", ("ENGINE",), ("r1",), BUCKET, left=("r1",),
             mode="in_place"),
        Case("slow reader, 1 MB/s", "r1", "update", "block:0.004", "COMMITTED", nth=0, ci=True),
        Case("slow reader, too slow", "r1", "update", "block:0.4", "ABORTED", ("DEADLINE", *LOST), ("r1",), nth=0,
             left=("r1",), timeout=4),
        Case("GIL held", "r1", "idle", "hold-gil:3", "COMMITTED", ci=True, timeout=12),
        Case("GIL held 20 s", "r1", "idle", "hold-gil:20", "COMMITTED", timeout=30),
        Case("clock jumps an hour on", "r1", "idle", "clock:3600", "COMMITTED", ci=True),
        Case("clock jumps back", "r1", "update", "clock:-7200", "COMMITTED", nth=BUCKET),
        Case("engine restarts", "r1", "idle", "restart", "COMMITTED|ABORTED", ("MEMBER_RESTARTED",), ("r1",),
             left=("r1",), ci=True),
    ]  # fmt: skip
    return out


def _trainer() -> list[Case]:
    out = []
    rank = ("trainer", "rank", "")
    for phase, outcome in (("start", "ABORTED"), ("arm", "ABORTED"), ("update", "ABORTED"), ("finish", "ABORTED"),
                           ("decided", "COMMITTED")):  # fmt: skip
        nth = BUCKET if phase == "update" else 1
        reasons = (*LOST, "PEER_RANK_FAILED")
        out += [
            Case("SIGKILL", "trainer", phase, "kill", outcome, reasons, (), nth, dies=True, ranks=ONE_OR_FOUR,
                 ci=phase in ("start", "update", "decided")),
            Case("exception", "trainer", phase, "raise", outcome, (), (), nth),
        ]  # fmt: skip
    out += [
        Case("SIGSTOP", "trainer", "update", "stop", "ABORTED", (*LOST, "DEADLINE", "TRAINER_FENCED"), (), BUCKET,
             timeout=5),
        Case("SIGKILL", "trainer-2", "update", "kill", "ABORTED", (*LOST, "PEER_RANK_FAILED"), (), 12, dies=True,
             ranks=(4,)),
        Case("SIGKILL", "trainer", "update", "kill", "ABORTED", LOST, (), BUCKET, dies=True, mode="in_place"),
        Case("GIL held", "trainer", "update", "hold-gil:3", "COMMITTED", nth=BUCKET, timeout=12, ci=True),
        Case("GIL held 20 s", "trainer", "idle", "hold-gil:20", "COMMITTED", timeout=30),
        Case("clock jumps an hour on", "trainer", "idle", "clock:3600", "COMMITTED"),
        Case("second trainer", "trainer", "update", "", "COMMITTED", outside="refused", nth=BUCKET, timeout=20,
             ci=True),
        Case("takeover", "trainer", "update", "", "ABORTED", ("TRAINER_FENCED", "SUPERSEDED", *LOST),
             rank, outside="takeover", nth=BUCKET, timeout=20, ci=True),
    ]  # fmt: skip
    del rank
    return out


def _plane() -> list[Case]:
    out = []
    for phase, outcome in (
        ("start, before the write", "NONE|ABORTED|COMMITTED"),
        ("start, after the write", "ABORTED"),
        ("arm", "ABORTED"),
        ("update", "ABORTED"),
        ("finish", "ABORTED"),
        ("decide, before the write", "ABORTED"),
        ("decide, after the write", "COMMITTED"),
        ("close, before the write", "COMMITTED"),
        ("close, after the write", "COMMITTED"),
    ):
        ci = phase in ("start, after the write", "update", "decide, before the write", "decide, after the write")
        out.append(Case("SIGKILL, restarted", "plane", phase, "kill", outcome, RESTARTED, ("",), dies=True, timeout=20,
                        ranks=ONE_OR_FOUR, ci=ci))  # fmt: skip
    out += [
        Case("SIGSTOP", "plane", "update", "stop", "ABORTED|COMMITTED", ("DEADLINE", *RESTARTED, *LOST), (), timeout=4,
             ci=True),
        Case("blocked loop", "plane", "update", "block:1", "COMMITTED", ci=True),
        Case("GIL held", "plane", "update", "hold-gil:2", "COMMITTED|ABORTED", LOST, (), timeout=8),
        Case("clock jumps an hour on", "plane", "update", "clock:3600", "COMMITTED", ci=True),
        Case("store refuses", "plane", "freeze, in the store", "raise", "NONE|ABORTED", (), ()),
        Case("store unknown", "plane", "freeze, store unknown", "raise", "COMMITTED|ABORTED|NONE", (), ()),
        Case("store refuses", "plane", "decide, in the store", "raise", "ABORTED", (), (), ci=True),
        Case("store unknown", "plane", "decide, store unknown", "raise", "COMMITTED", ci=True),
        Case("disk full", "plane", "decide, before the write", "", "ABORTED", (), (), outside="full:0", ci=True),
        Case("disk full", "plane", "start, before the write", "", "NONE|ABORTED", (), (), outside="full:0"),
    ]  # fmt: skip
    return out


def _messages() -> list[Case]:
    out = []
    for method in ("StartUpdate", "UpdateWeights", "PutDigests", "FinishUpdate"):
        for kind in ("lost-before", "lost-after", "duplicated", "delayed", "reordered"):
            ci = (method, kind) in {
                ("StartUpdate", "lost-after"),
                ("UpdateWeights", "duplicated"),
                ("FinishUpdate", "lost-before"),
                ("FinishUpdate", "lost-after"),
            }
            out.append(Case(f"{method} {kind}", "trainer", "update", "", "COMMITTED", outside=f"{kind}:{method}",
                            wires=("shm",), ci=ci))  # fmt: skip
    for kind in ("lost-before", "lost-after", "duplicated", "delayed", "reordered"):
        out.append(Case(f"PutReceipt {kind}", "r1", "update", "", "COMMITTED", outside=f"{kind}:PutReceipt",
                        wires=("shm",), ci=kind == "lost-after"))  # fmt: skip
    return out


def _links() -> list[Case]:
    out = []
    for phase, nth in (("update", BUCKET), ("voted", 1)):
        out += [
            Case("partition", "r1", phase, "", "ABORTED", LOST, ("r1",), nth, outside="partition", left=("r1",),
                 ci=phase == "update"),
            Case("black hole", "r1", phase, "", "ABORTED", LOST, ("r1",), nth, outside="blackhole", left=("r1",)),
            Case("half-closed", "r1", phase, "", "COMMITTED|ABORTED", LOST, ("r1",), nth, outside="half_close",
                 left=("r1",), ci=phase == "update"),
            Case("connection reset", "r1", phase, "", "COMMITTED", (), (), nth, outside="cut", ci=phase == "voted"),
            Case("messages delayed 0.3 s", "r1", phase, "", "COMMITTED", (), (), nth, outside="delay:0.3"),
        ]  # fmt: skip
    out += [
        Case("partition", "r1", "decided", "", "COMMITTED", outside="partition", left=("r1",), timeout=5, ci=True),
        Case("partition", "trainer", "update", "", "ABORTED", (), (), BUCKET, outside="partition", timeout=6, ci=True),
        Case("connection reset", "trainer", "update", "", "COMMITTED", (), (), BUCKET, outside="cut", ci=True),
        Case("half-closed", "trainer", "update", "", "COMMITTED", (), (), BUCKET, outside="half_close"),
        Case("messages delayed 0.3 s", "trainer", "update", "", "COMMITTED", (), (), BUCKET, outside="delay:0.3"),
    ]  # fmt: skip
    return out


def _really_full() -> list[Case]:
    """Not a byte is left: a small tmpfs, filled by the harness. ``disk full`` and ``shared memory full`` pretend."""
    return [
        Case("disk really full", "plane", "start, before the write", "", "NONE|ABORTED", ("RESOURCE",), ("",),
             outside="fill:disk", small=True),
        Case("disk really full", "plane", "decide, before the write", "", "ABORTED", ("RESOURCE",), ("",),
             outside="fill:disk", small=True, ci=True),
        Case("disk really full", "plane", "close, before the write", "", "COMMITTED", outside="fill:disk", small=True),
        Case("retained file, disk really full", "r1", "arm", "", "COMMITTED", outside="fill:kept", small=True, ci=True),
        Case("shared memory really full", "trainer", "start", "", "ABORTED", ("RESOURCE", "TRANSPORT"), ("rank",),
             outside="fill:shm", small=True, ci=True),
    ]  # fmt: skip


def _over(case: Case) -> Case:
    """What touches no bytes on their way runs over one wire."""
    apart = case.phase == "idle" or case.outside or (case.member == "plane" and not case.dies)
    return replace(case, wires=case.wires or ("shm",)) if apart else case


CASES: tuple[Case, ...] = tuple(
    map(_over, (*_replica(), *_trainer(), *_plane(), *_messages(), *_links(), *_really_full()))
)
