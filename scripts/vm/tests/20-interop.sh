# shellcheck shell=bash
# needs: bin/farblk
# What farblk wrote, the kernel's own initiator reads back, and the reverse.
# shellcheck source=scripts/vm/farblk.sh
. "${BASH_SOURCE[0]%/*}/../farblk.sh"

one_disk
interop_round "rxe, nbd" "${address[rxe]}" nbd
interop_round "siw, nbd" "${address[siw]}" nbd
mkdir -p "$scratch/files"
interop_round "siw, fuse" "${address[siw]}" "fuse=$scratch/files"
