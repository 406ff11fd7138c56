"""What our backends hccl and ipc rely on in vLLM-Ascend: names, arguments, values, and what stands in a function.

Source of all: the files named in each row, of github:vllm-project/vllm-ascend, main branch of 2026-08-22, commit
182b75ea84. devtools/check_ascend.py compares a checkout with this table; tests/unit/devtools/test_check_ascend.py holds
that rollfleet_transport uses nothing of vLLM-Ascend that has no row, and that the stand-in of the tests keeps them.
"""

from __future__ import annotations

from dataclasses import dataclass

WRAPPER = "vllm_ascend/distributed/device_communicators/pyhccl_wrapper.py"
PACKED = "vllm_ascend/distributed/weight_transfer/packed_tensor.py"
HCCL = "vllm_ascend/distributed/weight_transfer/hccl_engine.py"
IPC = "vllm_ascend/distributed/weight_transfer/npu_ipc_engine.py"
REGISTER = "vllm_ascend/distributed/weight_transfer/__init__.py"


@dataclass(frozen=True)
class Rule:
    """Something that a file must have, at the top or within a class."""

    file: str
    name: str  # with dots within a class
    why: str
    arguments: tuple[str, ...] | None = None  # of a function, in order, without self
    value: str = ""  # that is assigned, as Python writes it
    holds: tuple[str, ...] = ()  # texts of the function's or class's body, as Python writes it


_BUFFERS = ("buffer_size_bytes", "num_buffers")
_ENDS_A_BUFFER = "sizes[buffer_idx] > target_packed_tensor_size"
RULES = (
    Rule(WRAPPER, "HCCLLibrary.__init__", "made without a path", arguments=("so_file",)),
    Rule(WRAPPER, "HCCLLibrary.hcclGetUniqueId", "makes the group's id", arguments=()),
    Rule(WRAPPER, "HCCLLibrary.hcclCommInitRank", "joins", arguments=("world_size", "unique_id", "rank")),
    Rule(
        WRAPPER,
        "HCCLLibrary.hcclBroadcast",
        "carries the bytes",
        arguments=("buf", "count", "datatype", "root", "comm", "stream"),
    ),
    Rule(WRAPPER, "HCCLLibrary.hcclCommDestroy", "leaves", arguments=("comm",)),
    Rule(
        WRAPPER,
        "HCCLLibrary.HCCL_CHECK",
        "what fails is a RuntimeError with HCCL's own words",
        arguments=("result",),
        holds=("raise RuntimeError(f'HCCL error: {error_str}')",),
    ),
    Rule(
        WRAPPER, "hcclUniqueId._fields_", "the bytes of an id (HcclInit)", value="[('internal', ctypes.c_byte * 4108)]"
    ),
    Rule(WRAPPER, "hcclDataTypeEnum.hcclUint8", "everything is sent as bytes", value="7"),
    Rule(WRAPPER, "buffer_type", "an address", value="ctypes.c_void_p"),
    Rule(WRAPPER, "aclrtStream_t", "a stream's handle", value="ctypes.c_void_p"),
    Rule(
        PACKED,
        "packed_broadcast_producer",
        "packs and sends; both sides end a buffer with the tensor that makes it too large",
        arguments=("iterator", "group", "src", "post_iter_func", *_BUFFERS),
        holds=(_ENDS_A_BUFFER, "group.broadcast(packed_tensors[buffer_idx], src=src)"),
    ),
    Rule(
        PACKED,
        "packed_broadcast_consumer",
        "receives into a new buffer each time, and hands over lists of (name, tensor)",
        arguments=("iterator", "group", "src", "post_unpack_func", *_BUFFERS),
        holds=(
            _ENDS_A_BUFFER,
            "group.broadcast(packed_tensors[buffer_idx], src=src)",
            "tensor_size = math.prod(shape) * dtype.itemsize",
            "torch.empty(packing_tensor_sizes[buffer_idx], dtype=torch.uint8, device='npu')",
        ),
    ),
    Rule(
        HCCL,
        "HCCLWeightTransferEngine.trainer_send_weights",
        "a trainer's own call of it sends over our group (HcclSender.communicator)",
        arguments=("iterator", "trainer_args"),
        holds=(
            "HCCLTrainerSendWeightsArgs(**trainer_args)",
            "packed_broadcast_producer(iterator=iterator, group=args.group, src=args.src",
            "buffer_size_bytes=args.packed_buffer_size_bytes, num_buffers=args.packed_num_buffers)",
        ),
    ),
    Rule(
        REGISTER,
        "register_engine",
        "what spec.weightTransfer.backend is called there (launch table)",
        arguments=(),
        holds=(
            "'hccl', 'vllm_ascend.distributed.weight_transfer.hccl_engine', 'HCCLWeightTransferEngine'",
            "'npu_ipc', 'vllm_ascend.distributed.weight_transfer.npu_ipc_engine', 'NPUIPCWeightTransferEngine'",
        ),
    ),
    Rule(
        IPC,
        "npu_generate_uuid",
        "names a physical NPU, for trainer and worker alike",
        arguments=("logical_device",),
        holds=("return f'{get_ip()}-{physical_device}'",),
    ),
    Rule(
        IPC,
        "NPUIPCWeightTransferUpdateInfo",
        "reads pickled handles, where VLLM_ALLOW_INSECURE_SERIALIZATION=1, as vLLM's class does",
        holds=("class NPUIPCWeightTransferUpdateInfo(IPCWeightTransferUpdateInfo)",),
    ),
    Rule(
        IPC,
        "NPUIPCWeightTransferEngine.start_weight_update",
        "prepares no layer for new weights: why its receiving is not used",
        arguments=(),
        holds=("pass",),
    ),
    Rule(
        IPC,
        "NPUIPCTrainerWeightTransferEngine.trainer_init",
        "tells whether a buffer or each tensor is described (IpcInit)",
        arguments=("cls", "init_info", "client", "source"),
        holds=("engine.client.init_weight_transfer_engine({'packed': init_info.packed})",),
    ),
    Rule(
        IPC,
        "NPUIPCTrainerWeightTransferEngine._send_unpacked",
        "describes each tensor, row by row (IpcUpdate)",
        arguments=("source",),
        holds=("weight = tensor.detach().contiguous()", "ipc_handles.append({self.npu_uuid: ipc_args})"),
    ),
    Rule(
        PACKED,
        "packed_npu_ipc_producer",
        "describes a buffer of bytes, in which tensors follow each other (IpcUpdate)",
        arguments=("iterator", "npu_uuid", "post_iter_func", "buffer_size_bytes"),
        holds=("'ipc_handle': {npu_uuid: ipc_args}", "'tensor_sizes': tensor_sizes"),
    ),
)
