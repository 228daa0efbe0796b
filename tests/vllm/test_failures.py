"""One server with tied embeddings whose loader fails once in the middle: what is left behind, and that it heals.

Later on it is put to sleep and woken up.
"""

from __future__ import annotations

import threading
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.inference_agent.server import Server, eventually
from weightplane.controlplane.core import members
from weightplane.trainer_agent import PublishError, UpdateFailed

from .fleet import Fleet, tensors_of
from .orders import ACTIVE, ASLEEP, Orders, why
from .servers import VllmServer

Golden = dict[str, list[list[int]]]
TENSORS = 38  # of a tied checkpoint
FAILS_AT = 2 * TENSORS + 20  # in the middle of the third load


@pytest.fixture(scope="module")
def one(
    golden: object, folders: dict[str, Path], plane: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    logs = tmp_path_factory.mktemp("one")
    failpoint = {"WEIGHTPLANE_FAILPOINTS": f"vllm.load.inside=raise@{FAILS_AT};vllm.stream.inside=raise@{TENSORS + 20}"}
    server = VllmServer(folders["TA"], logs / "a.log", environment=failpoint).start()
    with Fleet("one", plane, {"a": server}, logs) as fleet:
        yield fleet


def test_tied_embeddings_follow(one: Fleet, folders: dict[str, Path], golden: Golden) -> None:
    """Trap 2: on CPU the tied head computes from a packed copy, which vLLM's own reload leaves stale."""
    assert one.tokens("a") == golden["TA"]
    for target in ("TB", "TA"):
        assert one.publish(folders[target]).committed
        assert one.tokens("a") == golden[target]


def test_a_load_that_fails_is_fenced_and_named_and_the_next_heals(
    one: Fleet, folders: dict[str, Path], golden: Golden
) -> None:
    """Traps 5, 6, 7: the decision stands, this replica is DIRTY, nobody is answered by a mix; the engine lives."""
    receipt = one.publish(folders["TB"])  # the third load
    assert receipt.committed
    (replica,) = receipt.replicas
    assert replica.state == "DIRTY" and replica.failure is not None
    assert "vllm.load.inside" in replica.failure.message and replica.replica_id == "a"
    assert one.weights("a") == ("DIRTY", 0)
    assert one.servers["a"].unanswered()
    # a new agent learns of it from the worker, and keeps the fence
    one.agents["a"].stop()
    assert one.servers["a"].unanswered()
    first = one.replica("a").incarnation
    one.agent("a")
    eventually(lambda: one.there("a") and one.replica("a").incarnation != first, 30, one.log("a"))
    eventually(lambda: one.weights("a") == ("DIRTY", 0), 10, "DIRTY still")
    assert "could not be loaded" in one.replica("a").failure.message, "why is not forgotten with the agent"
    assert one.servers["a"].unanswered()
    receipt = one.publish(folders["TB"])
    assert {r.state for r in receipt.replicas} == {"READY"}
    assert one.tokens("a") == golden["TB"] and one.servers["a"].label() == str(receipt.version)
    one.publish(folders["TA"])
    assert one.tokens("a") == golden["TA"]


def fenced(one: Fleet) -> None:
    assert one.weights("a") == ("DIRTY", 0)
    assert one.servers["a"].unanswered()


def test_in_place_a_load_that_fails_is_no_commit(one: Fleet, folders: dict[str, Path], golden: Golden) -> None:
    """Traps 5, 6, 7: finish fails, naming tensor and replica; the engine lives, fenced; the next is exact, in place."""
    assert {r.state for r in one.publish(folders["TB"], mode="in_place").replicas} == {"READY"}
    assert one.tokens("a") == golden["TB"]
    pid = one.servers["a"].process
    with pytest.raises(UpdateFailed) as failed:
        one.publish(folders["TA"], mode="in_place")
    failure = failed.value.failures["a"]
    assert "vllm.stream.inside" in failure.message and len(failure.tensors) == 1
    assert failure.tensors[0] in tensors_of(folders["TA"]) and failure.tensors[0] in failure.message
    eventually(lambda: one.weights("a") == ("DIRTY", 0), 10, "DIRTY")
    fenced(one)
    receipt = one.publish(folders["TA"], mode="in_place")
    assert {r.state for r in receipt.replicas} == {"READY"} and one.servers["a"].process is pid
    assert one.tokens("a") == golden["TA"] and one.servers["a"].label() == str(receipt.version)


def test_vllms_own_clients_are_refused_by_name(one: Fleet, folders: dict[str, Path], golden: Golden) -> None:
    """``is_checkpoint_format=False`` and other payloads of vLLM's own weight sync: an error, and nothing is harmed."""
    one.publish(folders["TB"])
    server = one.servers["a"]
    for info in ({"names": ["x"], "is_checkpoint_format": False}, {"do": "patch"}):
        server.post("/start_weight_update")
        with pytest.raises(urllib.error.HTTPError) as refused:
            server.post("/update_weights", {"update_info": info})
        assert refused.value.code in (400, 500)
    for path in ("/finish_weight_update",):
        with pytest.raises(urllib.error.HTTPError):
            server.post(path, {"weight_version": None})
    assert one.tokens("a") == golden["TB"]
    one.publish(folders["TA"])
    assert one.tokens("a") == golden["TA"]


def test_who_is_paused_by_hand_is_not_routed_to(one: Fleet, folders: dict[str, Path], golden: Golden) -> None:
    one.publish(folders["TA"])
    server = one.servers["a"]
    assert one.routable("a")
    server.post("/pause?mode=keep")
    eventually(lambda: not one.routable("a"), 10, "it is noticed")
    said = members.routable(one.plane.state(one.group), one.replica("a"))
    assert said == (True, False, False, "generation is paused by hand")
    server.post("/resume")
    eventually(lambda: one.routable("a"), 10, "it goes on")
    one.publish(folders["TB"])
    assert one.tokens("a") == golden["TB"] and one.routable("a")
    assert one.log("a").count("stands still, paused by hand") == 1


def asleep(one: Fleet) -> tuple[str, tuple[str, ...]]:
    r = one.replica("a")
    return str(r.admin), tuple(r.asleep)


def test_who_is_put_to_sleep_by_hand_is_asleep(one: Fleet, folders: dict[str, Path], golden: Golden) -> None:
    """Trap 13. Nobody told the agent: the workers do. No update, no router; woken by hand it is what it was."""
    before = one.publish(folders["TB"])
    server = one.servers["a"]
    server.post("/pause?mode=keep")  # vLLM says that this is sleep, too
    assert server.get("/is_sleeping")["is_sleeping"] is True
    time.sleep(1)
    assert asleep(one) == ("ACTIVE", ())
    server.post("/resume")
    server.post("/sleep?level=1&mode=keep")
    eventually(lambda: asleep(one) == ("ASLEEP", ("weights", "kv_cache")), 5, "it is noticed")
    assert one.weights("a") == ("READY", before.version) and not one.routable("a")
    for mode in ("staged", "in_place"):
        with pytest.raises(PublishError, match="ASLEEP"):
            one.publish(folders["TA"], mode=mode)
    server.post("/wake_up")
    eventually(lambda: asleep(one) == ("ACTIVE", ()) and one.routable("a"), 5, "it is noticed")
    assert one.tokens("a") == golden["TB"]
    one.publish(folders["TA"])
    assert one.tokens("a") == golden["TA"]


def test_weights_that_a_sleep_by_hand_dropped_are_never_served(
    one: Fleet, folders: dict[str, Path], golden: Golden
) -> None:
    """DIRTY from then on; vLLM itself refuses to go on with them, half awake it takes the publish that brings them."""
    one.publish(folders["TA"])
    server, orders = one.servers["a"], Orders(one.plane.address, one.group)
    server.post("/sleep?level=2")
    eventually(lambda: one.weights("a") == ("DIRTY", 0), 5, "it is noticed")
    assert asleep(one) == ("ASLEEP", ("weights", "kv_cache")) and not one.routable("a")
    assert "dropped by a sleep of level 2" in one.replica("a").failure.message
    with pytest.raises(urllib.error.HTTPError):
        server.post("/wake_up")
    server.post("/wake_up?tags=weights")
    eventually(lambda: asleep(one) == ("ACTIVE", ("kv_cache",)), 5, "it is noticed")
    with pytest.raises(urllib.error.HTTPError):
        server.post("/wake_up?tags=kv_cache")
    assert one.weights("a") == ("DIRTY", 0) and server.unanswered()
    assert {r.state for r in one.publish(folders["TB"]).replicas} == {"READY"}
    assert not one.routable("a") and server.unanswered()
    server.post("/wake_up")
    eventually(lambda: asleep(one) == ("ACTIVE", ()) and one.routable("a"), 5, "it is noticed")
    assert one.tokens("a") == golden["TB"]
    # put to sleep by order and woken by hand, and the other way round
    orders.sleep(1)
    server.post("/wake_up")
    eventually(lambda: asleep(one) == ("ACTIVE", ()) and one.routable("a"), 5, "it is noticed")
    server.post("/sleep?level=1")
    eventually(lambda: asleep(one)[0] == "ASLEEP", 5, "it is noticed")
    assert orders.wake().routable and one.tokens("a") == golden["TB"]


def test_it_sleeps_by_order_and_takes_an_update_before_its_cache_is_back(
    one: Fleet, folders: dict[str, Path], golden: Golden
) -> None:
    """sleep -> wake(weights) -> update -> wake(kv_cache): a request in flight stands still all along and loses nothing.

    On CPU vLLM obeys each order, as ``/is_sleeping`` says, and releases no memory: that it does is shown on a GPU.
    """
    version = one.publish(folders["TA"]).version
    server, orders = one.servers["a"], Orders(one.plane.address, one.group)
    made: list[int] = []
    flight = threading.Thread(target=lambda: made.extend(server.stream([1, 7], 600)))
    flight.start()
    eventually(lambda: made, 30, "tokens come")
    asleep = orders.sleep(1)
    assert asleep.admin == ASLEEP and list(asleep.asleep) == ["weights", "kv_cache"] and not asleep.routable
    assert asleep.held.version == version and server.get("/is_sleeping")["is_sleeping"] is True
    assert flight.is_alive() and server.unanswered()
    with pytest.raises(PublishError, match="ASLEEP"):
        one.publish(folders["TB"])
    half = orders.wake("weights")
    assert half.admin == ACTIVE and list(half.pause_holders) == ["sleep"] and server.unanswered()
    before = len(made)
    for mode in ("in_place", "staged"):
        assert {r.state for r in one.publish(folders["TB"], mode=mode).replicas} == {"READY"}
    assert len(made) == before and server.unanswered() and server.get("/is_sleeping")["is_sleeping"] is True
    awake = orders.wake("kv_cache")
    assert not awake.asleep and not awake.pause_holders and awake.routable
    assert one.tokens("a") == golden["TB"] and server.get("/is_sleeping")["is_sleeping"] is False
    flight.join(120)
    assert len(made) == 600, "the request lost tokens"


def test_weights_that_a_sleep_dropped_are_never_served(one: Fleet, folders: dict[str, Path], golden: Golden) -> None:
    """C08. Level 2: DIRTY and named from the order on, for a new agent too; only a full update lets it wake up."""
    one.publish(folders["TA"])
    server, orders = one.servers["a"], Orders(one.plane.address, one.group)
    asleep = orders.sleep(2)
    assert asleep.admin == ASLEEP and one.weights("a") == ("DIRTY", 0) and "dropped" in asleep.failure.message
    one.agents["a"].process.kill()
    one.agents["a"].process.wait(10)
    first = one.replica("a").incarnation
    one.agent("a")
    eventually(lambda: one.there("a") and one.replica("a").incarnation != first, 30, one.log("a"))
    eventually(lambda: one.weights("a") == ("DIRTY", 0), 10, "DIRTY still")
    assert one.replica("a").asleep == ("weights", "kv_cache") and server.unanswered()
    for tags in ((), ("kv_cache",)):
        with pytest.raises(grpc.RpcError) as refused:
            orders.wake(*tags)
        assert "weights" in why(refused.value)
    orders.wake("weights")
    with pytest.raises(grpc.RpcError) as refused:
        orders.wake("kv_cache")
    assert "dropped by a sleep of level 2" in why(refused.value) and "publish" in why(refused.value)
    assert server.unanswered()
    receipt = one.publish(folders["TB"])
    assert {r.state for r in receipt.replicas} == {"READY"} and server.unanswered()
    assert orders.wake().routable
    assert one.tokens("a") == golden["TB"] and server.label() == str(receipt.version)


def test_a_pause_outlives_a_sleep(one: Fleet, folders: dict[str, Path], golden: Golden) -> None:
    """vLLM generates as soon as it is awake: while an operator holds it paused the last step is refused by name."""
    one.publish(folders["TA"])
    orders = Orders(one.plane.address, one.group)
    orders.sleep(1)
    with orders.paused():
        with pytest.raises(grpc.RpcError) as refused:
            orders.wake()
        assert "operator paused it" in why(refused.value)
        assert one.servers["a"].unanswered()
    assert one.servers["a"].unanswered()
    assert orders.wake().routable and one.tokens("a") == golden["TA"]


def test_a_tied_pair_that_comes_as_two_is_refused(one: Fleet, folders: dict[str, Path], golden: Golden) -> None:
    """A pair that the engine ties must not come as two tensors: the loader would drop one in silence."""
    before = one.publish(folders["TA"])
    tensors = tensors_of(folders["TB"])
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone() * 2
    with pytest.raises(UpdateFailed) as failed:
        one.publish(tensors)
    assert "lm_head.weight" in str(failed.value) and "tied" in str(failed.value)
    assert one.weights("a") == ("READY", before.version) and one.tokens("a") == golden["TA"]
