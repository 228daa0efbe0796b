#!/usr/bin/env node
// Publish a safetensors file to a group: init, start, update, finish.

import { EXIT, failWith, options, whole } from "../src/command.js";
import { readSafetensors } from "../src/safetensors.js";
import { Trainer } from "../src/trainer.js";

const usage = "publish.js [--address HOST:PORT] --group GROUP --file model.safetensors [--step N] [--timeout SECONDS] [--takeover]";
const { values, ...where } = options(["file", "step", "timeout", "takeover"], usage);

let trainer;
for (const signal of ["SIGINT", "SIGTERM"]) {
  process.once(signal, () => (trainer ? trainer.stop(`${signal}: ended by its user`) : process.exit(EXIT.interrupted)));
}
try {
  const step = whole("step", values.step ?? "1");
  const timeoutMs = Math.min(1000 * Number(whole("timeout", values.timeout ?? "120", 1n)), 1e9);
  const tensors = readSafetensors(values.file);
  trainer = new Trainer({ ...where, group: values.group, takeover: values.takeover ?? false });
  await trainer.init();
  const done = await trainer.publish(tensors, step, { timeoutMs });
  await trainer.close();
  const { version, update_id, bytes, seconds } = done;
  const replicas = Object.fromEntries(done.outcomes.map((o) => [o.replica_id, o.state.replace("WEIGHTS_STATE_", "")]));
  const absent = Object.fromEntries((done.absent ?? []).map((a) => [a.replica_id, a.reason]));
  console.log(JSON.stringify({ version, update_id, bytes, seconds, replicas, absent }));
  process.exit(0);
} catch (error) {
  await trainer?.close().catch(() => {}); // the first error is the one to tell
  failWith(error);
}
