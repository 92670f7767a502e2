#!/bin/sh
# Creates a bucket at a MinIO, and everybody's user and policy, from what `isthmus access` wrote: store-users.sh URL BUCKET
# [DONE]. DONE is a file that holds a checksum of what was written: while it is that of now, there is nothing to do.
# Secrets go by variables and standard input: a command line can be read by everybody on a machine.
set -eu
folder=${ISTHMUS_ACCESS:-/run/isthmus}
url=$1 bucket=$2 done=${3:-}

sum=$(cat "$folder/store/users" "$folder"/policies/minio/*.json | cksum) || done= # an image without cksum
if [ -n "$done" ] && [ "$(cat "$done" 2>/dev/null)" = "$bucket $sum" ]; then
    echo "done before"
    exit
fi

MC_HOST_store="${url%%://*}://$(cat "$folder/store/root-user"):$(cat "$folder/store/root-password")@${url#*://}"
export MC_HOST_store

mc mb --ignore-existing "store/$bucket"
while read -r name secret; do
    mc admin policy create store "$name" "$folder/policies/minio/$name.json" </dev/null
    printf '%s\n%s\n' "$name" "$secret" | mc admin user add store
    said=$(mc admin policy attach store "$name" --user "$name" 2>&1 </dev/null) || case $said in
    *"already in effect"*) ;;
    *)
        echo "$said" >&2
        exit 1
        ;;
    esac
done <"$folder/store/users"

[ -z "$done" ] || echo "$bucket $sum" >"$done"
