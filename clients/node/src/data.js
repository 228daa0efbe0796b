// The data of the `grpc` transport: one stream of TensorService to each receiver, chunks of at most 2 MiB.

import { setTimeout as sleep } from "node:timers/promises";
import { connect, grpc, v1 } from "./contract.js";

const CHUNK = 2 << 20;
const RETRY_MS = 50; // while the receiver has not opened the channel yet

/** One receiver's stream for one update. */
export class Stream {
  /** `tls`: the certificate and key that a data port may ask for. */
  constructor(binding, receiver, opening, { cert, key } = {}) {
    const { address, ca_pem: ca } = binding.offers[receiver].grpc;
    this.receiver = receiver;
    this.key = binding.key;
    this.opening = opening;
    this.acknowledged = new Set();
    this.waiting = [];
    this.failure = null;
    this.full = false; // of what the receiver has not taken yet
    const options = { "grpc.max_send_message_length": 4 << 20 };
    this.client = connect(v1.TensorService, address, ca.length ? { ca, cert, key } : {}, options);
  }

  /** Open, again and again while the receiver says NOT_FOUND. */
  async open(deadline) {
    for (;;) {
      try {
        await this.#try();
        return;
      } catch (error) {
        if (error.code !== grpc.status.NOT_FOUND || this.failure || Date.now() > deadline) throw error;
        await sleep(RETRY_MS);
      }
    }
  }

  #try() {
    const metadata = new grpc.Metadata();
    metadata.set("weightplane-channel-key-bin", this.key);
    this.call = this.client.Transfer(metadata);
    this.call.on("drain", () => {
      this.full = false;
      this.#wake();
    });
    return new Promise((resolve, reject) => {
      let opened = false;
      this.call.on("data", (answer) => {
        if (answer.bucket < 0) {
          opened = true;
          resolve();
        } else this.acknowledged.add(answer.bucket);
        this.#wake();
      });
      const ended = (error) => {
        if (opened) this.failure ??= error;
        reject(error);
        this.#wake();
      };
      this.call.on("error", ended);
      this.call.on("end", () => ended(new Error(`${this.receiver} ended its stream`)));
      this.call.write({ open: { ...this.opening, receiver: this.receiver } });
    });
  }

  #wake() {
    for (const wake of this.waiting.splice(0)) wake();
  }

  async #until(condition) {
    while (!condition()) {
      if (this.failure) throw this.failure;
      await new Promise((resolve) => this.waiting.push(resolve));
    }
  }

  /** Send a bucket's bytes, which `parts` hold in order; waits while the receiver holds us back. */
  async send(bucket, parts) {
    let offset = 0;
    for (const part of parts) {
      for (let at = 0; at < part.length; at += CHUNK) {
        if (this.failure) throw this.failure;
        const data = part.subarray(at, Math.min(at + CHUNK, part.length));
        this.full = !this.call.write({ bucket, offset: String(offset), data });
        offset += data.length;
        await this.#until(() => !this.full); // an acknowledgement alone is no reason to go on
      }
    }
  }

  /** Wait until the receiver has every one of these buckets. */
  async flush(buckets) {
    await this.#until(() => buckets.every((b) => this.acknowledged.has(b)));
  }

  /** End it at once; whoever waits on it hears `error`. */
  abort(error) {
    this.failure ??= error;
    this.call?.on("error", () => {});
    this.call?.cancel();
    this.#wake();
    this.client.close();
  }
}
