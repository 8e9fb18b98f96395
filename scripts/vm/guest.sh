#!/usr/bin/env bash
# In the guest: runs the tests named, one after the other, each with its log and exit status under /out.
#   guest.sh NAME:SECONDS...
cd "$(dirname "$0")" || exit
for job; do
  name=${job%:*} limit=${job#*:} status=0
  timeout -k 5 "$limit" bash "tests/$name.sh" >"/out/$name.log" 2>&1 || status=$?
  ((status != 124 && status != 137)) || echo "# still running after $limit s; ended" >>"/out/$name.log"
  ((status == 0)) || { echo "# the kernel said last:"; dmesg | tail -n 15; } >>"/out/$name.log"
  (($# == 1)) || bash -c '. ./target.sh && teardown' >/dev/null 2>&1
  echo "$status" >"/out/$name.status"
done
