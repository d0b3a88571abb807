"""Benchmarks: the device, planted models, and ours beside unpatched llama.cpp. See README.md."""
