# shellcheck shell=bash
# Sourced by a guest test, as root: a real Linux NVMe-oF target over software RoCE (rxe) and software iWARP (siw),
# and what tests ask of the kernel around it.
#
#   10.9.0.1, fd00:9::1     rxe0, RoCE v2        10.9.1.1, fd00:9:1::1   siw0, iWARP
#   10.9.2.1                one end of the cable that two_hosts makes; 10.9.2.2 is the other
# shellcheck source=scripts/vm/assert.sh
. "${BASH_SOURCE[0]%/*}/assert.sh"

nvmet=/sys/kernel/config/nvmet
tracing=/sys/kernel/tracing
# shellcheck disable=SC2034 # for the tests
declare -A address=([rxe]=10.9.0.1 [siw]=10.9.1.1 [cable]=10.9.2.1)

# --- links -----------------------------------------------------------------------------------------------------

drivers() {
  local d
  for d in ib_uverbs rdma_ucm nvmet-rdma nvme-rdma; do modprobe "$d" || return; done
}
load_rxe() { modprobe rdma_rxe; }
load_siw() {
  [[ -d /sys/module/siw ]] && return
  modprobe siw 2>/dev/null && return
  modprobe iw_cm || return
  modprobe -q libcrc32c # folded into crc32c by later kernels
  insmod /job/siw.ko
}

# links [-m MTU] [rxe] [siw]: loads the drivers and makes the links; both unless named.
links() {
  local mtu=1500 kind
  if [[ ${1:-} == -m ]]; then
    mtu=$2
    shift 2
  fi
  (($#)) || set -- rxe siw
  drivers || return
  for kind; do
    case $kind in
      rxe) load_rxe && dummy roce0 10.9.0.1/24 fd00:9::1/64 "$mtu" && rdma link add rxe0 type rxe netdev roce0 ;;
      siw) load_siw && dummy iw0 10.9.1.1/24 fd00:9:1::1/64 "$mtu" && rdma link add siw0 type siw netdev iw0 ;;
    esac || return
  done
}
dummy() { # NETDEV IPV4 IPV6 MTU
  ip link add "$1" mtu "$4" type dummy && ip addr add "$2" dev "$1" &&
    ip addr add "$3" dev "$1" nodad && ip link set "$1" up
}
unlink_links() {
  local l
  for l in rxe0 siw0 siwcable; do rdma link delete $l 2>/dev/null; done
  for l in roce0 iw0; do ip link del $l 2>/dev/null; done
}

# two_hosts NAME [MTU]: a network namespace NAME that has no RDMA device, and a cable to it. This side is 10.9.2.1
# and has siwcable, software iWARP; that side is 10.9.2.2. Run things there with `on NAME CMD...`. It must come
# before any other network namespace, since the kernel gives RDMA devices to namespaces one by one only then.
two_hosts() {
  local mtu=${2:-1500}
  drivers && load_siw || return
  [[ $(rdma system show) == *exclusive* ]] || rdma system set netns exclusive || return
  ip netns add "$1" && ip link add cable0 mtu "$mtu" type veth peer name cable1 mtu "$mtu" netns "$1" || return
  ip addr add 10.9.2.1/24 dev cable0 && ip link set cable0 up || return
  on "$1" ip link set lo up
  on "$1" ip addr add 10.9.2.2/24 dev cable1 && on "$1" ip link set cable1 up || return
  wait_for 5 ping_once 10.9.2.2
  rdma link add siwcable type siw netdev cable0
}
# Only the network is the other host's: mounts, and so what FUSE exports there, are seen here as well.
on() { local n=$1; shift; nsenter --net="/run/netns/$n" -- "$@"; }
ping_once() { timeout 1 bash -c "exec 3<>/dev/tcp/$1/1" 2>&1 | grep -q refused; }
cable_mtu() { ip link set cable0 mtu "$2" && on "$1" ip link set cable1 mtu "$2"; } # NAME MTU
one_host() { # NAME: takes it down again
  rdma link delete siwcable 2>/dev/null
  ip link del cable0 2>/dev/null
  ip netns del "$1"
}

# --- disks -----------------------------------------------------------------------------------------------------

