import assert from "node:assert/strict";
import { test } from "node:test";
import { aborted } from "../src/failures.js";

test("an aborted update's reason is said as everywhere else: without its prefix", () => {
  const failure = { reason: "REASON_MEMBER_LOST", message: "replica a is lost" };
  assert.equal(aborted({ failure }).message, "MEMBER_LOST replica a is lost");
  assert.equal(aborted({}).message, "aborted");
});
