import assert from "node:assert/strict";
import { test } from "node:test";
import { grpc, v1 } from "../src/contract.js";
import { Stream } from "../src/data.js";

test("who acknowledges but does not read holds the sender back, with one listener", async () => {
  const server = new grpc.Server({ "grpc.max_receive_message_length": 4 << 20 });
  let reads;
  server.addService(v1.TensorService.service, {
    Transfer(call) {
      reads = call;
      call.once("data", () => {
        call.pause();
        call.write({ bucket: -1 });
        const acks = setInterval(() => call.write({ bucket: 0 }), 5);
        call.on("end", () => (clearInterval(acks), call.end()));
        call.on("cancelled", () => clearInterval(acks));
        call.on("error", () => clearInterval(acks));
      });
    },
  });
  const port = await new Promise((resolve, reject) =>
    server.bindAsync("127.0.0.1:0", grpc.ServerCredentials.createInsecure(), (e, p) => (e ? reject(e) : resolve(p))),
  );
  const offers = { r: { grpc: { address: `127.0.0.1:${port}`, ca_pem: Buffer.alloc(0) } } };
  const stream = new Stream({ offers, key: Buffer.alloc(32) }, "r", {});
  await stream.open(Date.now() + 5000);
  const chunk = Buffer.alloc(2 << 20);
  let sent = false;
  const sending = stream.send(1, Array(60).fill(chunk)).then(() => (sent = true));
  let acknowledgements = 0;
  await new Promise((resolve) => stream.call.on("data", () => ++acknowledgements === 100 && resolve()));
  assert.equal(sent, false);
  assert.ok(stream.call.writableLength <= 20, `${stream.call.writableLength} chunks wait`);
  assert.ok(stream.call.listenerCount("drain") <= 2, `${stream.call.listenerCount("drain")} listeners`);
  reads.resume();
  await sending;
  stream.abort(new Error("over"));
  server.forceShutdown();
});
