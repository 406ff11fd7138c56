"""What each version answers, known beforehand: from the tool that made the models, or from the simulator's function."""

from examples.demo import environment as around
from examples.demo.environment import Environment, folders
from rollfleet_engine.simulator.model import greedy
from rollfleet_engine.simulator.tokens import encode
from rollfleet_engine.weights.coverage import read_model_tensors
from rollfleet_engine.weights.staging import stage_checkpoint
from tests.e2e.conftest import REAL

TOKENS = 64
PROMPTS = tuple(f"What is {number} and {number * 7}?" for number in range(8))


def known_outputs(environment: Environment, engines: str) -> dict[int, dict[str, list[int]]]:
    """Version -> prompt -> greedy tokens."""
    if engines == REAL:
        return around.known_outputs(environment.models.real)
    known = {}
    for version, folder in enumerate(folders(environment.models.simulated)):
        staged = stage_checkpoint(folder, ".", read_model_tensors(folder), confined=False)
        staged.close()
        known[version] = {prompt: list(greedy(staged.digest, encode(prompt), TOKENS)) for prompt in PROMPTS}
    return known
