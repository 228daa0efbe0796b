// Which host we are on, as the agents say it: what decides whether a loopback address or shared memory can be tried.

import { readFileSync, statSync } from "node:fs";
import os from "node:os";

/** Equal for two processes of one machine and one user that see one /dev/shm. WEIGHTPLANE_HOST_ID overrides it. */
export function hostId() {
  if (process.env.WEIGHTPLANE_HOST_ID) return process.env.WEIGHTPLANE_HOST_ID;
  let machine;
  try {
    machine = readFileSync("/proc/sys/kernel/random/boot_id", "utf8").trim();
  } catch {
    machine = os.hostname();
  }
  const shm = statSync(process.env.WEIGHTPLANE_SHM_DIR || "/dev/shm", { bigint: true, throwIfNoEntry: false });
  return shm ? `${machine}/${shm.dev.toString(16)}.${shm.ino.toString(16)}/${process.geteuid()}` : machine;
}
