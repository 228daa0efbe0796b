// The contract's clients, loaded from the .proto files: no generated code, 64-bit numbers as strings.

import { existsSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";
import protobuf from "protobufjs";

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

/** Plaintext (loopback alone), or TLS from PEM buffers; with `token` a bearer token in each call's metadata. */
export function credentials({ ca, cert, key } = {}) {
  return ca ? grpc.credentials.createSsl(ca, key, cert) : grpc.credentials.createInsecure();
}

/** Metadata for a call: the bearer token, if there is one. */
export function metadata(token) {
  const made = new grpc.Metadata();
  if (token) made.set("authorization", `Bearer ${token}`);
  return made;
}

/** A unary call as a promise. Every call has a deadline: the server refuses those without. */
export function call(client, method, request, { timeoutMs = 30_000, token = "" } = {}) {
  return new Promise((resolve, reject) => {
    const options = { deadline: Date.now() + timeoutMs };
    client[method](request, metadata(token), options, (error, answer) => (error ? reject(error) : resolve(answer)));
  });
}

export { grpc };
