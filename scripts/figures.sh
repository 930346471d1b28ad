#!/bin/sh
# Picks the figures of the README and of docs/ out of a folder with results: figures.sh RESULTS [FOLDER, docs/figures unless given].
# `spile bench all --out RESULTS` makes them. Each is light or dark by its reader's setting.
set -eu

results=${1:?usage: figures.sh RESULTS [FOLDER]}
folder=${2:-docs/figures}
most_bytes=61440

mkdir -p "$folder"
status=0
for name in depth depth-intervals shape layers-direct-read layers-ratio warmup density paths-ratio aggregate-read aggregate-ratio; do
    if [ ! -f "$results/$name.svg" ]; then
        echo "$name.svg is not in $results" >&2
        status=1
        continue
    fi
    bytes=$(wc -c < "$results/$name.svg")
    if [ "$bytes" -gt "$most_bytes" ]; then
        echo "$name.svg has $bytes bytes: too many for a repository" >&2
        status=1
        continue
    fi
    cp "$results/$name.svg" "$folder/"
    echo "$folder/$name.svg"
done
exit $status
