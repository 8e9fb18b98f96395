# shellcheck shell=bash
# needs: bin/farblk
# limit: 400
# What cannot work ends with one clear line and an exit status other than 0 within 5 s, and leaves nothing behind.
# shellcheck source=scripts/vm/farblk.sh
. "${BASH_SOURCE[0]%/*}/../farblk.sh"

modules=/lib/modules/$(uname -r)
a=${address[rxe]} b=${address[siw]}
host1=nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555
none=(--export none)
plain_user=(setpriv --reuid 65534 --regid 65534 --clear-groups --inh-caps=-all --bounding-set=-all -- env XDG_RUNTIME_DIR=/run/plain)
clean() { attempt "nothing left behind" wait_for_nothing; }

# before there is an RDMA device
refuses 'no RDMA device' farblk connect --provider verbs -a 127.0.0.1 -n "$nqn" "${none[@]}"
refuses 'no RDMA device' farblk discover --provider verbs -a 127.0.0.1
clean

# without the nbd module
module=$(find "$modules/" -name 'nbd.ko*')
must mv "$module" /run/
must links
d=$(disk disk1 16) || bail "a disk"
must subsystem "$nqn" "$d"
must subsystem -a "$host1" nqn.2024-01.org.example:closed "$d"
must port 1 rdma "$a" 4420 "$nqn" nqn.2024-01.org.example:closed
must port 2 rdma "$b" 4420 "$nqn" nqn.2024-01.org.example:closed
must port 3 tcp "$b" 4421 "$nqn"
refuses 'nbd.*(module|kernel)|modprobe nbd' farblk connect -a "$b" -n "$nqn" --export nbd
clean
must mv "/run/${module##*/}" "$module"
must modprobe nbd nbds_max=2

for at in "$a" "$b"; do
  refuses 'nothing listens|refused|not listening' farblk connect -a "$at" -s 4499 -n "$nqn" "${none[@]}"
  refuses 'nowhere|subsystem NQN' farblk connect -a "$at" -n nqn.2024-01.org.example:nowhere "${none[@]}"
  refuses 'not allowed|host' farblk connect -a "$at" -n nqn.2024-01.org.example:closed -q nqn.2024-01.org.example:someone-else "${none[@]}"
done
connected "an allowed host" -a "$a" -n nqn.2024-01.org.example:closed -q "$host1" "${none[@]}"
disconnected "an allowed host" nqn.2024-01.org.example:closed

# a port of another transport, names and addresses that lead nowhere
refuses 'farblk connect: .+' farblk connect -a "$b" -s 4421 -n "$nqn" "${none[@]}"
refuses 'farblk connect: .+' farblk connect --provider iwarp -a "$b" -s 4421 -n "$nqn" "${none[@]}"
refuses 'no-such-host.invalid' farblk connect -a no-such-host.invalid -n "$nqn" "${none[@]}"
# nobody answers: the 3 s that --connect-timeout gives to finding the address, and the program's start and end
REFUSE_SECONDS=8 refuses '10\.9\.0\.77|unreachable|answer' farblk connect -a 10.9.0.77 -n "$nqn" "${none[@]}"
REFUSE_SECONDS=8 refuses '10\.9\.1\.77|unreachable|answer' farblk connect -a 10.9.1.77 -n "$nqn" "${none[@]}"
refuses '203\.0\.113\.1|unreachable|route' farblk connect -a 203.0.113.1 -n "$nqn" "${none[@]}"
refuses '203\.0\.113\.1|unreachable|route' farblk connect --provider iwarp -a 203.0.113.1 -n "$nqn" "${none[@]}"
clean

# twice the same
connected "first" -a "$b" -n "$nqn" --export nbd=/dev/nbd0
refuses 'already connected' farblk connect -a "$b" -n "$nqn" "${none[@]}"
refuses 'already connected' farblk connect -a "::ffff:$b" -n "$nqn" "${none[@]}"
refuses '/dev/nbd0.*(busy|in use|already)|(busy|in use).*/dev/nbd0' farblk connect -a "$a" -n "$nqn" --export nbd=/dev/nbd0
refuses "farblk0 is connected to $nqn already, at $b:4420" farblk connect -a "$a" -n "$nqn" "${none[@]}"
refuses "farblk0 is connected to $nqn already" farblk connect -a "$b" -n "$nqn" -q "$host1" "${none[@]}"
is "the first is still there" live "$(farblk list -o json | jq -r '.devices[].State')"
connected "second, allowed" -a "$b" -n "$nqn" -D "${none[@]}"
attempt "disconnect --all" farblk disconnect --all
clean
qemu-img create -q -f raw "$scratch/raw" 4M
qemu-nbd -f raw -c /dev/nbd0 "$scratch/raw" || fail "qemu-nbd"
refuses '/dev/nbd0.*(busy|in use|already)|(busy|in use).*/dev/nbd0' farblk connect -a "$b" -n "$nqn" --export nbd=/dev/nbd0
is "the other program's device is untouched" $((4 << 20)) "$(blockdev --getsize64 /dev/nbd0)"
attempt "qemu-nbd gives it back" qemu-nbd -d /dev/nbd0
refuses '/dev/nbd9' farblk connect -a "$b" -n "$nqn" --export nbd=/dev/nbd9
clean

# without privilege
install -d -m 700 -o 65534 -g 65534 /run/plain
chmod 666 /dev/infiniband/*
refuses 'root' "${plain_user[@]}" farblk connect -a "$b" -n "$nqn" --export nbd
refuses 'memlock|ulimit -l' "${plain_user[@]}" bash -c 'ulimit -l 64; exec farblk "$@"' _ connect --provider verbs -a "$b" -n "$nqn" "${none[@]}"
is "nothing left in its state folder" "" "$(find /run/plain -mindepth 1 -type d -name 'farblk[0-9]*')"
clean

# what makes no sense; the command line's own tests have many more of these
refuses 'nqn' farblk connect -a "$b" -n not-an-nqn "${none[@]}"
refuses '1\.2\.3\.4\.5' farblk connect -a 1.2.3.4.5 -n "$nqn"
refuses 'queue' farblk connect -a "$b" -n "$nqn" -Q 5
refuses 'no such' farblk id-ctrl /dev/nbd1
refuses 'size' farblk target --listen 127.0.0.1:0 -n "$nqn" --size 12Q
clean
