# shellcheck shell=bash
# Run in the guest by scripts/bench/kernel: farblk beside Linux's own initiator, each against the same Linux target
# and RAM disk, over RoCE (rxe) and iWARP (siw), one I/O queue. Prints lines "LINK WHAT LOAD IOPS", a round at a
# time. The programs that poll come last in a round: what they leave the other processor is not for others to use.
# shellcheck source=scripts/vm/target.sh
. "${BASH_SOURCE[0]%/*}/target.sh"
rounds=${1:-3} seconds=${2:-3} names=${3:-rxe siw}
nqn=nqn.2024-01.org.example:bench
PATH=/job:$PATH
export FARBLK_STATE_DIR=/run/farblk-bench

quietly() { "$@" >/run/bench.log 2>&1 || { cat /run/bench.log >&2; echo "bench: failed: $*" >&2; exit 1; }; }
quietly links
quietly modprobe brd rd_nr=1 rd_size=131072
quietly modprobe nbd nbds_max=2 max_part=0
quietly dd if=/dev/zero of=/dev/ram0 bs=1M count=128
quietly subsystem "$nqn" /dev/ram0
id=0
for link in rxe siw; do quietly port $((++id)) rdma "${address[$link]}" 4420 "$nqn"; done

loads=("randread 4096 1" "randread 4096 32" "randwrite 4096 1" "randwrite 4096 32" "read 131072 8")
loop() { # LINK WHAT DEVICE
  local l
  for l in "${loads[@]}"; do
    # shellcheck disable=SC2086 # three words
    set -- "$1" "$2" "$3" $l
    echo "$1 $2 $4-$5-qd$6 $(aioloop "$3" "$4" "$5" "$6" "$seconds" | cut -d' ' -f1)"
  done
}
direct() { # LINK WHAT OPTION...: farblk's own connection
  local link=$1 what=$2 l
  shift 2
  for l in "${loads[@]}"; do
    read -r rw bs qd <<<"$l"
    echo "$link $what $rw-$bs-qd$qd $(farblk bench "$@" -a "${address[$link]}" -n "$nqn" --rw "$rw" --bs "$bs" --qd "$qd" \
      --queues 1 --time "$seconds" --destroy-data -o json | jq '.iops | round')"
  done
}

for ((round = 0; round < rounds; round++)); do
  for link in $names; do
    a=${address[$link]}
    quietly nvme connect -t rdma -a "$a" -s 4420 -n "$nqn" -i 1
    device=''
    for _ in {1..50}; do
      for d in /dev/nvme*n1; do [[ -b $d ]] && device=$d; done
      [[ -n $device ]] && break
      sleep 0.1
    done
    loop "$link" kernel "$device"
    quietly nvme disconnect -n "$nqn"
    quietly farblk connect --provider verbs -a "$a" -n "$nqn" -i 1 --export nbd=/dev/nbd0
    loop "$link" nbd /dev/nbd0
    quietly farblk disconnect -n "$nqn"
    direct "$link" farblk --provider verbs
    [[ $link == siw ]] || continue
    direct "$link" software --provider iwarp --disable-crc # as siw does by itself
    direct "$link" checked --provider iwarp
  done
done
clock=$(cat /sys/devices/system/clocksource/clocksource0/current_clocksource)
[[ $clock == tsc || $clock == kvm-clock ]] || echo "bench: the clock changed to $clock: figures are not comparable" >&2
