"""What the kernels spend their time on: timelines of warps, and counters of Nsight Compute."""
