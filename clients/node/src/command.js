// What the three commands share: arguments, where the control plane is and who we are, errors in one line.

import { readFileSync } from "node:fs";
import { parseArgs } from "node:util";
import { grpc, reasonOf } from "./contract.js";

const CODES = Object.fromEntries(Object.entries(grpc.status).map(([name, number]) => [number, name]));

function read(path) {
  if (!path) return undefined;
  try {
    return readFileSync(path);
  } catch (error) {
    return fail(error.message, 2);
  }
}

/** The command line's values; address, TLS files and token also from WEIGHTPLANE_ADDRESS, _CA, _CERT, _KEY, _TOKEN. */
export function options(names, usage) {
  const env = process.env;
  const known = Object.fromEntries(["address", "group", ...names].map((n) => [n, { type: n === "takeover" ? "boolean" : "string" }]));
  let values;
  try {
    ({ values } = parseArgs({ options: known }));
  } catch (error) {
    fail(`${error.message}\nusage: ${usage}`, 2);
  }
  const missing = ["group", ...names.filter((n) => usage.includes(` --${n} `))].filter((n) => values[n] === undefined);
  if (missing.length) fail(`--${missing[0]} is missing\nusage: ${usage}`, 2);
  const tls = { ca: read(env.WEIGHTPLANE_CA), cert: read(env.WEIGHTPLANE_CERT), key: read(env.WEIGHTPLANE_KEY) };
  return { address: values.address || env.WEIGHTPLANE_ADDRESS || "127.0.0.1:7450", tls, token: env.WEIGHTPLANE_TOKEN || "", values };
}

/** Say what went wrong and end: 3 if nobody answers, 4 if it was refused, 5 if an update was aborted. */
export function fail(text, code) {
  process.stderr.write(`${text}\n`);
  process.exit(code);
}

/** The same for an error. */
export function failWith(error) {
  if (error?.update || error?.name === "UpdateFailed") fail(`the update was aborted: ${error.message}`, 5);
  if (error?.code === grpc.status.UNAVAILABLE) fail(`no control plane answers: ${error.details}`, 3);
  if (typeof error?.code === "number") {
    const reason = reasonOf(error);
    fail(`${CODES[error.code]}${reason ? ` (${reason})` : ""}: ${error.details}`, error.code === grpc.status.ABORTED ? 5 : 4);
  }
  fail(String(error?.message ?? error), 2);
}
