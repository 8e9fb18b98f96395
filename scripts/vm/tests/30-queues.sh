# shellcheck shell=bash
# needs: bin/farblk
# cpus: 4
# Queues, and what reaches the target: four I/O queues that all carry commands, small writes in the capsule, large
# ones split, Flush, FUA, deallocate and Write Zeroes, an fsync on a mounted file system among them.
# shellcheck source=scripts/vm/farblk.sh
. "${BASH_SOURCE[0]%/*}/../farblk.sh"

one_disk
slow=nqn.2024-01.org.example:half-slow
d=$(disk disk2 16) || bail "a disk"
d=$(mapped half "$d" 5) || bail "a device half of which is slow"
must subsystem "$slow" "$d"
for id in 1 2; do must ln -s "$nvmet/subsystems/$slow" "$nvmet/ports/$id/subsystems/"; done
mkdir -p "$scratch/mnt"
counters() { farblk list -v -o json | jq -e ".connections[0].counters.queues | map($1) | add"; } # JQ_FIELD: their sum
socket=$scratch/q.sock
uri="nbd+unix:///?socket=$socket"
sectors() { awk -v b="$1" 'match($0, /len=[0-9]+/) {if (substr($0, RSTART + 4, RLENGTH - 4) + 1 > b) n++} END {print n + 0}' "$tracing/trace"; }
# overtaken: how many commands of queue 1 the target answered after one that had come later.
overtaken() {
  awk '/ qid=1,/ && match($0, /cmdid=[0-9]+/) {
      id = substr($0, RSTART + 6, RLENGTH - 6)
      if (/nvmet_req_init:/) came[id] = ++n
      else if (came[id] < last) late++
      else last = came[id]
    } END {print late + 0}' "$tracing/trace"
}
ticks() { awk '{print $14 + $15}' "/proc/$1/stat"; } # PID: hundredths of a second of processor time so far

for link in rxe siw; do
  connected "$link" -a "${address[$link]}" -n "$nqn" -i 4 -Q 128 --export nbd --export "nbd-unix=$socket"
  device=$(export_of nbd) || bail "no device"
  is "$link: one admin and four I/O queue pairs" 5 "$(qps)"
  is "$link: list has four queues of 128" "4 128" "$(farblk list -v -o json | jq -r '.connections[0] | "\(.io_queues) \(.queue_size)"')"

  trace_on
  attempt "$link: fio, 4 jobs" fio --name=q --filename="$device" --direct=1 --ioengine=libaio --rw=randrw --bs=4k --iodepth=16 \
    --numjobs=4 --thread --size=8m --io_size=1m --group_reporting --minimal --output="$scratch/fio.out"
  trace_off
  for q in 1 2 3 4; do at_least "$link: commands on queue $q" 20 "$(trace_count "qid=$q,.*nvme_cmd_(read|write),")"; done

  before=$(counters .transport.in_capsule)
  attempt "$link: 20 small writes" dd if=/dev/zero of="$device" bs=4k count=20 oflag=direct status=none
  at_least "$link: small writes go in the capsule" $((before + 20)) "$(counters .transport.in_capsule)"

  before=$(counters .splits)
  trace_on
  attempt "$link: write and read 4 MiB at once" qemu-io -f raw -t none -c 'write -P 7 0 4M' -c 'read -P 7 0 4M' "$uri"
  trace_off
  at_least "$link: split" $((before + 6)) "$(counters .splits)"
  at_least "$link: write commands for the 4 MiB" 4 "$(trace_count nvme_cmd_write,)"
  at_least "$link: read commands for the 4 MiB" 4 "$(trace_count nvme_cmd_read,)"
  is "$link: none is over 1 MiB" 0 "$(sectors 2048)"

  trace_on
  attempt "$link: a write with FUA" qemu-io -f raw -t none -c 'write -f -P 9 0 4k' "$uri"
  at_least "$link: FUA reaches the target" 1 "$(trace_count 'nvme_cmd_write,.*ctrl=0x4000')"
  attempt "$link: a synchronous write to the device" dd if=/dev/zero of="$device" bs=4k count=1 oflag=direct,dsync status=none
  at_least "$link: so does the device's" 2 "$(trace_count 'nvme_cmd_write,.*ctrl=0x4000|nvme_cmd_flush')"

  trace_on
  attempt "$link: fsync of the device" dd if=/dev/zero of="$device" bs=4k count=1 conv=fsync status=none
  at_least "$link: Flush reaches the target (E10)" 1 "$(trace_count nvme_cmd_flush)"

  trace_on
  attempt "$link: blkdiscard of all of it (E12)" blkdiscard "$device"
  at_least "$link: deallocate reaches the target" 1 "$(trace_count 'nvme_cmd_dsm.*attributes=4')"
  trace_on
  attempt "$link: zeroes" blkdiscard -z -l 8M "$device"
  at_least "$link: Write Zeroes reaches the target" 1 "$(trace_count nvme_cmd_write_zeroes)"
  is "$link: without data" 0 "$(trace_count nvme_cmd_write,)"

  attempt "$link: mkfs" mkfs.ext4 -q -F "$device"
  attempt "$link: mount" mount "$device" "$scratch/mnt"
  sync
  trace_on
  attempt "$link: fsync of a file" dd if=/dev/zero of="$scratch/mnt/f" bs=4k count=1 conv=fsync status=none
  at_least "$link: its Flush or FUA reaches the target" 1 "$(trace_count 'nvme_cmd_flush|nvme_cmd_write,.*ctrl=0x4000')"
  trace_off
  attempt "$link: umount" umount "$scratch/mnt"

  for ((second = 0, spent = 100; second < 5 && spent >= 25; second++)); do # the best of five: mkfs and umount may have left work
    before=$(ticks "$(sessions)")
    sleep 1 # what is measured
    spent=$(($(ticks "$(sessions)") - before))
  done
  if ((spent < 25)); then ok "$link: idle, it leaves the processor alone (E16): $spent ms x 10"; else fail "$link: idle, it burns the processor (E16)" "$spent hundredths of a second"; fi
  disconnected "$link"

  # answers in another order than the commands'
  connected "$link" -a "${address[$link]}" -n "$slow" -i 1 --export nbd
  device=$(export_of nbd) || bail "no device"
  echo 1 >"$tracing/events/nvmet/nvmet_req_complete/enable"
  trace_on
  attempt "$link: fio at depth 8, verified, half of the device is slow (H37)" fio --name=h37 --filename="$device" --direct=1 --ioengine=libaio \
    --rw=randwrite --bssplit=4k/60:512/20:32k/20 --iodepth=8 --size=16m --io_size=4m --verify=crc32c --verify_fatal=1 --verify_state_save=0 --minimal --output="$scratch/fio.out"
  trace_off
  echo 0 >"$tracing/events/nvmet/nvmet_req_complete/enable"
  at_least "$link: commands answered after later ones" 20 "$(overtaken)"
  disconnected "$link" "$slow"
done
