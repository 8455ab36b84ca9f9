"""What the machine has: GPU, RAM under cgroup limits, cores under affinity."""
