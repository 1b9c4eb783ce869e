#!/bin/sh
# A wrapper as many keep it: settings first, then the program.
set -eu
export OMP_NUM_THREADS=1
python ddp_snapshot.py "$@"
echo "done"
