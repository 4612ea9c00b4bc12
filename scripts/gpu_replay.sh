#!/usr/bin/env bash
# Replay every operator on the GPU at hand, at the sizes of a layer of Qwen3-30B-A3B, in under five
# minutes: torch's kernels, layerbisect's Triton forms, and those of SGLang, aiter,
# TransformerEngine and flash-attn where they are installed.
# Writes DIR/replay.json and DIR/replay.md. Usage: bash scripts/gpu_replay.sh DIR [--sizes small]
# PYTHON names the interpreter of an environment with layerbisect, torch and triton.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHONPATH=. exec "${PYTHON:-python3}" scripts/gpu_replay.py "$@"
