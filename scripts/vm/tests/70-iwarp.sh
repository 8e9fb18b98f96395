# shellcheck shell=bash
# needs: bin/farblk
# limit: 500
# Software iWARP, no RDMA device of this host used, against Linux's target on siw: the whole of the main job, with
# CRC32C on and off.
# shellcheck source=scripts/vm/farblk.sh
. "${BASH_SOURCE[0]%/*}/../farblk.sh"

one_disk siw
for crc in on off; do
  name="CRC $crc" way=(--provider iwarp)
  [[ $crc == on ]] || way+=(--disable-crc)
  attempt "$name: discover" bash -c "farblk discover -a '${address[siw]}' ${way[*]} | grep -F '$nqn'"
  nbd_round "$name" "${address[siw]}"
  fuse_round "$name" "${address[siw]}"
  interop_round "$name" "${address[siw]}" nbd
done
connected "no queue pair" -a "${address[siw]}" -n "$nqn" -i 2 --export none
is "no queue pair is held through the kernel" 0 "$(qps)"
is "the provider" iwarp "$(field .provider)"
disconnected "no queue pair"
