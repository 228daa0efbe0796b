// How a publish may end other than well, beside gRPC's own errors.

/** Why an update did not commit: the coordinator's failure, with `update`. */
export class UpdateFailed extends Error {
  name = "UpdateFailed";
}

/** It was ended by `stop`. */
export class Interrupted extends Error {
  name = "Interrupted";
}

/** What ended an update, as the coordinator says. */
export function aborted(update) {
  const failure = new UpdateFailed(`${update.failure?.reason ?? ""} ${update.failure?.message ?? "aborted"}`);
  failure.update = update;
  return failure;
}
