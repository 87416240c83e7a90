"""Who trains? Stock FSDP engines on every platform."""
