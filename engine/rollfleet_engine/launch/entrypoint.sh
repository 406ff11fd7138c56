#!/bin/bash
# The entry point of the engine's image: sets CANN's environment up, where the base has CANN, and becomes the launcher;
# or the command that it is given, so that a trainer in this image has CANN too.
#
# What CANN's own images do in their entry point (Ascend/cann-container-image, cann/*/Dockerfile): toolkit, the compiler
# that Triton-Ascend calls, and NNAL. An entry point of ours would do without it otherwise.
for file in /usr/local/Ascend/ascend-toolkit/set_env.sh /usr/local/Ascend/cann-*/share/info/ascendnpu-ir/bin/set_env.sh; do
  if [[ -r $file ]]; then
    source "$file"
  fi
done
if [[ -r /usr/local/Ascend/nnal/atb/set_env.sh ]]; then
  source /usr/local/Ascend/nnal/atb/set_env.sh "--cxx_abi=${ATB_CXX_ABI:-1}"
fi
if (( $# )); then
  exec "$@"
fi
exec python3 -m rollfleet_engine.launch
