// What is no safetensors file is refused with its path and what is wrong, never read as something else.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import test, { after } from "node:test";
import { readSafetensors } from "../src/safetensors.js";

const folder = mkdtempSync(join(tmpdir(), "safetensors-"));
after(() => rmSync(folder, { recursive: true }));

function file(header, bytes = 16, claimed = undefined) {
  const path = join(folder, "model");
  const text = Buffer.from(typeof header === "object" && !Buffer.isBuffer(header) ? JSON.stringify(header) : header);
  const length = Buffer.alloc(8);
  length.writeBigUInt64LE(claimed ?? BigInt(text.length));
  writeFileSync(path, Buffer.concat([length, text, Buffer.alloc(bytes, 1)]));
  return path;
}

const entry = (changed) => ({ dtype: "F32", shape: [4], data_offsets: [0, 16], ...changed });
const twice = JSON.stringify(entry());

test("a file is read in the order of its bytes", () => {
  const header = { __metadata__: { a: "b" }, z: entry(), 'a"{[,\\': entry({ dtype: "BF16", data_offsets: [16, 24] }) };
  const tensors = readSafetensors(file(header, 24));
  assert.deepEqual(tensors.map((t) => [t.name, t.dtype, t.bytes.length]), [["z", "float32", 16], ['a"{[,\\', "bfloat16", 8]]);
});

for (const [what, told, ...made] of [
  ["cut short", "expected 16 bytes inside", { w: entry() }, 15],
  ["longer than its tensors", "end at byte 16 of 17", { w: entry() }, 17],
  ["with a gap", "begins at byte 24, expected 16", { w: entry(), v: entry({ data_offsets: [24, 40] }) }, 40],
  ["with an overlap", "begins at byte 8, expected 16", { w: entry(), v: entry({ data_offsets: [8, 24] }) }, 24],
  ["with a negative offset", "two whole numbers", { w: entry({ data_offsets: [-16, 0] }) }],
  ["with offsets of text", "two whole numbers", { w: entry({ data_offsets: ["0", "16"] }) }],
  ["with three offsets", "two whole numbers", { w: entry({ data_offsets: [0, 16, 3] }) }],
  ["with offsets that a number cannot hold", "two whole numbers", '{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,9007199254740993]}}'],
  ["with a shape of text", "shape: expected", { w: entry({ shape: ["4"] }) }],
  ["with a shape that is none", "shape: expected", { w: entry({ shape: "4" }) }],
  ["with negative dimensions", "shape: expected", { w: entry({ shape: [-2, -2] }) }],
  ["with an unknown dtype", "F33", { w: entry({ dtype: "F33" }) }],
  ["with a dtype that an object inherits", "constructor", { w: entry({ dtype: "constructor" }) }],
  ["without an entry's field", "no data_offsets", { w: { dtype: "F32", shape: [4] } }],
  ["with an entry of null", "no dtype", { w: null }],
  ["with a name twice", "'w' is there twice", `{"w":${twice},"\\u0077":${twice}}`],
  ["with an empty name", "a name is needed", { "": entry() }],
  ["with half a surrogate as name", "not Unicode", `{"\\ud800":${twice}}`],
  ["with a header of no UTF-8", "not JSON", Buffer.from([0x7b, 0x22, 0xff, 0x22, 0x3a, 0x31, 0x7d])],
  ["with a header of null", "not a JSON object", "null"],
  ["with a header that is a list", "not a JSON object", [1, 2]],
  ["with half a header", "not JSON", '{"w":'],
  ["without a tensor", "no tensor", {}],
  ["that claims a huge header", "claims 18446744073709551615 bytes", "{}", 0, 2n ** 64n - 1n],
]) {
  test(`a file ${what} is refused`, () => {
    const path = file(...made);
    assert.throws(() => readSafetensors(path), (e) => e.name === "Misuse" && e.message.startsWith(path) && e.message.includes(told));
  });
}

test("what is no file is refused, a pipe too, which nobody may ever write", () => {
  execFileSync("mkfifo", [join(folder, "pipe")]);
  for (const [path, told] of [[folder, "expected a file"], [join(folder, "pipe"), "expected a file"], [join(folder, "none"), "ENOENT"]]) {
    assert.throws(() => readSafetensors(path), (e) => e.name === "Misuse" && e.message.includes(told));
  }
});
