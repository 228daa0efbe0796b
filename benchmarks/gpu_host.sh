#!/bin/bash
# One part of what a GPU host is asked for; everything it finds goes to $OUT. Needs the folder of gpu_bundle.sh.
#
#   bash benchmarks/gpu_host.sh setup        what is here: versions, cards, which transports work and why not
#   bash benchmarks/gpu_host.sh tests        pytest -m gpu; are the ids that passed those that were collected?
#   bash benchmarks/gpu_host.sh wires        benchmarks/transports.py across two GPUs and on one
#   bash benchmarks/gpu_host.sh buckets      the same across, by bucket size, without digests, 3 samples
#   bash benchmarks/gpu_host.sh updates      benchmarks/updates.py across and on one
#   bash benchmarks/gpu_host.sh digests      benchmarks/digests.py: hashes, the mirror of host transports, a staged apply
#   bash benchmarks/gpu_host.sh timeline     one update of each kind, step by step across the processes (_timeline.py)
#   bash benchmarks/gpu_host.sh many         transports and updates to three receivers (four GPUs)
#   bash benchmarks/gpu_host.sh vllm         benchmarks/vllm_gpu.py with the vLLM in VLLM_SITE (README: how it gets there)
#   bash benchmarks/gpu_host.sh none         unpacks what was carried, for later calls
#
# Several parts may be named. Each benchmark takes at most PART_S seconds (default 270; tests: all that PART_S says) and
# keeps what it found so far. A part leaves at most two files for each benchmark and one log for all.
# More words for the benchmarks: WIRES='--model dense' UPDATES='--transport nccl' VLLM='--cases load,kill'; for pytest: TESTS='tests/transports/test_nccl.py'
# (paths; what is in $OUT/failures.txt is written as it fails).
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-.bench/gpu}
SITE=${SITE:-/tmp/weightplane-site}
CARRY=${CARRY:-.carry-gpu}
PART_S=${PART_S:-270}
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"

if [ ! -e "$SITE/.ready" ]; then
  rm -rf "$SITE" && mkdir -p "$SITE"
  "$PYTHON" -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="fully_trusted")' \
    "$CARRY/site.tar.xz" "$SITE" && touch "$SITE/.ready" || exit 1
fi
PYTHONPATH=$("$PYTHON" benchmarks/_checkout.py "$SITE") || exit 1
export PYTHONPATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export WEIGHTPLANE_COMMIT=${WEIGHTPLANE_COMMIT:-$(cat "$CARRY/COMMIT" 2>/dev/null || echo unknown)}
export WEIGHTPLANE_BENCH_TIMEOUT_S=${WEIGHTPLANE_BENCH_TIMEOUT_S:-60}

# bench NAME SCRIPT WORDS…: the figures to $OUT/NAME.json, drawn in $OUT/NAME.png, what is printed to $OUT/log.txt too
bench() {
  local name=$1 script=$2
  shift 2
  echo "== $name: $script $*" | tee -a "$OUT/log.txt"
  timeout -k 10 "$PART_S" "$PYTHON" "benchmarks/$script" --json "$OUT/$name.json" "$@" 2>&1 | tee -a "$OUT/log.txt"
  local status=${PIPESTATUS[0]}
  [ ! -e "$OUT/$name.json" ] || "$PYTHON" benchmarks/_picture.py "$OUT/$name.json" "$OUT/$name.png" || true
  echo "== $name: exit status $status" | tee -a "$OUT/log.txt"
}

setup() {
  echo "== setup: commit $WEIGHTPLANE_COMMIT"
  "$PYTHON" - <<'P' 2>&1 | tee "$OUT/setup.txt"
import importlib, sys
from importlib.metadata import version
print("python", sys.version.split()[0])
for module, package in {
    "torch": "torch", "triton": "triton", "grpc": "grpcio", "google.protobuf": "protobuf", "grpc_status": "grpcio-status", "grpc_health": "grpcio-health-checking",
    "xxhash": "xxhash", "typer": "typer", "rich": "rich", "nccl.core": "nccl4py", "nixl_cu13": "nixl-cu13",
    "cuda.bindings": "cuda-bindings", "cuda.core": "cuda-core", "pytest": "pytest", "pytest_asyncio": "pytest-asyncio",
    "pytest_timeout": "pytest-timeout", "hypothesis": "hypothesis", "pynvml": "nvidia-ml-py", "matplotlib": "matplotlib",
}.items():
    try:
        importlib.import_module(module)
        print(f"{package:16}", version(package))
    except Exception as e:
        print(f"{package:16} MISSING: {type(e).__name__}: {e}")
from weightplane.transports import registry
for name, probe in registry.available().items():
    print(f"{name:10}", "works" if probe.ok else f"does not work: {probe.reason}", dict(probe.details))
P
  nvidia-smi -L; nvidia-smi topo -m
}

