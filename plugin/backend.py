"""The class that `--attention-backend blasst` names: the one of the platform. Loaded in workers."""

from vllm.platforms import current_platform

from blasst.plugin import request_tap

if current_platform.is_cpu():
    from blasst.plugin.cpu_backend import BlasstCPUBackend as BlasstBackend
else:
    from blasst.plugin.cuda_backend import BlasstCUDABackend as BlasstBackend

__all__ = ["BlasstBackend"]

# A worker loads its model runner before its model's layers, which load this module.
request_tap.install()
