"""`penstock serve examples/digits/app.py:Digits` serves this model.

A model is a class with

- `load(device)`, called once in each worker before the first batch;
- `predict(items)`, which takes a list of items and returns a list with one result per item. An exception in place of a
  result fails only its own item;

and optionally `preprocess(item)` and `postprocess(result)` for one item each, `warmup()`, which returns sample items
for the first runs, `unload()`, and `inputs` and `outputs` for Open Inference clients. `@penstock.model(...)` sets
defaults for batching. The class itself is in `src/penstock/cli/demo/digits.py`, because `penstock demo` serves it too.
"""

from __future__ import annotations

from penstock.cli.demo.digits import Digits

__all__ = ["Digits"]
