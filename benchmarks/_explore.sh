SITE=/tmp/weightplane-site; [ -d $SITE/nixl_cu13 ] || { mkdir -p $SITE; python3 -c 'import sys, tarfile; tarfile.open(".carry-gpu/site.tar.xz").extractall("/tmp/weightplane-site", filter="fully_trusted")'; }
export PYTHONPATH=$(python3 benchmarks/_checkout.py $SITE) PYTHONUNBUFFERED=1
U="timeout 110 python3 benchmarks/updates.py --device cuda --quick --transport cuda_ipc --mode in_place"
t() { n=$1; mkdir -p /tmp/tl/$n; shift; WEIGHTPLANE_TIMELINE=/tmp/tl/$n "$@" 2>&1 | tee -a $OUT/log.txt | grep -A1 "^cuda_ipc" ; python3 benchmarks/_timeline.py /tmp/tl/$n 0.03 > $OUT/tl-$n.txt; }
t dense $U --model dense --verify default
t moe $U --model moe --verify default
t codense $U --model dense --colocated --verify sampled
t comoe $U --model moe --colocated --verify sampled
tar -C /tmp -czf $OUT/tl.tgz tl
