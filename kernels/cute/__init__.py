"""Device vocabulary in the CuTe DSL, shared by the kernels of several GPU generations."""
