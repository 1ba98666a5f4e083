#!/bin/sh
# Prints what is in an image, as CycloneDX: images/sbom.sh docker|podman|buildah IMAGE
set -eu
case "${1##*/}" in
  buildah)
    container=$("$1" from --pull-never "$2")
    trap '"$1" rm "$container" > /dev/null' EXIT
    "$1" run "$container" -- cat /opt/kftrain/sbom.json
    ;;
  *) "$1" run --rm --entrypoint cat "$2" /opt/kftrain/sbom.json ;;
esac
