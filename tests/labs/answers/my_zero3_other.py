"""Another ZeRO-3: what autograd saves of the parameters is replaced by where to find it again."""

import torch
import torch.distributed as dist


class SavedTensorHooks:
    """A unit's parameters have no storage between their uses; hooks on saved tensors (not on
    storages) gather them again when backward asks for the first one.
    """

    def __init__(self, units, lr):
        self.lr, self.units = lr, [Unit(module) for module in units]

    def step(self):
        for unit in self.units:
            unit.shard -= self.lr * unit.gradient
            unit.gradient.zero_()

    def gather(self):
        for unit in self.units:
            unit.attach()


class Unit:
    def __init__(self, module):
        self.parameters, n = list(module.parameters()), dist.get_world_size()
        self.sizes = [p.numel() for p in self.parameters]
        self.shapes = [p.shape for p in self.parameters]
        flat = torch.cat([p.data.flatten() for p in self.parameters])
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % n))
        self.shard = flat.chunk(n)[dist.get_rank()].clone()
        self.gradient, self.flat = torch.zeros_like(self.shard), None
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.ready)
        self.forward, module.forward = module.forward, self.call
        self.detach()

    def attach(self):
        self.flat = self.shard.new_empty(len(self.shard) * dist.get_world_size())
        dist.all_gather_into_tensor(self.flat, self.shard)
        parts = self.flat[: sum(self.sizes)].split(self.sizes)
        for parameter, part, shape in zip(self.parameters, parts, self.shapes, strict=True):
            parameter.data = part.view(shape)

    def detach(self):
        self.flat = None
        for parameter in self.parameters:
            parameter.data = self.shard.new_empty(1).expand(parameter.shape)  # of that shape

    def call(self, *inputs):
        self.attach()
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            result = self.forward(*inputs)
        self.detach()
        self.missing = len(self.parameters)
        return result

    def pack(self, tensor):
        if tensor.untyped_storage().data_ptr() != self.flat.untyped_storage().data_ptr():
            return tensor
        return tensor.storage_offset(), tensor.size(), tensor.stride()

    def unpack(self, saved):
        if isinstance(saved, torch.Tensor):
            return saved
        if self.flat is None:
            self.attach()
        offset, size, stride = saved
        return self.flat.as_strided(size, stride, offset)

    def ready(self, parameter):
        self.missing -= 1
        if self.missing:
            return
        self.detach()
        flat = torch.cat([p.grad.flatten() for p in self.parameters])
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % dist.get_world_size()))
        own = torch.empty_like(self.shard)
        dist.reduce_scatter_tensor(own, flat)
        self.gradient += own / dist.get_world_size()
        for p in self.parameters:
            p.grad = None
