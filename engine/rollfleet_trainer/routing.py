"""Routed experts of an answer, as vLLM encodes them: base64 of a .npy file (vllm/utils/serial_utils.py, 0.32)."""

from __future__ import annotations

import base64
import binascii
import io

import numpy as np

from rollfleet_trainer.rollout_errors import RoutedExpertsError
from rollfleet_trainer.samples import Experts


def decode_routed_experts(encoded: str, tokens: int) -> Experts:
    """(tokens - 1, layers, experts per token): the last token sampled has been through no layer yet.

    `tokens`: of prompt and output. Nothing is unpickled. Raises RoutedExpertsError for anything but such an array of
    integers, none below 0.
    """
    try:
        raw = base64.b64decode(encoded, validate=True)
        stream = io.BytesIO(raw)
        array = np.lib.format.read_array(stream, allow_pickle=False)
    except (binascii.Error, ValueError, OSError, EOFError) as error:
        raise RoutedExpertsError(f"routed_experts: cannot be decoded: {error}") from error
    if stream.tell() != len(raw):
        raise RoutedExpertsError(f"routed_experts: {len(raw) - stream.tell()} bytes follow the array")
    if array.ndim != 3 or not np.issubdtype(array.dtype, np.integer):
        raise RoutedExpertsError(f"routed_experts: is {array.dtype} {list(array.shape)}, not integers in 3 dimensions")
    if len(array) != tokens - 1:
        raise RoutedExpertsError(f"routed_experts: has {len(array)} rows, {tokens} tokens have {tokens - 1}")
    if array.size and int(array.min()) < 0:
        raise RoutedExpertsError(f"routed_experts: names expert {int(array.min())}")
    return array
