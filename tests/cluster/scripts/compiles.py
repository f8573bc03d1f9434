"""All ranks of a node compile the same eight programs at the same moments; knows only torchrun's variables."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
values = torch.arange(8.0)
for number in range(8):
    compiled = torch.compile(lambda x, factor=number + 0.5: torch.sin(x) * factor)
    dist.barrier()
    torch.testing.assert_close(compiled(values), torch.sin(values) * (number + 0.5))
    torch._dynamo.reset()
dist.barrier()
dist.destroy_process_group()
print("compiled 8", flush=True)
