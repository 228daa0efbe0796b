// The contract's clients, loaded from the .proto files: no generated code, 64-bit numbers as strings.

import { existsSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";
import protobuf from "protobufjs";
import { dialled } from "./address.js";
import { Misuse } from "./misuse.js";

const PROTO = process.env.WEIGHTPLANE_PROTO || join(dirname(fileURLToPath(import.meta.url)), "..", "..", "..", "proto");
const FILES = ["agent", "fleet", "transport", "weight_transfer"].map((name) => `weightplane/v1/${name}.proto`);

if (!existsSync(join(PROTO, FILES[0]))) {
  throw new Error(`no ${FILES[0]} under ${PROTO}: set WEIGHTPLANE_PROTO to the repository's proto folder`);
}

const loaded = loader.loadSync(FILES, {
  includeDirs: [PROTO],
  keepCase: true, // the contract's own names
  longs: String, // the constructor, not its name: a JavaScript number holds 53 bits
  enums: String,
  defaults: true,
  oneofs: true,
});

/** The services: `new v1.FleetService(address, credentials)`. */
export const v1 = grpc.loadPackageDefinition(loaded).weightplane.v1;

// What an error's trailer holds, the part of google/rpc that we read.
const rpc = protobuf.parse(`
  syntax = "proto3"; package google.rpc;
  message Any { string type_url = 1; bytes value = 2; }
  message Status { int32 code = 1; string message = 2; repeated Any details = 3; }
  message ErrorInfo { string reason = 1; string domain = 2; map<string, string> metadata = 3; }
`, { keepCase: true }).root;

/** The reason in an error of ours ("REBIND_REQUIRED"), or "" for an error of gRPC's own. */
export function reasonOf(error) {
  const trailer = error?.metadata?.get?.("grpc-status-details-bin")?.[0];
  if (!Buffer.isBuffer(trailer)) return "";
  const status = rpc.lookupType("google.rpc.Status").decode(trailer);
  for (const detail of status.details) {
    if (detail.type_url.endsWith("/google.rpc.ErrorInfo")) {
      return rpc.lookupType("google.rpc.ErrorInfo").decode(detail.value).reason;
    }
  }
  return "";
}

/** A client of a service. TLS from PEM buffers where there is a `ca`; else plaintext, to this machine alone unless
 * WEIGHTPLANE_INSECURE=1. Throws a `Misuse` for an address or files that cannot be used. */
export function connect(Service, address, { ca, cert, key } = {}, options = {}) {
  dialled(address, ca);
  if (!ca) return new Service(address, grpc.credentials.createInsecure(), options);
  try {
    return new Service(address, grpc.credentials.createSsl(ca, key, cert), options);
  } catch (error) {
    throw new Misuse(`the PEM files for TLS cannot be used: ${error.message}`);
  }
}

/** Metadata for a call: the bearer token, if there is one. */
export function metadata(token) {
  const made = new grpc.Metadata();
  if (token) made.set("authorization", `Bearer ${token}`);
  return made;
}

/** A unary call as a promise; `under` holds it, to be cancelled, while it lasts. Every call has a deadline: the server
 * refuses those without. */
export function call(client, method, request, { timeoutMs = 30_000, token = "", under = new Set() } = {}) {
  return new Promise((resolve, reject) => {
    const options = { deadline: Date.now() + timeoutMs };
    const made = client[method](request, metadata(token), options, (error, answer) => {
      under.delete(made);
      if (error) reject(error);
      else resolve(answer);
    });
    under.add(made);
  });
}

export { grpc };
