#!/usr/bin/env node
// Follow a group: a line whenever what it committed, or one of its replicas, changed. Until Ctrl-C, or N lines.

import { failWith, options } from "../src/command.js";
import { credentials, metadata, v1 } from "../src/contract.js";

const usage = "watch.js [--address HOST:PORT] --group GROUP [--lines N]";
const { values, address, tls, token } = options(["lines"], usage);

let left = Number(values.lines ?? Infinity);
const client = new v1.FleetService(address, credentials(tls));
const stream = client.WatchGroup({ group: values.group }, metadata(token));
stream.on("data", (change) => {
  const committed = change.group ? { version: change.group.committed.version } : {};
  const replicas = change.replicas.map((r) => ({ id: r.replica_id, version: r.held.version, routable: r.routable }));
  console.log(JSON.stringify({ revision: change.revision, ...committed, replicas, removed: change.removed }));
  if (--left <= 0) process.exit(0);
});
stream.on("error", failWith);
stream.on("end", () => process.exit(0));
