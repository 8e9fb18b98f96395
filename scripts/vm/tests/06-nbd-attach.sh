# shellcheck shell=bash
# needs: bin/nbd.test
# limit: 400
# Package nbd's own tests of the kernel attach: fio with verification on a memory device, sizes, busy devices, resize,
# partitions, a killed and a stopped owner, a device that hangs, left-over devices, and the errors of a machine that cannot.
# shellcheck source=scripts/vm/assert.sh
. "${BASH_SOURCE[0]%/*}/../assert.sh"

mountpoint -q /sys/kernel/debug || must mount -t debugfs none /sys/kernel/debug # as systemd does
log=/out/nbd-attach.log
if FARBLK_NBD_KERNEL=1 /job/nbd.test -test.v -test.timeout 380s -test.run '^(TestKernel|TestCase(H23|E(02|04|05|06|07|08|09|13|15|17|21)))' >"$log" 2>&1; then
  ok "the tests of the kernel attach pass"
else
  fail "the tests of the kernel attach pass" "$(grep -E -A 12 '^ *--- FAIL|^panic|^fatal' "$log" | head -n 60; tail -n 5 "$log")"
fi
at_least "tests that passed" 21 "$(grep -c -- '^ *--- PASS' "$log")"
is "none was skipped" 0 "$(grep -c -- '--- SKIP' "$log")"
is "no device is left connected" 0 "$(find /sys/block/nbd*/pid 2>/dev/null | wc -l)"
