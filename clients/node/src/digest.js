// wpd1: XXH3-64 of the little-endian XXH3-64s of leaves of 128 KiB (the last padded with zeros to 1 KiB) and of the size.

import { createXXHash3 } from "hash-wasm";

const LEAF = 131_072;
const BLOCK = 1024;

const xxh3 = await createXXHash3(0, 0);

function hash(bytes) {
  return BigInt(`0x${xxh3.init().update(bytes).digest("hex")}`);
}

/** The digest of a piece's row-major bytes, as a BigInt of 64 bits. */
export function digest(bytes) {
  const n = bytes.length;
  const leaves = Math.ceil(n / LEAF);
  const all = Buffer.alloc(8 * (leaves + 1));
  for (let j = 0; j < leaves; j++) {
    let leaf = bytes.subarray(j * LEAF, Math.min((j + 1) * LEAF, n));
    if (leaf.length % BLOCK) {
      const padded = Buffer.alloc(Math.ceil(leaf.length / BLOCK) * BLOCK);
      padded.set(leaf);
      leaf = padded;
    }
    all.writeBigUInt64LE(hash(leaf), 8 * j);
  }
  all.writeBigUInt64LE(BigInt(n), 8 * leaves);
  return hash(all);
}

/** The same as 16 hex digits, as the vectors and the command line show it. */
export function hex(value) {
  return value.toString(16).padStart(16, "0");
}
