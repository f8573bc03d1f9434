#!/usr/bin/env bash
# Whether dray trains right on this GPU, in at most four minutes: checks, losses, kernels, waits, resume, then
# checkpoints and memory. PYTHON is any Python with torch and transformers; page.md, figures.jsonl and the logs go to OUT.
# shellcheck source=benchmarks/gpu/kept.sh
source "$(dirname "${BASH_SOURCE[0]}")/kept.sh"

kept::run correct 300 3.9 \
  checks,preflight,strategies,attention,documents,syncs,resume,deterministic,generate,checkpoint,memory "$@"
