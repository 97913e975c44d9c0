#!/usr/bin/env bash
# Everything that a machine with one GPU can tell, in one call of under nine minutes, as one JSON and a summary of it:
#
#   benchmarks/gpu/kit.sh results.json              on the CUDA runtime and NCCL that are found
#   benchmarks/gpu/kit.sh --fakes results.json      on the stand-ins of tests/fakes, to try the kit itself
#   benchmarks/gpu/kit.sh --only staging out.json   some parts
#   benchmarks/gpu/kit.sh --ahead out.json          where there are many processors: parts import beside each other
#   benchmarks/gpu/kit.sh --only checks a.json      half of them, and --only times b.json the other half: where the
#                                                   first call may be cut short, the second still has its time
#
# It builds the package from this tree with what is there: a C++ compiler, and pybind11's headers or torch. Each part
# has a deadline of its own; one that fails is reported and the others go on. A part whose library is missing says so.
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "$0")/kit.py" "$@"
