#!/usr/bin/env node
// Take a replica out of rotation and out of updates.

import { randomUUID } from "node:crypto";
import { failWith, options } from "../src/command.js";
import { call, connect, v1 } from "../src/contract.js";

const usage = "drain.js [--address HOST:PORT] --group GROUP --replica ID";
const { values, address, tls, token } = options(["replica"], usage);

try {
  const client = connect(v1.FleetService, address, tls);
  const request = { group: values.group, replica_id: values.replica, request_id: randomUUID() };
  const { replica } = await call(client, "DrainReplica", request, { token });
  console.log(JSON.stringify({ id: replica.replica_id, admin: replica.admin.replace("ADMIN_STATE_", "") }));
  process.exit(0);
} catch (error) {
  failWith(error);
}
