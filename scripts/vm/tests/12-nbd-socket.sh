# shellcheck shell=bash
# needs: bin/farblk
# The main job over RoCE and iWARP: an NBD server on a socket, for fio, libnbd's tools and QEMU's.
# shellcheck source=scripts/vm/farblk.sh
. "${BASH_SOURCE[0]%/*}/../farblk.sh"

one_disk
for link in rxe siw; do socket_round "$link" "${address[$link]}"; done
