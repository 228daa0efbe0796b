// A safetensors file, read whole. What does not keep the format's rules is refused, as clients/cpp refuses it.

import { readFileSync, statSync } from "node:fs";
import { dtypeBytes } from "./model.js";
import { Misuse } from "./misuse.js";

const HEADER_LIMIT = 100_000_000; // the format's own
const LARGEST = 2 ** 31; // what Node reads in one piece

/** safetensors' names of dtypes, and the contract's. */
const NAMES = {
  ...{ BOOL: "bool", U8: "uint8", I8: "int8", U16: "uint16", I16: "int16", U32: "uint32", I32: "int32" },
  ...{ U64: "uint64", I64: "int64", F16: "float16", BF16: "bfloat16", F32: "float32", F64: "float64" },
  ...{ F8_E4M3: "float8_e4m3fn", F8_E4M3FNUZ: "float8_e4m3fnuz", F8_E5M2: "float8_e5m2" },
  ...{ F8_E5M2FNUZ: "float8_e5m2fnuz", F8_E8M0: "float8_e8m0fnu", C64: "complex64" },
};

/** `[{name, dtype, shape, bytes}]`, in the order of their bytes. Throws a `Misuse` that names what is wrong. */
export function readSafetensors(path) {
  const refuse = (why) => {
    throw new Misuse(`${path}: ${why}`);
  };
  const file = content(path, refuse);
  const claimed = file.length < 8 ? 0n : file.readBigUInt64LE(0);
  if (file.length < 8 || claimed > file.length - 8 || claimed > HEADER_LIMIT) {
    refuse(`not a safetensors file: its header claims ${claimed} bytes of a file of ${file.length}`);
  }
  const length = Number(claimed);
  const header = parsed(file.subarray(8, 8 + length), refuse);
  const data = file.subarray(8 + length);
  const tensors = Object.entries(header)
    .filter(([name]) => name !== "__metadata__")
    .map(([name, said]) => entry(name, said, data, (why) => refuse(`tensor '${name.slice(0, 200)}': ${why}`)));
  if (!tensors.length) refuse("no tensor is in it");
  tensors.sort((a, b) => a.begin - b.begin || a.bytes.length - b.bytes.length);
  let end = 0;
  for (const { name, begin, bytes } of tensors) {
    if (begin !== end) refuse(`tensor '${name}' begins at byte ${begin}, expected ${end}: no gaps or overlaps`);
    end += bytes.length;
  }
  if (end !== data.length) refuse(`tensors end at byte ${end} of ${data.length}`);
  return tensors;
}

function content(path, refuse) {
  try {
    const facts = statSync(path);
    if (!facts.isFile()) refuse("expected a file");
    if (facts.size >= LARGEST) refuse(`expected less than ${LARGEST} bytes, found ${facts.size}: clients/cpp takes any size`);
    return readFileSync(path);
  } catch (error) {
    throw error instanceof Misuse ? error : new Misuse(error.message);
  }
}

function parsed(bytes, refuse) {
  let text, header;
  try {
    text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
    header = JSON.parse(text);
  } catch (error) {
    refuse(`the header is not JSON: ${error.message.slice(0, 200)}`);
  }
  if (header === null || typeof header !== "object" || Array.isArray(header)) refuse("the header is not a JSON object");
  const seen = new Set();
  for (const name of keys(text)) {
    if (seen.has(name)) refuse(`tensor '${name}' is there twice`);
    seen.add(name);
  }
  return header;
}

/** The keys of an object's outermost level: of two that are equal JSON.parse keeps the last and says nothing. */
function* keys(text) {
  let depth = 0;
  let due = false; // a key comes next
  for (let at = 0; at < text.length; at++) {
    const c = text[at];
    if (c === '"') {
      const from = at++;
      while (text[at] !== '"') at += text[at] === "\\" ? 2 : 1;
      if (due) yield JSON.parse(text.slice(from, at + 1));
      due = false;
    } else if (c === "{" || c === "[") due = ++depth === 1;
    else if (c === "}" || c === "]") depth--;
    else if (c === ",") due = depth === 1;
  }
}

function entry(name, said, data, refuse) {
  if (name === "") refuse("a name is needed");
  if (Buffer.from(name).toString() !== name) refuse("its name is not Unicode");
  for (const key of ["dtype", "shape", "data_offsets"]) {
    if (said?.[key] === undefined) refuse(`its entry has no ${key}`);
  }
  const dtype = Object.hasOwn(NAMES, said.dtype) ? NAMES[said.dtype] : refuse(`its dtype ${said.dtype} is not known`);
  const whole = (value) => Number.isSafeInteger(value) && value >= 0;
  const { shape, data_offsets: offsets } = said;
  if (!Array.isArray(shape) || !shape.every(whole)) refuse(`shape: expected whole numbers, found ${JSON.stringify(shape)}`);
  if (!Array.isArray(offsets) || offsets.length !== 2 || !offsets.every(whole)) {
    refuse(`data_offsets: expected two whole numbers, found ${JSON.stringify(offsets)}`);
  }
  const [begin, end] = offsets;
  const nbytes = shape.includes(0) ? 0 : shape.reduce((a, b) => a * b, dtypeBytes(dtype));
  if (begin > end || end > data.length || end - begin !== nbytes) {
    refuse(`it lies at bytes ${begin}..${end} of ${data.length}: expected ${nbytes} bytes inside the file`);
  }
  return { name, dtype, shape, begin, bytes: data.subarray(begin, end) };
}
