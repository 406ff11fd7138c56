"""How much host memory an engine needs, from its configuration and what was seen of its model. Pure.

Message queues (vllm/distributed/device_communicators/shm_broadcast.py, the same in 0.27.1 and 0.32.0): a
ring of `max_chunks` chunks in /dev/shm, as a file that takes memory as it is written to. Before making one, both refuse
where /dev/shm has less room than that one ring (check_shm_free_space); what fills up later is a SIGBUS.
The executor (v1/executor/multiproc_executor.py) makes for each data-parallel rank one ring for its orders and one ring
of the default size for each worker's answers; groups of several workers (distributed/parallel_state.py: tensor
parallel, decode context, all of one rank) have one of 6 chunks of 4 MiB each.
"""

from rollfleet_engine.launch.facts import Facts, Platform
from rollfleet_protocol.engine_config import EngineConfig

MIB = 2**20
GIB = 2**30
CHUNKS = 10
ANSWER_BYTES = CHUNKS * (24 * MIB + 2)  # one reader: the executor
ORDER_CHUNK_MIB = 16  # VLLM_MQ_MAX_CHUNK_BYTES_MB (vllm/envs.py)
ORDER_CHUNK_VARIABLE = "VLLM_MQ_MAX_CHUNK_BYTES_MB"
GROUP_BYTES = 6 * 4 * MIB
GROUPS = 3


def workers_of(config: EngineConfig) -> int:
    """Workers of one data-parallel rank in this pod: tensor times pipeline parallelism, spread over the nodes.

    A queue has room in shared memory for readers of its own node only.
    """
    return config.tensor_parallel_size * config.pipeline_parallel_size // config.node_count


def _number(word: str) -> int | None:
    return int(word) if word.isascii() and word.isdecimal() and len(word) < 6 else None


def needs_queues(config: EngineConfig, facts: Facts) -> bool:
    """Whether workers are processes of their own: with several of them, and always on the CPU (platforms/cpu.py)."""
    several = workers_of(config) * config.data_parallel_size * config.node_count > 1
    return facts.platform is Platform.CPU or several


def largest_queue_bytes(config: EngineConfig, facts: Facts) -> int:
    """Of the largest single ring."""
    return max(ANSWER_BYTES, _order_bytes(config, facts))


def queues_bytes(config: EngineConfig, facts: Facts) -> int:
    """Of all rings together, each filled."""
    workers = workers_of(config)
    groups = GROUPS * GROUP_BYTES if workers > 1 else 0
    return config.data_parallel_size * (_order_bytes(config, facts) + workers * ANSWER_BYTES + groups)


def _order_bytes(config: EngineConfig, facts: Facts) -> int:
    chunk = _number(facts.environ.get(ORDER_CHUNK_VARIABLE, ""))
    return _ring_bytes((ORDER_CHUNK_MIB if chunk is None else chunk) * MIB, workers_of(config))


def _ring_bytes(chunk: int, readers: int) -> int:
    """Each chunk has a flag of a byte for its writer and each of its readers."""
    return CHUNKS * (chunk + 1 + readers)


def sleeping_bytes(config: EngineConfig, facts: Facts) -> int:
    """What sleep level 1 needs at least: vllm-ascend's CaMemAllocator copies the weights to host memory.

    Ranks of a mixture of experts may share the experts among them, so one copy is what is certain.
    """
    return facts.model.least_bytes // config.node_count if _may_sleep(config, facts) else 0


def _may_sleep(config: EngineConfig, facts: Facts) -> bool:
    """The CPU back end ignores sleep."""
    return facts.platform is Platform.ASCEND and config.sleep_mode
