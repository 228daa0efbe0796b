// host:port of a control plane or a data port, and whether plaintext may go there.

import { isIPv4, isIPv6 } from "node:net";
import { Misuse } from "./misuse.js";

/** `address`, which may be dialled. Throws a `Misuse` for one that names no host and port (gRPC would guess), and for one
 * on another machine without TLS: tokens and weights would be readable on the way. */
export function dialled(address, tls) {
  if (address.startsWith("unix:")) return address;
  const [, host, port] = /^(.+):(\d{1,5})$/.exec(address) ?? [];
  const inner = host?.replace(/^\[(.*)\]$/, "$1");
  const bare = inner?.includes(":") && inner === host; // an IPv6 address stands in brackets
  if (!host || bare || Number(port) < 1 || Number(port) > 65_535) {
    throw new Misuse(`address: expected host:port with a port from 1 to 65535, found '${address}'`);
  }
  const loopback = inner === "localhost" || (isIPv4(inner) && inner.startsWith("127.")) || (isIPv6(inner) && inner === "::1");
  if (!tls && !loopback && process.env.WEIGHTPLANE_INSECURE !== "1") {
    throw new Misuse(
      `${address} is not this machine's, and no authority is given (WEIGHTPLANE_CA): set WEIGHTPLANE_INSECURE=1 where the ` +
        "network between is trusted with plaintext",
    );
  }
  return address;
}
