#!/usr/bin/env bash
# What is worth most, in at most five minutes: the machine, and the speed of dray, of a hand-written loop and of the
# stock Trainer. PYTHON is any Python with torch and transformers; page.md, figures.jsonl and the logs go to OUT.
# shellcheck source=benchmarks/gpu/kept.sh
source "$(dirname "${BASH_SOURCE[0]}")/kept.sh"

kept::run speed 340 4.8 machine,gpt2,handwritten,stock,llama "$@"
