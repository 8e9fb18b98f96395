# shellcheck shell=bash
# needs: bin/rdmacm.test
# limit: 420
# The conformance suite of verbs providers, run by the one over librdmacm, over rxe and over siw; then a connection
# request of NVMe over RDMA to Linux's target. None of the tests may skip itself here.
# shellcheck source=scripts/vm/target.sh
. "${BASH_SOURCE[0]%/*}/../target.sh"

must links
d=$(disk disk1 16) || bail "no disk"
must subsystem nqn.2024-01.org.example:verbs "$d"
log=/tmp/verbs.log
for kind in rxe siw; do
  must port "$([[ $kind == rxe ]] && echo 1 || echo 2)" rdma "${address[$kind]}" 4420 nqn.2024-01.org.example:verbs
  export FARBLK_VERBS_ADDR=${address[$kind]} FARBLK_NVMET_ADDR=${address[$kind]}:4420
  attempt "$kind: conformance" bash -o pipefail -c \
    "/job/rdmacm.test -test.v -test.timeout 180s -test.run '${VERBS_RUN:-.}' | tee $log | grep -E -A 12 '^ *--- FAIL|^panic|^goroutine .*running|^fatal|SIG' || grep -q '^PASS' $log"
  is "$kind: nothing skipped" "TestDevicesWithoutAny" "$(sed -n 's/^ *--- SKIP: \([^ ]*\).*/\1/p' $log)"
  at_least "$kind: tests passed" 60 "$(grep -c '^ *--- PASS' $log)"
  is "$kind: queue pairs left" 0 "$(qps)"
  attempt "$kind: 0 allocations an operation" bash -c \
    "/job/rdmacm.test -test.run xxx -test.bench PostAndPoll -test.benchtime 500x | tee /out/verbs-bench-$kind | grep -q ' 0 allocs/op' && ! grep -E ' [1-9][0-9]* allocs/op' /out/verbs-bench-$kind"
  cp $log /out/verbs-$kind.log
done
