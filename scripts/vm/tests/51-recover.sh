# shellcheck shell=bash
# needs: bin/farblk
# A connection's process is killed while its block device is in use: I/O waits, list says so, connecting again in the
# same way goes on, and nothing that was written is lost. One that nobody takes over can be cleared away by force.
# Nothing is lost either when the process is stopped for a while. When the target does not come back, I/O ends in errors;
# and so it does when nothing comes back and nobody says so.
# shellcheck source=scripts/vm/farblk.sh
. "${BASH_SOURCE[0]%/*}/../farblk.sh"

one_disk
written() { awk '{print $5}' "/sys/block/${1#/dev/}/stat"; } # DEVICE: writes completed, also by those who had it before
writing() { (($(written "$1") > $2 + 100)); }                # DEVICE BEFORE: a hundred more than before
for link in rxe siw; do
  to=(-a "${address[$link]}" -n "$nqn" --keep-alive-tmo 1 --export nbd)
  connected "$link" "${to[@]}"
  device=$(export_of nbd) || bail "no device"
  before=$(written "$device")
  fio --name=v --filename="$device" --direct=1 --ioengine=libaio --rw=randwrite --bs=4k --iodepth=8 --size=8m \
    --rate_iops=1000 --verify=crc32c --do_verify=1 --verify_fatal=1 --verify_state_save=0 --minimal --output="$scratch/fio.out" &
  fio=$!
  wait_for 20 writing "$device" "$before" || fail "$link: fio writes"
  attempt "$link: the process is killed" killed
  is "$link: list shows what happened" "crashed $device" "$(farblk list -o json | jq -r '.devices[] | "\(.State) \(.DevicePath)"')"
  refuses 'in use' farblk disconnect -n "$nqn"
  connected "$link, again" "${to[@]}"
  is "$link: the same device" "$device" "$(export_of nbd)"
  is "$link: under the same name" farblk0 "$(field .name)"
  if wait "$fio"; then ok "$link: fio saw no error, and its data are right (E08)"; else fail "$link: fio saw no error" "$(cat "$scratch/fio.out")"; fi
  attempt "$link: the device is well" dd if="$device" of=/dev/null bs=1M count=8 iflag=direct status=none
  disconnected "$link"
done

# stopped in the midst of requests, for longer than the target waits for a sign of life
connected "stopped" -a "${address[siw]}" -n "$nqn" --keep-alive-tmo 1 --export nbd
device=$(export_of nbd) || bail "no device"
in_flight() { [[ $(tr -d ' 0\n' <"/sys/block/${1#/dev/}/inflight") ]]; } # DEVICE
before=$(written "$device")
fio --name=v --filename="$device" --direct=1 --ioengine=libaio --rw=randwrite --bs=4k --iodepth=8 --size=8m \
  --rate_iops=1000 --verify=crc32c --do_verify=1 --verify_fatal=1 --verify_state_save=0 --minimal --output="$scratch/fio.out" &
fio=$!
wait_for 20 writing "$device" "$before" || fail "stopped: fio writes"
process=$(sessions)
kill -STOP "$process"
attempt "stopped: requests wait for it" wait_for 5 in_flight "$device"
sleep 5 # the stop itself: well above twice the keep-alive timeout, after which a target may give up
attempt "stopped: they still do" in_flight "$device"
kill -CONT "$process"
if wait "$fio"; then ok "stopped: fio saw no error, and its data are right (E02)"; else fail "stopped: fio saw no error" "$(cat "$scratch/fio.out")"; fi
at_least "stopped: connections that the target had given up" 1 "$(farblk list -v -o json | jq '.connections[0].counters.resets')"
disconnected "stopped"

connected "given up" -a "${address[siw]}" -n "$nqn" --export nbd
device=$(export_of nbd)
bash -c 'exec -a holder sleep 1000' <"$device" &
holder=$!
wait_for 3 test "/proc/$holder/fd/0" -ef "$device"
attempt "given up: the process is killed" killed
refuses 'in use|open' farblk disconnect --all
attempt "given up: disconnect --force" farblk disconnect --all --force
kill "$holder"
attempt "given up: nothing left" wait_for_nothing

# A target that does not come back: when the controller loss time is over, what waits and what comes fails, for good.
connected "gone for good" -a "${address[rxe]}" -n "$nqn" --ctrl-loss-tmo 3 --reconnect-delay 1 --keep-alive-tmo 1 --export nbd
device=$(export_of nbd) || bail "no device"
must port_gone 1
dd if="$device" of=/dev/null bs=4k count=1 iflag=direct status=none 2>"$scratch/dd.err" &
dd=$!
ended() { [[ $(awk '{print $3}' "/proc/$1/stat") != [RSD] ]]; } # PID: none, or a zombie
if wait_for 15 ended "$dd"; then
  if wait "$dd"; then fail "gone for good: dd fails"; fi
  attempt "gone for good: dd says why" grep 'Input/output error' "$scratch/dd.err"
else
  bail "gone for good: dd ends" "$(cat "/proc/$dd/stack")"
fi
state_is() { [[ $(farblk list -o json | jq -r '.devices[].State') == "$1" ]]; }
attempt "gone for good: list says so" wait_for 5 state_is dead
if timeout 5 dd if=/dev/zero of="$device" bs=4k count=1 oflag=direct status=none 2>"$scratch/dd.err"; then fail "gone for good: a write fails"; fi
attempt "gone for good: a write says why" grep 'Input/output error' "$scratch/dd.err"
disconnected "gone for good"

# A cable that is pulled: keep-alive notices, I/O fails in time, and disconnect --force does not wait for the other end.
must modprobe sch_netem
for provider in verbs iwarp; do
  name="cable pulled, $provider"
  connected "$name" --provider $provider -a "${address[siw]}" -n "$nqn" --keep-alive-tmo 1 --fast_io_fail_tmo 2 --export nbd
  device=$(export_of nbd) || bail "no device"
  must tc qdisc add dev lo root netem loss 100% # the way from this machine to itself
  begin=$SECONDS
  if timeout 30 dd if="$device" of=/dev/null bs=4k count=1 iflag=direct status=none 2>"$scratch/dd.err"; then fail "$name: dd fails"; fi
  took=$((SECONDS - begin))
  attempt "$name: dd says why" grep 'Input/output error' "$scratch/dd.err"
  if ((took <= 8)); then ok "$name: it took $took s (H19)"; else fail "$name: it took $took s (H19)"; fi
  begin=$SECONDS
  attempt "$name: disconnect --force" farblk disconnect -n "$nqn" --force # without, the target's return would be waited for
  took=$((SECONDS - begin))
  if ((took <= 5)); then ok "$name: disconnecting took $took s"; else fail "$name: disconnecting took $took s"; fi
  attempt "$name: nothing left" wait_for_nothing
  must tc qdisc del dev lo root
done
