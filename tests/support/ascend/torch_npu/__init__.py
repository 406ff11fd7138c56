"""Stands in for torch_npu: its handles of NPU memory, over named files of the CPU's shared memory.

Names, signatures and forms of values are torch_npu's; what is behind them is the CPU, so nothing here says that an NPU
does the same.
"""

from torch_npu.multiprocessing import reductions

reductions._add_reductions_methods()
