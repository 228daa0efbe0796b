// What the three commands share: arguments, where the control plane is and who we are, errors in one line, exit statuses.

import { readFileSync } from "node:fs";
import { parseArgs } from "node:util";
import { grpc, reasonOf } from "./contract.js";
import { Misuse } from "./misuse.js";

const CODES = Object.fromEntries(Object.entries(grpc.status).map(([name, number]) => [number, name]));

/** Exit statuses, those of the command `weightplane` (docs/cli.md). */
export const EXIT = Object.freeze({
  unexpected: 1,
  usage: 2,
  unreachable: 3,
  refused: 4,
  failed: 5,
  unknown: 6,
  notFound: 7,
  denied: 8,
  interrupted: 130,
});

function read(path) {
  if (!path) return undefined;
  try {
    return readFileSync(path);
  } catch (error) {
    return fail(error.message, EXIT.usage);
  }
}

/** The command line's values; address, group, TLS files and token also from WEIGHTPLANE_ADDRESS, _GROUP, _CA, _CERT, _KEY
 * and _TOKEN. */
export function options(names, usage) {
  const env = process.env;
  const known = Object.fromEntries(["address", "group", ...names].map((n) => [n, { type: n === "takeover" ? "boolean" : "string" }]));
  let values;
  try {
    ({ values } = parseArgs({ options: { ...known, help: { type: "boolean", short: "h" } } }));
  } catch (error) {
    fail(`${error.message}\nusage: ${usage}`, EXIT.usage);
  }
  if (values.help) {
    console.log(`usage: ${usage}`);
    process.exit(0);
  }
  values.group ??= env.WEIGHTPLANE_GROUP;
  const missing = ["group", ...names.filter((n) => usage.includes(` --${n} `))].filter((n) => !values[n]);
  if (missing.length) fail(`--${missing[0]} is missing\nusage: ${usage}`, EXIT.usage);
  const tls = { ca: read(env.WEIGHTPLANE_CA), cert: read(env.WEIGHTPLANE_CERT), key: read(env.WEIGHTPLANE_KEY) };
  if (!tls.cert !== !tls.key) fail("WEIGHTPLANE_CERT and WEIGHTPLANE_KEY come together", EXIT.usage);
  if (tls.cert && !tls.ca) fail("WEIGHTPLANE_CERT is shown over TLS, which WEIGHTPLANE_CA turns on", EXIT.usage);
  return { address: values.address ?? (env.WEIGHTPLANE_ADDRESS || "127.0.0.1:7450"), tls, token: env.WEIGHTPLANE_TOKEN || "", values };
}

/** An option's whole number from `least`, as text: a JavaScript number ends at 53 bits. */
export function whole(name, text, least = 0n) {
  const value = /^\d{1,19}$/.test(text) ? BigInt(text) : -1n;
  if (value < least || value >= 2n ** 63n) throw new Misuse(`--${name}: expected a whole number from ${least}, found '${text}'`);
  return String(value);
}

/** Say what went wrong and end. */
export function fail(text, code) {
  process.stderr.write(`${text}\n`);
  process.exit(code);
}

function statusOf({ code }, reason) {
  const { status } = grpc;
  if (code === status.INVALID_ARGUMENT) return EXIT.usage;
  if (code === status.UNAVAILABLE) return EXIT.unreachable;
  if (code === status.NOT_FOUND) return EXIT.notFound;
  if (code === status.UNAUTHENTICATED) return EXIT.denied;
  if (code === status.PERMISSION_DENIED) return reason === "TRAINER_FENCED" ? EXIT.failed : EXIT.denied;
  if (code === status.ABORTED || (code === status.DEADLINE_EXCEEDED && reason)) return EXIT.failed;
  if ([status.DEADLINE_EXCEEDED, status.CANCELLED, status.UNKNOWN].includes(code)) return EXIT.unknown;
  return EXIT.refused;
}

/** The same for an error. */
export function failWith(error) {
  if (error?.name === "Interrupted") fail(error.message, EXIT.interrupted);
  if (error?.name === "UpdateFailed") fail(`the update was aborted: ${error.message}`, EXIT.failed);
  if (error?.name === "OutcomeUnknown") fail(`the outcome is unknown: UNKNOWN_OUTCOME: ${error.message}`, EXIT.unknown);
  if (error instanceof Misuse) fail(error.message, EXIT.usage);
  if (typeof error?.code !== "number") fail(`unexpected: ${error?.stack ?? error}`, EXIT.unexpected);
  const reason = reasonOf(error);
  const code = statusOf(error, reason);
  if (code === EXIT.unreachable && !reason) fail(`no control plane answers: ${error.details}`, code);
  const unknown = code === EXIT.unknown ? "the outcome is unknown: " : "";
  fail(`${unknown}${CODES[error.code]}${reason ? ` (${reason})` : ""}: ${error.details}`, code);
}
