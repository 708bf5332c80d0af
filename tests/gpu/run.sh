#!/usr/bin/env bash
# Runs everything that needs a GPU, in a few minutes on one. Usage: bash tests/gpu/run.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
python -c 'import torch; assert torch.cuda.is_available(), "no CUDA device here"; print(torch.__version__, torch.cuda.get_device_name())'
timeout 480 python -m pytest tests/gpu -q "$@"
