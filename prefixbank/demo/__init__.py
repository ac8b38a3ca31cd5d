"""Hold what `prefixbank demo` runs on: a small real model and a few-shot prompt."""
