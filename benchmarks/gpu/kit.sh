#!/usr/bin/env bash
# Everything that a machine with one GPU can tell, in one call and some minutes, as one JSON:
#
#   benchmarks/gpu/kit.sh results.json            the package of this Python, the CUDA runtime and NCCL it finds
#   benchmarks/gpu/kit.sh --fakes results.json    the same on the stand-ins of tests/fakes, to try the kit itself
#
# Each part has a deadline of its own; one that fails is reported and the others go on.
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD/tests/fakes${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python3}
if [ "${1:-}" = "--fakes" ]; then
  shift
  while IFS='=' read -r name value; do export "$name=$value"; done < <(
    "$python" -c 'import fake_libraries; [print(f"{k}={v}") for k, v in fake_libraries.environment().items()]'
  )
  export FAKE_GPU_DEVICES=1
fi
out=$(realpath -m "${1:-gpu_results.json}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# part NAME SECONDS COMMAND...: what it prints after "RESULT " is its result.
part() {
  local name=$1 seconds=$2 begin=$SECONDS code
  shift 2
  timeout -k 10 "$seconds" "$@" >"$work/$name.log" 2>&1 </dev/null
  code=$?
  printf '%s\t%s\t%s\n' "$name" "$code" "$((SECONDS - begin))" >>"$work/parts"
  echo "$name: exit code $code after $((SECONDS - begin)) s"
}

part doctor 60 "$python" -m samestep doctor --json
part one_rank 120 "$python" benchmarks/gpu/checks.py nccl 0 1 "$work/one"
ranks() {  # NAME BACKEND: two ranks that share the device
  part "$1" 120 bash -c '
    "$0" benchmarks/gpu/checks.py "$1" 1 2 "$2" >"$2.rank1" 2>&1 & other=$!
    "$0" benchmarks/gpu/checks.py "$1" 0 2 "$2"; code=$?
    wait $other || code=$?; cat "$2.rank1"; exit $code' "$python" "$2" "$work/$1"
}
ranks two_ranks_through_the_host native
export NCCL_MULTI_RANK_GPU_ENABLE=1
ranks two_ranks_through_nccl nccl

"$python" - "$work" "$out" <<'PYTHON'
import json, pathlib, sys

work, out = map(pathlib.Path, sys.argv[1:])
results = {}
for line in (work / "parts").read_text().splitlines():
    name, code, seconds = line.split("\t")
    log = (work / f"{name}.log").read_text(errors="replace")
    found = [json.loads(row[7:]) for row in log.splitlines() if row.startswith("RESULT ")]
    results[name] = {"exit_code": int(code), "seconds": int(seconds), "results": found, "log": log[-4000:]}
out.write_text(json.dumps(results, indent=1) + "\n")
PYTHON
echo "written: $out"
! cut -f2 "$work/parts" | grep -qv '^0$'
