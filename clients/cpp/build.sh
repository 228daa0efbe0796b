#!/bin/sh
# Builds the C++ client into .build-cpp (make clients-cpp). As root it installs what Debian's packages lack here;
# where that cannot be done it says what is missing and ends well, and the tests of the client are skipped; with
# WEIGHTPLANE_NEEDS_CLIENTS=1 (CI) that is a failure.
set -eu
cd "$(dirname "$0")/../.."
packages="cmake make g++ pkg-config libgrpc++-dev protobuf-compiler protobuf-compiler-grpc libprotobuf-dev libxxhash-dev nlohmann-json3-dev"

skip() {
	echo "clients/cpp is not built: $1"
	case " $(echo "${WEIGHTPLANE_NEEDS_CLIENTS:-}" | tr , ' ') " in *" 1 "* | *" cpp "*) exit 1 ;; esac
	exit 0
}

command -v dpkg-query >/dev/null || skip "this is no Debian; it needs what $packages are there"
missing=""
for package in $packages; do
	dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
done
if [ -n "$missing" ]; then
	[ "$(id -u)" = 0 ] || skip "missing:$missing (apt-get install them, or run this as root)"
	echo "clients/cpp: installing$missing …"
	export DEBIAN_FRONTEND=noninteractive
	# shellcheck disable=SC2086 # words, here and below
	bounds="-o Acquire::http::Timeout=30 -o Acquire::Retries=1 -o DPkg::Lock::Timeout=60"
	{ apt-get $bounds update -qq && apt-get $bounds install -y -qq --no-install-recommends $missing; } >/dev/null ||
		skip "apt-get could not install$missing"
fi
[ -f .build-cpp/Makefile ] || cmake -S clients/cpp -B .build-cpp -G 'Unix Makefiles' -DCMAKE_BUILD_TYPE=Release >/dev/null
exec cmake --build .build-cpp -j "$(nproc)" -- -s --no-print-directory
