#!/usr/bin/env node
// Follow a group: a line whenever what it committed, or one of its replicas, changed. Until Ctrl-C, or N lines.

import { EXIT, failWith, options, whole } from "../src/command.js";
import { connect, metadata, v1 } from "../src/contract.js";

const usage = "watch.js [--address HOST:PORT] --group GROUP [--lines N]";
const { values, address, tls, token } = options(["lines"], usage);

function follow() {
  let left = values.lines === undefined ? Infinity : Number(whole("lines", values.lines, 1n));
  const client = connect(v1.FleetService, address, tls);
  const stream = client.WatchGroup({ group: values.group }, metadata(token));
  stream.on("data", (change) => {
    const committed = change.group ? { version: change.group.committed.version } : {};
    const replicas = change.replicas.map((r) => ({ id: r.replica_id, version: r.held.version, routable: r.routable }));
    console.log(JSON.stringify({ revision: change.revision, ...committed, replicas, removed: change.removed }));
    if (--left <= 0) process.exit(0);
  });
  stream.on("error", failWith);
  stream.on("end", () => process.exit(0));
}

for (const signal of ["SIGINT", "SIGTERM"]) process.once(signal, () => process.exit(EXIT.interrupted));
try {
  follow();
} catch (error) {
  failWith(error);
}
