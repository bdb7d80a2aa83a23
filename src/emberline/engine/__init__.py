"""The engine: schedule, run, update. What holds policy or talks to the process is torch-free; what computes is not."""
