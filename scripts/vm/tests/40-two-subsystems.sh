# shellcheck shell=bash
# needs: bin/farblk
# Two subsystems at once, one with three namespaces, one of these with 4096-byte blocks: all are listed, and
# disconnecting one leaves the other alone. Namespaces that grow, come and go. The ANA log of the first.
# shellcheck source=scripts/vm/farblk.sh
. "${BASH_SOURCE[0]%/*}/../farblk.sh"

one_disk
other=nqn.2024-01.org.example:three
a=$(disk a 16) || bail "a disk"
b=$(disk b 32 4096) || bail "a disk with 4096-byte blocks"
c=$(growable c 16) || bail "a disk that grows"
e=$(disk e 16) || bail "a disk"
must subsystem -s SERIAL2 "$other" "$a" "$b" "$c"
for id in 1 2; do must ln -s "$nvmet/subsystems/$other" "$nvmet/ports/$id/subsystems/"; done

written() { awk '{print $5}' "/sys/block/${1#/dev/}/stat"; } # DEVICE: write requests so far
groups() { farblk ana-log -o json "$first" | jq -c '[.ngrps, ."ANA groups"[0].state, ."ANA groups"[0].NSIDS]'; }
exports() { farblk list -o json | jq -r --argjson n "$1" '.devices[] | select(.NameSpace == $n) | .DevicePath'; } # NSID: its device
has_size() { [[ $(blockdev --getsize64 "$1") == "$2" ]]; }                                                      # DEVICE BYTES
usable() { dd if="$(exports "$1")" of=/dev/null bs=4k count=1 iflag=direct status=none; }                           # NSID
not_exported() { [[ -z $(exports "$1") ]]; }                                                                        # NSID
writing() { (($(written "$1") > $2 + 20)); }

port=0
for link in rxe siw; do
  ana=$nvmet/ports/$((++port))/ana_groups
  connected "$link" -a "${address[$link]}" -n "$nqn" --export nbd
  first=$(export_of nbd)
  connected "$link" -a "${address[$link]}" -n "$other" --export nbd
  is "$link: three namespaces" 3 "$(field '.namespaces | length')"
  big=$(export_of nbd 2)
  is "$link: its blocks" 4096 "$(blockdev --getss "$big")"
  list=$(farblk list -o json) || fail "$link: list"
  is "$link: list shows all four" 4 "$(jq '.devices | length' <<<"$list")"
  is "$link: list has the sector sizes" "512 512 4096 512" \
    "$(jq -r --arg n "$nqn" '[.devices | sort_by(.SubsystemNQN != $n, .NameSpace)[].SectorSize] | map(tostring) | join(" ")' <<<"$list")"
  is "$link: all are live" live "$(jq -r '[.devices[].State] | unique | join(" ")' <<<"$list")"
  attempt "$link: list-subsys" bash -c "farblk list-subsys | grep -F '$nqn' && farblk list-subsys | grep -F '$other'"
  attempt "$link: id-ns" farblk id-ns "$big"
  attempt "$link: id-ctrl" farblk id-ctrl "$first"
  is "$link: ana-log" '[1,"optimized",[1]]' "$(groups)"
  echo non-optimized >"$ana/1/ana_state"
  is "$link: ana-log after a change" '[1,"non-optimized",[1]]' "$(groups)"
  attempt "$link: list after a change" wait_for 5 bash -c 'farblk list -o json | jq -e ".devices[] | select(.ANAState == \"non-optimized\")"'
  mkdir "$ana/2"
  is "$link: ana-log of two groups" '[2,"non-optimized",[1]]' "$(groups)"
  rmdir "$ana/2"
  smallest=4k fio_verify "$link, 4096-byte blocks" "$big" --numjobs=2
  file_system "$link, 4096-byte blocks (E14)" "$big"

  third=$(export_of nbd 3) size=$(($(blockdev --getsize64 "$c") + (8 << 20)))
  must grow "$c" $((size >> 20))
  must namespace_resized "$other" 3
  attempt "$link: a namespace grows, and so does its device (H34)" wait_for 5 has_size "$third" $size
  must namespace "$other" 4 "$e"
  attempt "$link: a namespace is added, and has a device (H34)" wait_for 5 usable 4
  fourth=$(exports 4)
  must namespace_gone "$other" 4
  attempt "$link: it is gone, and so is its device" wait_for 5 not_exported 4
  attempt "$link: the kernel has forgotten it" wait_for 5 has_size "$fourth" 0

  fio --name=steady --filename="$first" --direct=1 --ioengine=libaio --rw=randwrite --bs=4k --iodepth=8 --size=8m \
    --time_based --runtime=8 --verify=crc32c --verify_state_save=0 --minimal --output="$scratch/steady" 2>"$scratch/steady.err" &
  steady=$!
  before=$(written "$first")
  attempt "$link: fio runs on the first" wait_for 10 writing "$first" "$before"
  attempt "$link: disconnect the second meanwhile" farblk disconnect -n "$other"
  is "$link: list shows the one left" 1 "$(farblk list -o json | jq '.devices | length')"
  if wait $steady; then ok "$link: fio on the first ran on"; else fail "$link: fio on the first ran on" "$(cat "$scratch/steady.err")"; fi
  disconnected "$link"
done
