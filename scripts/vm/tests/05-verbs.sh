# shellcheck shell=bash
# needs: bin/rdmacm.test
# limit: 400
# The conformance suite of package verbs on real devices of the kernel, rxe and siw, through librdmacm and libibverbs.
# shellcheck source=scripts/vm/target.sh
. "${BASH_SOURCE[0]%/*}/../target.sh"

must links
d=$(disk disk1 16) || bail "no disk"
must subsystem nqn.2024-01.org.example:disk "$d"
must port 1 rdma "${address[rxe]}" 4420 nqn.2024-01.org.example:disk
must port 2 rdma "${address[siw]}" 4420 nqn.2024-01.org.example:disk

for kind in rxe siw; do
  log=/out/verbs-$kind.log
  if FARBLK_VERBS_ADDR=${address[$kind]} FARBLK_NVMET_ADDR=${address[$kind]}:4420 \
    /job/rdmacm.test -test.v -test.timeout 180s >"$log" 2>&1; then
    ok "$kind: the suite passes"
  else
    fail "$kind: the suite passes" "$(grep -E -B 8 '^ *--- FAIL|^panic' "$log" | tail -n 60; tail -n 5 "$log")"
  fi
  at_least "$kind: tests that passed" 40 "$(grep -c -- '--- PASS' "$log")"
  is "$kind: skipped is only what wants no device" TestDevicesWithoutAny "$(sed -n 's/^ *--- SKIP: \([^ ]*\) .*/\1/p' "$log" | paste -sd' ')"
  attempt "$kind: benchmark" bash -c "FARBLK_VERBS_ADDR=${address[$kind]} /job/rdmacm.test -test.run xxx -test.bench . -test.benchtime 300x >/out/verbs-bench-$kind"
  is "$kind: benchmarks, all without allocations" "4 4" \
    "$(grep -c allocs/op "/out/verbs-bench-$kind") $(grep -c ' 0 allocs/op' "/out/verbs-bench-$kind")"
done
is "no queue pair is left" 0 "$(qps)"
