// The vectors that every language's client reads: tests/vectors/*.json.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import test from "node:test";
import { digest, hex } from "../src/digest.js";
import { manifestId, slice } from "../src/model.js";

const vectors = (name) => JSON.parse(readFileSync(new URL(`../../../tests/vectors/${name}.json`, import.meta.url)));
const pattern = (n) => Buffer.from(Uint8Array.from({ length: n }, (_, i) => (131 * i + Math.floor(i / 251)) % 256));

test("digests of bytes of every size", () => {
  for (const { nbytes, digest: expected } of vectors("digests").bytes) {
    assert.equal(hex(digest(pattern(nbytes))), expected, `${nbytes} bytes`);
  }
});

test("digests of tensors of every dtype, and of slices", () => {
  const { tensors } = vectors("digests");
  assert.ok(tensors.length > 10);
  for (const t of tensors) {
    const tensor = { dtype: t.dtype, shape: t.shape, bytes: pattern(t.nbytes) };
    const box = t.slice ?? t.shape.map((n) => [0, n]);
    assert.equal(hex(digest(slice(tensor, box))), t.digest, JSON.stringify(t));
  }
});

test("ids of manifests", () => {
  const rows = vectors("manifests");
  assert.ok(rows.length > 2);
  for (const { case: name, tensors, id } of rows) {
    const metas = tensors.map(([name, dtype, shape, alias_of]) => ({ name, dtype, shape, alias_of }));
    assert.equal(manifestId(metas), id, name);
  }
});