# disk NAME MIB [BLOCK_SIZE]: a RAM disk with a write cache to flush, discard, and (unless 4096) 512-byte blocks.
# Prints its device.
disk() {
  local d=/sys/kernel/config/nullb/$1 f
  [[ -d /sys/kernel/config/nullb ]] || modprobe null_blk nr_devices=0 || return
  mkdir "$d" || return
  echo "$2" >"$d/size"
  echo "${3:-512}" >"$d/blocksize"
  echo 1 >"$d/memory_backed"
  echo 1 >"$d/discard"
  echo 1 >"$d/cache_size"
  echo 2 >"$d/submit_queues"
  echo 1 >"$d/power" || return
  for f in "/dev/$1" "/dev/nullb$(cat "$d/index")"; do [[ -b $f ]] && { echo "$f"; return; }; done
  return 1
}

# growable NAME MIB [BLOCK_SIZE]: a disk over a file in RAM, which `grow DEVICE MIB` resizes. Prints its device.
growable() {
  modprobe loop
  truncate -s "$2M" "/dev/shm/$1" && losetup -f --show -b "${3:-512}" --direct-io=off "/dev/shm/$1"
}
grow() { truncate -s "$2M" "$(losetup -n -O BACK-FILE "$1")" && losetup -c "$1"; }

# mapped NAME DEVICE [MS]: a device over all of DEVICE, the second half of which takes MS longer for each request. Prints
# it. After "dmsetup suspend NAME" its requests have no end until "dmsetup resume NAME".
mapped() {
  local sectors half
  sectors=$(blockdev --getsz "$2") half=$((sectors / 2))
  modprobe dm-mod && modprobe dm-delay || return
  DM_DISABLE_UDEV=1 dmsetup create "$1" <<<"0 $half linear $2 0
$half $half delay $2 $half ${3:-0}" || return
  echo "/dev/mapper/$1"
}

checksum() { sha256sum <"$1" | cut -d' ' -f1; } # of a whole device or file

# --- the target ------------------------------------------------------------------------------------------------

