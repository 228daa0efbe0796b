// A model: its manifest (names, dtypes, shapes in one order) and the bytes of each tensor.

import { createHash } from "node:crypto";

/** Bytes per stored element of every dtype that may travel. */
const SIZE = {
  ...{ bool: 1, uint8: 1, int8: 1, uint16: 2, int16: 2, uint32: 4, int32: 4, uint64: 8, int64: 8 },
  ...{ float16: 2, bfloat16: 2, float32: 4, float64: 8, complex32: 4, complex64: 8, complex128: 16 },
  ...{ float8_e4m3fn: 1, float8_e4m3fnuz: 1, float8_e5m2: 1, float8_e5m2fnuz: 1, float8_e8m0fnu: 1 },
  float4_e2m1fn_x2: 1,
};

/** Bytes per stored element. */
export function dtypeBytes(dtype) {
  return SIZE[dtype];
}

/** The manifest's id: SHA-256 of the canonical JSON of its entries, cut to 128 bits. */
export function manifestId(tensors) {
  const rows = tensors.map((t) => [t.name, t.dtype, t.shape, t.alias_of || ""]);
  return `m-${createHash("sha256").update(JSON.stringify(rows), "utf8").digest("hex").slice(0, 32)}`;
}

/** The row-major bytes of a box (`[[start, stop], ...]`) of a tensor; a view where they lie in one piece. */
export function slice(tensor, box) {
  const { shape, bytes } = tensor;
  const size = SIZE[tensor.dtype];
  let inner = shape.length; // dimensions from here on are whole: one run of bytes
  while (inner > 0 && box[inner - 1][0] === 0 && box[inner - 1][1] === shape[inner - 1]) inner--;
  const run = Math.max(inner - 1, 0); // the box's ranges in dimension `run` are one run, too
  const strides = new Array(shape.length);
  let stride = size;
  for (let d = shape.length - 1; d >= 0; d--) {
    strides[d] = stride;
    stride *= shape[d];
  }
  if (inner === 0) return bytes;
  const length = (box[run][1] - box[run][0]) * strides[run];
  const rows = [];
  const walk = (d, at) => {
    if (d === run) {
      const from = at + box[run][0] * strides[run];
      rows.push(bytes.subarray(from, from + length));
      return;
    }
    for (let i = box[d][0]; i < box[d][1]; i++) walk(d + 1, at + i * strides[d]);
  };
  walk(0, 0);
  return rows.length === 1 ? rows[0] : Buffer.concat(rows);
}