# Cases that look at a card's whole memory, or at the time, have the machine for themselves; the others run side by side, those of
# nccl a few at a time: its kernels wait on a card for each other, and cards take turns between processes. Deaths in nccl run alone.
tests() {
  echo "== tests"
  local started=$SECONDS alone="grow or keep_the_device or peak_device or idle or is_short or after_faults or (nccl and (other_side or X06))"
  local common=(-m gpu --run-large -v -p no:cacheprovider --continue-on-collection-errors)
  timeout 120 "$PYTHON" -m pytest "${common[@]}" --collect-only -q -q ${TESTS:-} >"$OUT/collected.txt" 2>&1
  export FAILURES=$OUT/failures.txt
  : >"$OUT/tests.log"
  some_of_them() { # WORKERS WHICH
    timeout -k 10 $((PART_S - SECONDS + started)) "$PYTHON" -m pytest "${common[@]}" -p benchmarks._failures -n "$1" \
      -k "$2" --durations 10 ${TESTS:-} 2>&1 | tee -a "$OUT/tests.log" | grep -vE '(PASSED|SKIPPED)' | tail -60
  }
  some_of_them "${WORKERS:-14}" "not nccl and not ($alone)"
  some_of_them 5 "nccl and not ($alone)"
  some_of_them 0 "$alone"
  "$PYTHON" benchmarks/_test_ids.py "$OUT/collected.txt" "$OUT/tests.log" | tee "$OUT/tests.txt"
}

wires() {
  bench wires-across transports.py --strict --device cuda ${WIRES:-}
  bench wires-colocated transports.py --strict --device cuda --colocated ${WIRES:-}
}

buckets() {
  bench buckets-across transports.py --device cuda --digests off --quick --bucket-bytes 16MiB --bucket-bytes 64MiB \
    --bucket-bytes 256MiB --bucket-bytes 1GiB ${WIRES:-}
}

updates() {
  local levels="--verify default --verify sampled --verify off"
  local one="--transport cuda_ipc --mode in_place"
  bench updates-across updates.py --strict --device cuda $levels --profile ${UPDATES:-}
  bench updates-colocated updates.py --strict --device cuda --colocated $one $levels --verify full ${UPDATES:-}
  bench updates-buckets updates.py --device cuda --quick $one --bucket-bytes 64MiB --bucket-bytes 512MiB ${UPDATES:-}
}

digests() {
  bench digests digests.py ${DIGESTS:-}
}

# One file for each kind; UPDATES as for updates.
timeline() {
  local model layout notes
  for model in dense moe; do
    for layout in across colocated; do
      notes=$(mktemp -d)
      WEIGHTPLANE_TIMELINE=$notes timeout -k 10 "$PART_S" "$PYTHON" benchmarks/updates.py --device cuda --quick \
        --transport cuda_ipc --mode in_place --verify default --model $model \
        $([ $layout = across ] || echo --colocated) ${UPDATES:-} 2>&1 | tee -a "$OUT/log.txt"
      "$PYTHON" benchmarks/_timeline.py "$notes" 0.03 >"$OUT/timeline-$model-$layout.txt"
    done
  done
}

many() {
  bench wires-many transports.py --device cuda --receivers 1 --receivers 3 --model dense ${WIRES:-}
  bench updates-many updates.py --device cuda --replicas 3 --mode in_place --model dense ${UPDATES:-}
}

# What vLLM's processes print lies in $OUT/vllm-logs.tar.xz.
vllm() {
  local site=${VLLM_SITE:-/opt/persist/site} logs=/tmp/vllm-gpu-logs
  rm -rf "$logs"
  (
    export PYTHONPATH="$PYTHONPATH:$PWD:$site" VLLM_CACHE_ROOT="$site/_vllm_cache" WEIGHTPLANE_BENCH_TIMEOUT_S=120
    unset VLLM_PLUGINS
    "$PYTHON" benchmarks/_vllm_gpu_probe.py >"$OUT/vllm-probe.txt" 2>&1 &
    bench vllm vllm_gpu.py --logs "$logs" --seconds $((PART_S - 15)) ${VLLM:-}
    cat "$OUT/vllm-probe.txt" | tee -a "$OUT/log.txt"
  )
  tar -C "$logs" -cf - . | xz -3 >"$OUT/vllm-logs.tar.xz"
}

for part in "${@:-setup}"; do
  case $part in
    setup | tests | wires | buckets | updates | digests | timeline | many | vllm) $part ;;
    none) ;;
    *) echo "no part $part: setup, tests, wires, buckets, updates, digests, timeline, many, vllm" >&2; exit 2 ;;
  esac
done
