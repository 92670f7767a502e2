#!/bin/sh
# numba uses a cache of compiled kernels only where it may write, and an image's file system is read-only: give it a
# copy (8 MB) in /tmp. Without it every start would compile for half a minute.
set -eu
if [ ! -d "$NUMBA_CACHE_DIR" ]; then
    cp -r "$KERNELS" "$NUMBA_CACHE_DIR"
fi
exec isthmus "$@"