# subsystem [-a HOSTNQN]... [-s SERIAL] [-m MODEL] NQN [DEVICE...]: its namespaces are 1, 2, 3... Any host may
# connect unless -a names those that may.
subsystem() {
  local hosts=() serial='' model='' o OPTIND OPTARG
  while getopts a:s:m: o; do
    case $o in
      a) hosts+=("$OPTARG") ;;
      s) serial=$OPTARG ;;
      m) model=$OPTARG ;;
      *) return 2 ;;
    esac
  done
  shift $((OPTIND - 1))
  local nqn=$1 s=$nvmet/subsystems/$1 nsid=0 d
  shift
  mkdir "$s" || return
  [[ -z $serial ]] || echo "$serial" >"$s/attr_serial"
  [[ -z $model ]] || echo "$model" >"$s/attr_model"
  if ((${#hosts[@]})); then
    for d in "${hosts[@]}"; do
      mkdir -p "$nvmet/hosts/$d"
      ln -s "$nvmet/hosts/$d" "$s/allowed_hosts/"
    done
  else
    echo 1 >"$s/attr_allow_any_host"
  fi
  for d; do namespace "$nqn" $((++nsid)) "$d" || return; done
}
namespace() { # NQN NSID DEVICE
  local n=$nvmet/subsystems/$1/namespaces/$2
  mkdir "$n" && echo -n "$3" >"$n/device_path" && echo 1 >"$n/enable"
}
namespace_gone() { # NQN NSID
  local n=$nvmet/subsystems/$1/namespaces/$2
  echo 0 >"$n/enable" && rmdir "$n"
}
namespace_resized() { echo 1 >"$nvmet/subsystems/$1/namespaces/$2/revalidate_size"; } # NQN NSID

# port [-i INLINE_BYTES] ID TRTYPE ADDRESS SERVICE NQN...: listens there for these subsystems.
port() {
  local inline='' family=ipv4
  if [[ $1 == -i ]]; then
    inline=$2
    shift 2
  fi
  local p=$nvmet/ports/$1 n
  [[ $2 != tcp ]] || modprobe nvmet-tcp || return
  [[ $3 != *:* ]] || family=ipv6
  mkdir "$p" || return
  echo "$2" >"$p/addr_trtype"
  echo "$family" >"$p/addr_adrfam"
  echo "$3" >"$p/addr_traddr"
  echo "$4" >"$p/addr_trsvcid"
  [[ -z $inline ]] || echo "$inline" >"$p/param_inline_data_size"
  shift 4
  for n; do ln -s "$nvmet/subsystems/$n" "$p/subsystems/" || return; done
}
port_gone() { # ID
  find "$nvmet/ports/$1/subsystems" -type l -delete && rmdir "$nvmet/ports/$1"
}

# teardown: no port, no subsystem, no disk, no link is left of what was made here.
teardown() {
  local f
  for f in "$nvmet"/ports/*; do [[ -d $f ]] && port_gone "${f##*/}"; done
  for f in "$nvmet"/subsystems/*; do
    [[ -d $f ]] || continue
    find "$f/allowed_hosts" -type l -delete
    find "$f/namespaces" -mindepth 1 -maxdepth 1 -exec sh -c 'echo 0 >"$1/enable"; rmdir "$1"' _ {} \;
    rmdir "$f"
  done
  rmdir "$nvmet"/hosts/* 2>/dev/null
  losetup -D 2>/dev/null
  [[ ! -d /dev/mapper ]] || DM_DISABLE_UDEV=1 dmsetup remove_all
  for f in /sys/kernel/config/nullb/*/; do [[ -d $f ]] && echo 0 >"$f/power" && rmdir "$f"; done
  unlink_links
}

# --- what reaches the target -----------------------------------------------------------------------------------

# trace_on: from here on every command that the target gets is noted, anew. trace_off ends it.
trace_on() {
  echo 0 >"$tracing/tracing_on"
  [[ $(cat "$tracing/buffer_size_kb") == 20480 ]] || echo 20480 >"$tracing/buffer_size_kb"
  echo 1 >"$tracing/events/nvmet/nvmet_req_init/enable"
  : >"$tracing/trace"
  echo 1 >"$tracing/tracing_on"
}
trace_off() {
  echo 0 >"$tracing/tracing_on"
  if grep -q '^overrun: [1-9]' "$tracing"/per_cpu/cpu*/stats; then fail "every command was noted" "the trace buffer ran over"; fi
}
# trace_count PATTERN: how many of them match, such as 'qid=3,.*nvme_cmd_write,' or 'nvme_cmd_flush'.
trace_count() { grep -Ec -- "$1" "$tracing/trace"; }

# --- what the kernel holds ---------------------------------------------------------------------------------------

kernel_device() { # NSID: the kernel initiator's block device of that namespace
  local d
  for d in /sys/block/nvme*n*; do
    [[ ${d##*/} =~ ^nvme[0-9]+n[0-9]+$ && $(cat "$d/nsid" 2>/dev/null) == "$1" ]] && { echo "/dev/${d##*/}"; return; }
  done
  return 1
}
qps() { rdma resource show qp 2>/dev/null | grep -c ' pid '; } # queue pairs that processes hold; the kernel's have none
state_of() { awk '{print $3}' "/proc/$1/stat"; } # PID: one letter; D is uninterruptible sleep
sessions() { # the processes that hold farblk's connections
  local p arguments
  for p in /proc/[0-9]*; do
    { mapfile -d '' -t arguments <"$p/cmdline"; } 2>/dev/null || continue
    [[ ${arguments[1]:-} == __session || ${arguments[1]:-} == connect && ${arguments[0]} == *farblk ]] && echo "${p##*/}"
  done
}
nbds_in_use() {
  local f size
  for f in /sys/block/nbd*; do
    { read -r size <"$f/size"; } 2>/dev/null || continue
    [[ -e $f/pid || $size != 0 ]] && echo "${f##*/}"
  done
}
fuse_mounts() { awk '$3 ~ /^fuse/ {print $2}' /proc/mounts; }
# nothing_left: farblk holds no device, mount, process, queue pair or state. Says what it found.
nothing_left() {
  local left
  left=$(
    nbds_in_use | sed 's/^/NBD device in use: /'
    fuse_mounts | sed 's/^/mount: /'
    sessions | sed 's/^/process: /'
    rdma resource show qp 2>/dev/null | grep ' pid ' | sed 's/^/queue pair: /'
    [[ ! -d /run/farblk ]] || find /run/farblk -mindepth 1 -type d | sed 's/^/state: /'
  )
  [[ -z $left ]] || { echo "$left"; return 1; }
}
