// How a publish may end other than well, beside gRPC's own errors.

/** Why an update did not commit: the coordinator's failure, with `update`. */
export class UpdateFailed extends Error {
  name = "UpdateFailed";
}

/** Whether the update committed could not be learnt: it may have. `updateId` names it. */
export class OutcomeUnknown extends Error {
  name = "OutcomeUnknown";
}

/** It was ended by `stop`. */
export class Interrupted extends Error {
  name = "Interrupted";
}

/** What ended an update, as the coordinator says. */
export function aborted(update) {
  const reason = (update.failure?.reason ?? "").replace(/^REASON_/, "");
  const failure = new UpdateFailed(`${reason} ${update.failure?.message ?? "aborted"}`.trim());
  failure.update = update;
  return failure;
}
