#!/usr/bin/env bash
# All committed results: Open MPI and MPICH, 2 and 4 ranks, then the page. Some 18 minutes; leave the machine alone meanwhile.
#
#   benchmarks/run_all.sh                 # python of PATH: samestep, Open MPI, torch, ml_dtypes, matplotlib
#   MPICH_PYTHON=... benchmarks/run_all.sh  # another environment, with MPICH; without it a new one is made
#   RANKS="2" benchmarks/run_all.sh --quick # arguments go to collectives.py instead of --full
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
results=${RESULTS:-benchmarks/results}
arguments=("$@")
[ ${#arguments[@]} -gt 0 ] || arguments=(--full)
mkdir -p "$results"

measure() {  # python, name of the MPI library, ranks
  echo "== $2, $3 ranks"
  "$1" benchmarks/collectives.py -n "$3" "${arguments[@]}" --json "$results/$2-$3.json"
}

if [ -z "${MPICH_PYTHON:-}" ]; then
  venv=$(mktemp -d)
  trap 'rm -rf "$venv"' EXIT
  echo "== making an environment with MPICH"
  "$python" -m venv "$venv"
  "$venv/bin/pip" install --quiet ".[mpich]" ml_dtypes
  MPICH_PYTHON=$venv/bin/python
fi

for ranks in ${RANKS:-2 4}; do
  measure "$python" openmpi "$ranks"
  measure "$MPICH_PYTHON" mpich "$ranks"
done
found=("$results"/*-[0-9]*.json)
if [ "$results" = benchmarks/results ]; then
  "$python" benchmarks/report.py "${found[@]}"
fi
"$python" benchmarks/goals.py "${found[@]}"
