#!/bin/bash
# What a GPU host without a network lacks, for Python 3.12, in one ignored folder that travels with the checkout:
#
#   bash benchmarks/gpu_bundle.sh         makes .carry-gpu/ (21 MB; seconds once the wheels are in .carry-wheels/)
#
#   .carry-gpu/site.tar.xz   the packages below, unpacked: NIXL without its expert-parallel kernels and programs
#   .carry-gpu/COMMIT        what is measured; run this again after every commit
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
PACKAGES="nccl4py==0.6.0 nixl-cu13==1.5.1 xxhash==4.1.0 grpcio-health-checking==1.80.0 grpcio-status==1.80.0 googleapis-common-protos==1.76.0 pytest-asyncio==1.5.0"
TAGS=""
for tag in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux1; do TAGS="$TAGS --platform ${tag}_x86_64"; done

mkdir -p .carry-wheels .carry-gpu
for package in $PACKAGES; do
  name=$(echo "${package%%==*}" | tr - _)
  ls .carry-wheels/"$name"-"${package##*==}"-*.whl >/dev/null 2>&1 || "$PYTHON" -m pip download -q --no-deps --only-binary=:all: \
    --python-version 3.12 --implementation cp $TAGS -d .carry-wheels "$package" 2> >(grep -v '^WARNING: Location' >&2)
done
if [ ! -e .carry-gpu/site.tar.xz ] || [ -n "$(find .carry-wheels "$0" -newer .carry-gpu/site.tar.xz -print -quit)" ]; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  for package in $PACKAGES; do # not what an earlier list left here
    "$PYTHON" -m zipfile -e .carry-wheels/"$(echo "${package%%==*}" | tr - _)-${package##*==}"-*.whl "$site"
  done
  rm -rf "$site"/nixl_ep_cu13 "$site"/nixl_cu13.scripts "$site"/*.data "$site"/nixl_cu13.libs/ucx/libucx_perftest*
  tar -C "$site" -cf - . | xz -6 -T0 >.carry-gpu/site.tar.xz
fi
git describe --always --dirty --abbrev=12 '--exclude=*' >.carry-gpu/COMMIT
du -sh .carry-gpu/* && du -shc .carry-gpu | tail -1 && cat .carry-gpu/COMMIT
