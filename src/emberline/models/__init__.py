"""One decoder made of parts, chosen by config. `config` is torch-free; the rest is not."""
