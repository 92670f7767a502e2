#!/bin/sh
# numba uses a cache of compiled kernels only where it may write, and an image's file system is read-only: give it a
# copy (8 MB) in /tmp. Without it every start would compile for half a minute.
set -eu

# A service that ends when its work is done is started again with each service that depends on it. DONE lists files, one
# in each volume that the work fills. While each of them holds the command and a checksum of the image's packages, there
# is nothing to do.
if [ -n "${DONE:-}" ]; then
    work="$* $(cksum <"$PACKAGES")"
    for mark in $DONE; do
        [ "$(cat "$mark" 2>/dev/null)" = "$work" ] || todo=1
    done
    if [ -z "${todo:-}" ]; then
        echo "done before: isthmus $*"
        exit
    fi
fi
if [ ! -d "$NUMBA_CACHE_DIR" ]; then
    cp -r "$KERNELS" "$NUMBA_CACHE_DIR"
fi
[ -n "${DONE:-}" ] || exec isthmus "$@"
isthmus "$@"
for mark in $DONE; do
    mkdir -p "${mark%/*}"
    echo "$work" >"$mark"
done
