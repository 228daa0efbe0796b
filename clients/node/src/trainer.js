// A trainer of one rank: the four phases, its lease, and what it does when an update is aborted.

import { randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import { call, connect, grpc, metadata, reasonOf, v1 } from "./contract.js";
import { Stream } from "./data.js";
import { digest } from "./digest.js";
import { aborted, Interrupted, OutcomeUnknown, UpdateFailed } from "./failures.js";
import { hostId } from "./host.js";
import { manifestId, slice } from "./model.js";
import { fetchPlan } from "./plan.js";

const MEMBER = "rank/0";
const PAGE = 4000; // tensors or digests of one call: gRPC's messages end at 4 MB
const ROUNDS = 4; // of binding again, should replicas come and go meanwhile
const CALL_MS = 30_000;
const TIDY_MS = 10_000;
const MARGIN_MS = 2000; // by which FinishUpdate is waited for longer than the update lives
const GRACE_MS = 5000; // then, for the outcome; with short tries of what tidies up, 10 s in all
const SHORT_MS = 1000; // for a call to a control plane that answered nothing before
const RETRY_MS = 200;
const WORD_MS = 1000;
const FENCED = "another trainer took the group over: stop, and do not init again";
const UNKNOWN = new Set([grpc.status.UNAVAILABLE, grpc.status.DEADLINE_EXCEEDED, grpc.status.CANCELLED]);
const OVER = new Set(["UPDATE_PHASE_ABORTING", "UPDATE_PHASE_ABORTED"]);

/** One at a time: `await init()`, then `publish` as often as you like, then `close()`. */
export class Trainer {
  constructor({ address, group, trainerId = "node", tls = {}, token = "", takeover = false }) {
    this.group = group;
    this.trainerId = trainerId;
    this.takeover = takeover;
    this.token = token;
    this.incarnation = randomUUID();
    this.generation = "0";
    this.tls = tls;
    this.client = connect(v1.WeightTransferService, address, tls);
    this.known = new Set();
    this.calls = new Set(); // that are under way
    this.stopped = null; // why, once `stop` was called
    this.closed = false;
    this.gone = false; // the control plane: a call had no answer
    this.update = null; // the one that is open: {requestId, opening, id, streams, failure, finishing, asked}
  }

  /** One call. While nobody answers it is made again with the same request_id, so that it is carried out once. Ends at
   * once when we are stopped, or the open update failed. */
  async #call(method, fields, timeoutMs = CALL_MS) {
    const request = { request_id: randomUUID(), group: this.group, generation: this.generation, ...fields };
    const end = Date.now() + timeoutMs;
    const ended = () => this.stopped ?? this.update?.failure;
    for (;;) {
      if (ended()) throw ended();
      try {
        return await call(this.client, method, request, { timeoutMs: end - Date.now(), token: this.token, under: this.calls });
      } catch (error) {
        if (ended()) throw ended();
        const unanswered = error.code === grpc.status.UNAVAILABLE; // also where one answers that does not lead
        if (!unanswered || this.generation === "0" || Date.now() + RETRY_MS > end) throw error;
        await sleep(RETRY_MS);
      }
    }
  }

  /** A call that tidies up: also once we have failed. One short try where nobody answered before. */
  async #tidy(method, fields) {
    const request = { request_id: randomUUID(), group: this.group, generation: this.generation, ...fields };
    try {
      return await call(this.client, method, request, { timeoutMs: this.gone ? SHORT_MS : TIDY_MS, token: this.token });
    } catch (error) {
      if (!reasonOf(error)) this.gone = true;
      throw error;
    }
  }

  /** Phase 1: take the hold on the group, or bind again under it. */
  async init() {
    const answer = await this.#call("InitTransfer", {
      trainer_id: this.trainerId,
      incarnation: this.incarnation,
      world_size: 1,
      takeover: this.takeover && this.generation === "0",
      host_id: hostId(),
      offers: [{ transport: "grpc", grpc: {} }],
      transport: "grpc",
    });
    this.channels = new Map(answer.channels.map((c) => [c.channel_id, c]));
    if (answer.generation !== this.generation) {
      this.generation = answer.generation;
      this.known.clear();
      await this.#hold();
    }
    return answer;
  }

  /** The lease: a stream that lives as long as we do, and tells what becomes of updates. Resolves once it is held, or
   * has failed. One that breaks is opened again; what an open update waits for is told by its calls. */
  #hold() {
    this.watch?.cancel();
    const watch = this.client.WatchUpdate({ group: this.group, generation: this.generation }, metadata(this.token));
    this.watch = watch;
    watch.on("data", ({ update, fenced }) => {
      if (fenced) this.#fail(new UpdateFailed(FENCED));
      else if (update && update.request_id === this.update?.requestId && OVER.has(update.phase)) this.#fail(aborted(update));
    });
    const again = (error) => {
      if (this.watch !== watch) return;
      this.watch = null;
      if (reasonOf(error) === "TRAINER_FENCED") this.#fail(new UpdateFailed(FENCED));
      else if (!this.closed) setTimeout(() => !this.closed && !this.watch && this.#hold(), RETRY_MS).unref();
    };
    watch.on("error", again);
    watch.on("end", again);
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, CALL_MS);
      for (const event of ["data", "error", "end"]) watch.once(event, () => (clearTimeout(timer), resolve()));
    });
  }

  /** Our side of an abort: every stream ends, whatever waits on one hears why. */
  #fail(error) {
    const update = this.update;
    if (!update || update.failure) return;
    update.failure = error;
    for (const stream of update.streams) stream.abort(error);
    for (const made of this.calls) made.cancel();
  }

  /** Send the manifest and say that we hold all of it, once. */
  async #announce(tensors, id) {
    if (this.known.has(id)) return;
    const metas = tensors.map(({ name, dtype, shape }) => ({ name, dtype, shape: shape.map(String) }));
    for (let first = 0; first === 0 || first < metas.length; first += PAGE) {
      const page = { manifest_id: id, first, total: metas.length, tensors: metas.slice(first, first + PAGE) };
      if ((await this.#call("PutManifest", page)).complete) break;
    }
    await this.#call("PutPlacement", { manifest_id: id, placement: { member: MEMBER, full: true } });
    this.known.add(id);
  }

  /** Phases 2 to 4. Resolves to the committed update with `bytes` and `seconds`; throws `UpdateFailed`, `OutcomeUnknown`,
   * or an error of gRPC's whose `reasonOf` says why the update was never opened. */
  async publish(tensors, step, { timeoutMs = 120_000 } = {}) {
    const began = performance.now();
    const id = manifestId(tensors);
    this.update = { requestId: randomUUID(), streams: [], failure: null, opening: false, finishing: false, asked: false };
    this.gone = false;
    try {
      const started = await this.#start(tensors, id, step, timeoutMs);
      const deadline = Date.now() + Number(started.remaining_ms);
      const bytes = await this.#send(tensors, started);
      const named = this.#named(started);
      const update = await this.#finish(named, deadline);
      return { ...update, bytes, seconds: (performance.now() - began) / 1000 };
    } catch (error) {
      const failed = await this.#cause(error);
      this.#fail(failed);
      let update = this.update.opening ? await this.#abort(failed) : null;
      if (this.update.finishing && !settled(failed)) {
        if (!decided(update) && !this.update.asked) update = await this.#outcome(Date.now() + (this.gone ? SHORT_MS : GRACE_MS));
        if (!decided(update)) throw this.#unknown(failed);
        if (OVER.has(update.phase) && !["Interrupted", "UpdateFailed"].includes(failed.name)) throw aborted(update);
      }
      if (update?.phase !== "UPDATE_PHASE_COMMITTED") throw failed;
      return { ...update, bytes: 0, seconds: (performance.now() - began) / 1000 }; // decided before: that counts
    } finally {
      for (const stream of this.update.streams) stream.abort(new Error("the update is over"));
      this.update = null;
    }
  }

  /** Why it failed: a peer that leaves has mostly told the coordinator why, whose word is waited for, but not long. */
  async #cause(error) {
    for (const end = Date.now() + WORD_MS; this.update.id && !this.update.failure && Date.now() < end; ) await sleep(20);
    return this.update.failure ?? error;
  }

  async #start(tensors, id, step, timeoutMs) {
    const request = { request_id: this.update.requestId, manifest_id: id, trainer_step: String(step) };
    for (let round = 1; ; round++) {
      try {
        await this.#announce(tensors, id);
        this.update.opening = true;
        const started = await this.#call("StartUpdate", { ...request, update_timeout_ms: String(timeoutMs) }, timeoutMs);
        this.update.id = started.update_id;
        return started;
      } catch (error) {
        const reason = reasonOf(error);
        if (reason) this.update.opening = false; // refused, or over by now
        if (round === ROUNDS || !["REBIND_REQUIRED", "UNKNOWN_MANIFEST"].includes(reason)) throw error;
        this.known.delete(id);
        if (reason === "REBIND_REQUIRED") await this.init();
      }
    }
  }

  /** The update as it was decided. An answer that is lost means unknown, so then it is asked for. */
  async #finish(named, deadline) {
    this.update.finishing = true;
    try {
      return (await this.#call("FinishUpdate", named, deadline + MARGIN_MS - Date.now())).update;
    } catch (error) {
      if (!UNKNOWN.has(error.code) || this.update.failure) throw error;
      const update = await this.#outcome(deadline + MARGIN_MS + GRACE_MS);
      if (!update) throw error;
      if (OVER.has(update.phase)) throw aborted(update);
      return update;
    }
  }

  /** What became of the update; null if nobody says it until `end`. */
  async #outcome(end) {
    this.update.asked = true;
    for (;;) {
      const options = { timeoutMs: Math.max(SHORT_MS, end - Date.now()), token: this.token };
      try {
        const { update } = await call(this.client, "GetUpdate", { group: this.group, update_id: this.update.id }, options);
        this.gone = false;
        if (decided(update)) return update;
      } catch (error) {
        // It knows of no such update, say: one with another store. (One that stands by knows nothing yet.)
        if (reasonOf(error) && error.code !== grpc.status.UNAVAILABLE) return null;
        this.gone = true;
      }
      if (Date.now() + RETRY_MS > end) return null;
      await sleep(RETRY_MS);
    }
  }

  #unknown(error) {
    const why = error.details ?? error.message;
    const tells = `\`weightplane updates -g ${this.group}\` tells once a control plane answers`;
    const failure = new OutcomeUnknown(`whether update ${this.update.id} committed is not known: ${why}; ${tells}`);
    failure.updateId = this.update.id;
    return failure;
  }

  #named(started) {
    return { update_id: started.update_id, epoch: started.epoch };
  }

  /** Everything: replicas that stage first, for those in place are armed once all of them have voted. */
  async #send(tensors, started) {
    const inPlace = started.channels.filter((c) => c.mode === "MODE_IN_PLACE");
    const rounds = [started.channels.filter((c) => !inPlace.includes(c)), inPlace].filter((r) => r.length);
    let sent = 0;
    for (const [n, channels] of rounds.entries()) {
      const buckets = rounds.length > 1 ? channels.map((c) => ({ channel_id: c.channel_id })) : []; // none: all
      sent += await this.#round(tensors, started, String(n + 1), channels, buckets);
    }
    return sent;
  }

  /** Declare these channels, then move their bytes; digests follow each. */
  async #round(tensors, started, seq, channels, buckets) {
    const deadline = Date.now() + Number(started.remaining_ms);
    const named = this.#named(started);
    let sent = 0;
    const armed = await this.#call("UpdateWeights", { ...named, seq, buckets }, Number(started.remaining_ms));
    for (const channel of channels) {
      const fetch = async (page) => (await this.#call("GetPlan", { plan_id: channel.plan_id, page })).page;
      const plan = await fetchPlan(fetch);
      const binding = this.channels.get(channel.channel_id);
      const left = armed.excluded_channels.includes(channel.channel_id); // nobody receives by it any more
      const mine = left ? [] : plan.buckets.filter((b) => b.sender === MEMBER);
      const opening = { ...named, channel_id: channel.channel_id, generation: this.generation, sender: MEMBER };
      const streams = new Map();
      for (const receiver of new Set(mine.flatMap((b) => b.receivers))) {
        const stream = new Stream(binding, receiver, opening, this.tls);
        streams.set(receiver, stream);
        this.update.streams.push(stream);
        await stream.open(deadline);
        if (this.update.failure) throw this.update.failure;
      }
      const bytes = plan.regions.map((r) => (r.sender === MEMBER ? region(tensors, r) : null));
      for (const b of mine) {
        const parts = b.segments.map((s) => bytes[s.region].subarray(s.offset, s.offset + s.nbytes));
        await Promise.all(b.receivers.map((r) => streams.get(r).send(b.index, parts)));
        sent += parts.reduce((n, p) => n + p.length, 0);
      }
      for (const [receiver, stream] of streams) {
        await stream.flush(mine.filter((b) => b.receivers.includes(receiver)).map((b) => b.index));
      }
      await this.#digests(named, channel.plan_id, bytes.filter((b) => b !== null));
    }
    return sent;
  }

  async #digests(named, planId, pieces) {
    const all = pieces.map((p) => digest(p).toString());
    for (let first = 0; first === 0 || first < all.length; first += PAGE) {
      const page = { plan_id: planId, first, total: all.length, digests: all.slice(first, first + PAGE) };
      await this.#call("PutDigests", { ...named, ...page });
    }
  }

  /** Give the open update up; what became of it. What fails here is no news: the coordinator ends it by its deadline. */
  async #abort(error) {
    const reason = String(error.message ?? error).slice(0, 500);
    const answer = await this.#tidy("AbortUpdate", { update_id: this.update.id ?? "", reason }).catch(() => null);
    return answer?.update;
  }

  /** End whatever we do, and abort what is open: from a signal handler, say. Only `close` goes on. */
  stop(reason) {
    this.stopped ??= new Interrupted(reason);
    this.#fail(this.stopped);
    for (const made of this.calls) made.cancel();
  }

  /** Give up the hold. */
  async close() {
    const watch = this.watch;
    this.closed = true;
    this.watch = null;
    try {
      if (this.generation !== "0") await this.#tidy("CloseTransfer", {});
    } finally {
      watch?.cancel();
      this.client.close();
    }
  }
}

function region(tensors, r) {
  const tensor = tensors[r.tensor];
  return r.box.length ? slice(tensor, r.box) : tensor.bytes;
}

const decided = (update) => update?.phase === "UPDATE_PHASE_COMMITTED" || OVER.has(update?.phase);

/** Whether the control plane said that the update does not commit. What these codes say may answer a repeat, after a first
 * call that was carried out. */
function settled(error) {
  const { NOT_FOUND, UNAVAILABLE, UNKNOWN: unknown } = grpc.status;
  if (error.update) return true;
  const reason = reasonOf(error);
  return reason !== "" && reason !== "TRAINER_FENCED" && ![NOT_FOUND, UNAVAILABLE, unknown].includes(error.code);
}
